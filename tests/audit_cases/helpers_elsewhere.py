"""jit functions that the kernels of this set call from another file."""

import triton
import triton.language as tl


@triton.jit
def page_base(page, stride_page):
    return page * stride_page


@triton.jit
def page_base_wide(page, stride_page):
    return page.to(tl.int64) * stride_page


@triton.jit
def load_page_id(table_ptr, row, stride_row, col):
    return tl.load(table_ptr + row * stride_row + col)


@triton.jit
def split_slot(slot, page_size):
    return slot // page_size, slot % page_size


META = {}
