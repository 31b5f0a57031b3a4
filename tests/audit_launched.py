"""Kernels that the tests of the launch front end launch."""

import triton
import triton.language as tl


@triton.jit
def gather_pages(out_ptr, pool_ptr, table_ptr, stride_page, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid)
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + pid.to(tl.int64) * BLOCK + offs, tl.load(pool_ptr + page * stride_page + offs))


@triton.jit
def gather_pages_wide(out_ptr, pool_ptr, table_ptr, stride_page, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    page = tl.load(table_ptr + pid).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + pid * BLOCK + offs, tl.load(pool_ptr + page * stride_page + offs))


@triton.autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128}, num_warps=8)], key=["n_cols"])
@triton.heuristics({"EVEN": lambda args: args["n_cols"] % 64 == 0})
@triton.jit
def copy_rows(out_ptr, in_ptr, n_cols, stride_row, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(in_ptr + row * stride_row + cols, mask=EVEN or cols < n_cols)
    tl.store(out_ptr + row.to(tl.int64) * stride_row + cols, x, mask=cols < n_cols)


@triton.jit
def ignored(out_ptr, pool_ptr, table_ptr, stride_page, BLOCK: tl.constexpr):
    page = tl.load(table_ptr)
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(pool_ptr + page * stride_page + offs))  # bigpool: ignore[BP101] a test


@triton.jit
def bounded(out_ptr, pool_ptr, table_ptr, stride_page, BLOCK: tl.constexpr):
    page = tl.load(table_ptr)  # bigpool: assume page < 2**11, the pool is fixed
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(pool_ptr + page * stride_page + offs))


@triton.jit
def ignored_in_vain(out_ptr, pool_ptr, table_ptr, stride_page, BLOCK: tl.constexpr):
    page = tl.load(table_ptr).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(pool_ptr + page * stride_page + offs))  # bigpool: ignore[BP101] needed no more


@triton.jit
def bounded_product(out_ptr, table_ptr, BLOCK: tl.constexpr):
    first = tl.load(table_ptr)
    rows = tl.load(table_ptr + 1)
    # bigpool: assume first * rows < 2**30, the host checks it
    tl.store(out_ptr + first * rows + tl.arange(0, BLOCK), 1.0)


@triton.jit
def masked_by_area(out_ptr, rows, columns, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, 0.0, mask=offs < rows * columns)


@triton.jit
def broken(out_ptr):
    tl.store(out_ptr, not_defined)  # noqa: F821
