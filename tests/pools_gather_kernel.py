"""The smallest paged gather, as it is usually written and as it should be: subjects of the tests of sparse pools."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_narrow(pool_ptr, page_idx_ptr, out_ptr, stride_page, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    page_idx = tl.load(page_idx_ptr + row)
    offs = tl.arange(0, WIDTH)
    tl.store(out_ptr + row * WIDTH + offs, tl.load(pool_ptr + page_idx * stride_page + offs))


@triton.jit
def gather_wide(pool_ptr, page_idx_ptr, out_ptr, stride_page, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    page_idx = tl.load(page_idx_ptr + row).to(tl.int64)
    offs = tl.arange(0, WIDTH)
    tl.store(out_ptr + row * WIDTH + offs, tl.load(pool_ptr + page_idx * stride_page + offs))
