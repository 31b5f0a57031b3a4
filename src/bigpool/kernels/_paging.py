"""The one place where a page id becomes an address.

A page id is widened on the load that makes it, so that no later product can be evaluated in 32 bits. What is added to it
(slot, dim) stays 32 bits wide: launchers check that one page spans fewer than 2^31 elements.
"""

import triton
import triton.language as tl


@triton.jit
def load_page_idx(table_row_ptr, page_col, mask):
    """Page ids, int64, for columns `page_col` (scalar or [TILE]) of one request's row; -1 where `mask` is false."""
    return tl.load(table_row_ptr + page_col, mask=mask, other=-1).to(tl.int64)


@triton.jit
def page_slot_ptrs(head_ptr, page_idx, slot, stride_page, stride_slot):
    """Pointers [TILE] to the rows `slot` of pages `page_idx` (scalar or [TILE]) of one kv head."""
    return head_ptr + page_idx * stride_page + slot * stride_slot


@triton.jit
def split_slot(slot, PAGE_SIZE: tl.constexpr):
    """(page id, slot in the page), int64 as `slot` is, of a slot 0 or greater of the whole cache."""
    page_idx = slot // PAGE_SIZE
    return page_idx, slot - page_idx * PAGE_SIZE
