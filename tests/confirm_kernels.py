"""Kernels that the tests of confirmation launch, and how."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from bigpool.audit.launch.hooks import Hooks
from bigpool.confirm.record import Recorder


@triton.jit
def read_pages(out_ptr, pool_ptr, table_ptr, stride_page, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    page = tl.load(table_ptr + pid)
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + pid * BLOCK + offs, tl.load(pool_ptr + page * stride_page + offs))


@triton.jit
def read_and_tell(out_ptr, told_ptr, pool_ptr, table_ptr, stride_page, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    page = tl.load(table_ptr + pid)
    offs = tl.arange(0, BLOCK)
    tl.store(told_ptr + pid, page * 2 - page)
    tl.store(out_ptr + pid * BLOCK + offs, tl.load(pool_ptr + page.to(tl.int64) * 8 + page * stride_page + offs))


@triton.jit
def add_two_pools(out_ptr, k_ptr, v_ptr, table_ptr, stride_page, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    page = tl.load(table_ptr + pid)
    offs = page * stride_page + tl.arange(0, BLOCK)
    tl.store(out_ptr + pid * BLOCK + tl.arange(0, BLOCK), tl.load(k_ptr + offs) + tl.load(v_ptr + offs))


@triton.jit
def write_rows(out_ptr, in_ptr, stride_row, n_rows, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row >= n_rows:
        return
    offs = tl.arange(0, BLOCK)
    x = tl.load(in_ptr + row.to(tl.int64) * BLOCK + offs)
    tl.store(out_ptr + row * stride_row + offs, -x)


@triton.jit
def masked_by_product(out_ptr, in_ptr, rows, columns, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = rows * columns
    tl.store(out_ptr + offs, tl.load(in_ptr + offs), mask=offs < total)


@triton.jit
def cancels(out_ptr, table_ptr, stride_row, BLOCK: tl.constexpr):
    row = tl.load(table_ptr)
    far = row * stride_row
    near = far - (row - 1) * stride_row
    tl.store(out_ptr + near + tl.arange(0, BLOCK), 1.0)


@triton.jit
def two_walls(out_ptr, in_ptr, stride_in, stride_out, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(in_ptr + row * stride_in + offs)
    tl.store(out_ptr + row * stride_out + offs, x)


@triton.jit
def add_one(in_ptr, stride_row, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(in_ptr + row.to(tl.int64) * stride_row + offs)
    tl.store(in_ptr + row * stride_row + offs, x + 1.0)


@triton.jit
def beside(out_ptr, table_ptr, stride_row, BLOCK: tl.constexpr):
    row = tl.load(table_ptr)
    tl.store(out_ptr + row * stride_row + tl.arange(0, BLOCK), 1.0)


@triton.jit
def by_asm(out_ptr, table_ptr, stride_row, BLOCK: tl.constexpr):
    row = tl.load(table_ptr)
    offs = tl.arange(0, BLOCK)
    x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [offs], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out_ptr + row * stride_row + offs, x)


def recorded(kernel: Any, grid: tuple[int, ...], *args: Any, **constexprs: Any) -> Recorder:
    """One captured launch; nothing is executed."""
    found = Recorder(execute=False)
    with Hooks(found).installed():
        kernel[grid](*args, **constexprs)
    return found


def table(*ids: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(ids, dtype=dtype)
