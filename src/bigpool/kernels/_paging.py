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


@triton.jit
def locate_tile(
    tile, table_row_ptr, kv_end, num_pages, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, TILES_PER_PAGE: tl.constexpr
):
    """Page ids, slots, the position of the first lane, which lanes hold a key, and which of those have a page of the pool.

    `TILES_PER_PAGE` 0: tiles gather keys from several pages; else they end at page ends.
    """
    offs_n = tl.arange(0, TILE)
    if TILES_PER_PAGE == 0:
        first_pos = tile * TILE
        pos = first_pos + offs_n
        mask_key = pos < kv_end
        slot = pos % PAGE_SIZE
        page_idx = load_page_idx(table_row_ptr, pos // PAGE_SIZE, mask_key)
    else:
        page_col = tile // TILES_PER_PAGE
        first_slot = tile % TILES_PER_PAGE * TILE
        slot = first_slot + offs_n
        first_pos = page_col * PAGE_SIZE + first_slot
        mask_key = (slot < PAGE_SIZE) & (first_pos + offs_n < kv_end)
        page_idx = load_page_idx(table_row_ptr, page_col, True)
    slots_in_pool = tl.where((page_idx >= 0) & (page_idx < num_pages), PAGE_SIZE, 0)
    mask_row = mask_key & (slot < slots_in_pool)
    return page_idx, slot, first_pos, mask_key, mask_row


@triton.jit
def load_rows(ptrs, mask_row, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr):
    """Rows [N, WIDTH_PAD] at `ptrs` [N]; 0 in masked rows and in the padding."""
    offs_d = tl.arange(0, WIDTH_PAD)
    mask = mask_row[:, None]
    if WIDTH != WIDTH_PAD:
        mask = mask & (offs_d < WIDTH)[None, :]
    return tl.load(ptrs[:, None] + offs_d[None, :], mask=mask, other=0)
