"""Passes over the keys before prefill attention with int8 scores: codes and scales of keys, less a mean key.

Stateless: the mean of all keys that some query token sees, codes in scratch. Rows of scratch are keys, request after request,
whatever their pages; requests without query tokens have none.
Kept: the mean of a few keys at the head of the request, so that a code depends on nothing but its key and the prefix, and is
written once, into a buffer with the pages of the cache. A scale below 0 says that the mean was taken from its key.
"""

import triton
import triton.language as tl

from ._masks import tile_of, tiles_before
from ._paging import load_page_idx, load_rows, locate_tile, page_slot_ptrs
from ._ragged import first_scratch_row, is_seen, request_lengths, seen_tiles, tile_of_visit
from .cache import _is_finite, _round, _row_scale, _store_int8


@triton.jit(do_not_specialize=["num_pages", "max_seq_len", "stride_table_req"])
def prefill_sum_keys_kernel(
    k_ptr, sums_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_q_ptr, num_pages, max_seq_len,
    stride_k_page, stride_k_slot, stride_k_head, stride_table_req, CFG: tl.constexpr,
):  # fmt: skip
    """Grid (num_reqs, shares, num_kv_heads): sums [num_reqs, shares, num_kv_heads, HEAD_DIM] fp32, a share of the tiles each.

    What is not finite counts as 0: it must not reach the rows that do not see it.
    """
    req = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    kv_head = tl.program_id(2).to(tl.int64)
    _, q_len, seq_len = request_lengths(req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len)
    if q_len <= 0:
        return
    low, visits, sink_tiles, gap = seen_tiles(q_len, seq_len, CFG)
    table_row_ptr = block_table_ptr + req * stride_table_req
    k_head_ptr = k_ptr + kv_head * stride_k_head
    offs_n = tl.arange(0, CFG.tile)
    HEAD_DIM_PAD: tl.constexpr = CFG.head_dim_pad
    total = tl.zeros([HEAD_DIM_PAD], tl.float32)
    for visit in tl.range(share, visits, tl.num_programs(1)):
        tile = tile_of_visit(visit, sink_tiles, gap, CFG)
        page_idx, slot, first_pos, _mask_key, mask_row = locate_tile(
            tile, table_row_ptr, seq_len, num_pages, CFG.page_size, CFG.tile, CFG.tiles_per_page
        )
        mask_row = mask_row & is_seen(first_pos + offs_n, low, CFG)
        k_ptrs = page_slot_ptrs(k_head_ptr, page_idx, slot, stride_k_page, stride_k_slot)
        k = load_rows(k_ptrs, mask_row, CFG.head_dim, CFG.head_dim_pad).to(tl.float32)
        total += tl.sum(tl.where(_is_finite(k), k, 0.0), 0)
    offs_d = tl.arange(0, CFG.head_dim_pad)
    row = (req * tl.num_programs(1) + share) * tl.num_programs(2) + kv_head
    tl.store(sums_ptr + row * CFG.head_dim + offs_d, total, mask=offs_d < CFG.head_dim)


@triton.jit(do_not_specialize=["num_pages", "max_seq_len", "max_keys", "stride_table_req"])
def prefill_quantise_kernel(
    k_ptr, sums_ptr, means_ptr, codes_ptr, scales_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_q_ptr,
    num_pages, max_seq_len, max_keys, stride_k_page, stride_k_slot, stride_k_head, stride_table_req,
    SHARES: tl.constexpr, CFG: tl.constexpr,
):  # fmt: skip
    """Grid (num_reqs, programs, num_kv_heads): codes [max_keys, num_kv_heads, HEAD_DIM], scales [max_keys, num_kv_heads], means.

    A key with NaN or infinity, or whose page is not in the pool, gets scale NaN. A request that does not fit writes nothing.
    """
    HEAD_DIM: tl.constexpr = CFG.head_dim
    HEAD_DIM_PAD: tl.constexpr = CFG.head_dim_pad
    req = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(2).to(tl.int64)
    num_kv_heads = tl.num_programs(2)
    _, q_len, seq_len = request_lengths(req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len)
    first_row = first_scratch_row(req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len)
    if (q_len <= 0) | (first_row + seq_len > max_keys):
        return
    low, visits, sink_tiles, gap = seen_tiles(q_len, seq_len, CFG)
    offs_n, offs_s, offs_d = tl.arange(0, CFG.tile), tl.arange(0, SHARES), tl.arange(0, HEAD_DIM_PAD)
    mask_d = offs_d < HEAD_DIM
    sums_head_ptr = sums_ptr + (req * SHARES * num_kv_heads + kv_head) * HEAD_DIM
    sums_ptrs = sums_head_ptr + offs_s[:, None] * (num_kv_heads * HEAD_DIM) + offs_d[None, :]
    sums = tl.load(sums_ptrs, mask=mask_d[None, :], other=0.0)
    count = seq_len - low
    if CFG.spec.sink_tokens:
        SINK_TOKENS: tl.constexpr = CFG.spec.sink_tokens
        count += tl.minimum(low, SINK_TOKENS)
    mean = tl.div_rn(tl.sum(sums, 0), tl.zeros([HEAD_DIM_PAD], tl.float32) + tl.maximum(count, 1))
    if tl.program_id(1) == 0:
        tl.store(means_ptr + (req * num_kv_heads + kv_head) * HEAD_DIM + offs_d, mean, mask=mask_d)

    table_row_ptr = block_table_ptr + req * stride_table_req
    k_head_ptr = k_ptr + kv_head * stride_k_head
    for visit in tl.range(tl.program_id(1), visits, tl.num_programs(1)):
        tile = tile_of_visit(visit, sink_tiles, gap, CFG)
        page_idx, slot, first_pos, mask_key, mask_row = locate_tile(
            tile, table_row_ptr, seq_len, num_pages, CFG.page_size, CFG.tile, CFG.tiles_per_page
        )
        k_ptrs = page_slot_ptrs(k_head_ptr, page_idx, slot, stride_k_page, stride_k_slot)
        x = load_rows(k_ptrs, mask_row, HEAD_DIM, HEAD_DIM_PAD).to(tl.float32) - mean[None, :]
        x = tl.where(mask_row[:, None], x, float("nan"))
        mask_key = mask_key & is_seen(first_pos + offs_n, low, CFG)
        row_ptr = scales_ptr + (first_row + first_pos) * num_kv_heads + kv_head
        codes_row_ptr = codes_ptr + ((first_row + first_pos) * num_kv_heads + kv_head) * HEAD_DIM
        codes_ptrs = codes_row_ptr + (offs_n * (num_kv_heads * HEAD_DIM))[:, None] + offs_d[None, :]
        _store_int8(x, codes_ptrs, row_ptr + offs_n * num_kv_heads, mask_key, mask_key[:, None] & mask_d[None, :])


@triton.jit
def int8_rows(x):
    """(codes [M, D] int8, scales [M]) of rows; a row with NaN or infinity has scale NaN."""
    x = x.to(tl.float32)
    bad = tl.max(tl.where(_is_finite(x), 0, 1), 1) > 0
    x = tl.where(bad[:, None], 0.0, x)
    scale = _row_scale(tl.max(tl.abs(x), 1), 127.0)
    codes = _round(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))).to(tl.int8)
    return codes, tl.where(bad, float("nan"), scale)


@triton.jit
def _head_mean(table_row_ptr, k_head_ptr, num_pages, stride_k_page, stride_k_slot, CFG: tl.constexpr):
    """The mean [HEAD_DIM_PAD] of the second half of the keys that are never coded, as numbers of the cache's dtype.

    What is not finite, or not in the pool, counts as 0. The first keys, where models put odd ones, are not among them.
    """
    HALF: tl.constexpr = CFG.exact_keys // 2
    pos = HALF + tl.arange(0, HALF)
    page_idx = load_page_idx(table_row_ptr, pos // CFG.page_size, pos >= 0)
    mask_row = (page_idx >= 0) & (page_idx < num_pages)
    k_ptrs = page_slot_ptrs(k_head_ptr, page_idx, pos % CFG.page_size, stride_k_page, stride_k_slot)
    k = load_rows(k_ptrs, mask_row, CFG.head_dim, CFG.head_dim_pad)
    x = k.to(tl.float32)
    return (tl.sum(tl.where(_is_finite(x), x, 0.0), 0) * (1.0 / HALF)).to(k.dtype).to(tl.float32)


@triton.jit(do_not_specialize=["num_pages", "max_seq_len", "stride_table_req"])
def prefill_keep_kernel(
    k_ptr, means_ptr, codes_ptr, scales_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_q_ptr, num_pages, max_seq_len,
    stride_k_page, stride_k_slot, stride_k_head, stride_table_req, CFG: tl.constexpr,
):  # fmt: skip
    """Grid (num_reqs, programs, num_kv_heads): codes [num_pages, PAGE_SIZE, num_kv_heads, HEAD_DIM] and scales of the new keys.

    means [num_reqs, num_kv_heads, HEAD_DIM] is for the attention that follows. Of a key the smaller of the key and the key less
    the mean is rounded. A key with NaN or infinity gets scale NaN.
    """
    HEAD_DIM: tl.constexpr = CFG.head_dim
    PAGE_SIZE: tl.constexpr = CFG.page_size
    EXACT_KEYS: tl.constexpr = CFG.exact_keys
    req = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(2).to(tl.int64)
    num_kv_heads = tl.num_programs(2)
    _, q_len, seq_len = request_lengths(req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len)
    if (q_len <= 0) | (seq_len <= EXACT_KEYS):
        return
    table_row_ptr = block_table_ptr + req * stride_table_req
    k_head_ptr = k_ptr + kv_head * stride_k_head
    mean = _head_mean(table_row_ptr, k_head_ptr, num_pages, stride_k_page, stride_k_slot, CFG)
    offs_n, offs_d = tl.arange(0, CFG.tile), tl.arange(0, CFG.head_dim_pad)
    mask_d = offs_d < HEAD_DIM
    if tl.program_id(1) == 0:
        tl.store(means_ptr + (req * num_kv_heads + kv_head) * HEAD_DIM + offs_d, mean, mask=mask_d)

    first = tl.maximum(seq_len - q_len, EXACT_KEYS)
    begin = tile_of(first, PAGE_SIZE, CFG.tile, CFG.tiles_per_page) + tl.program_id(1)
    end = tiles_before(seq_len, PAGE_SIZE, CFG.tile, CFG.tiles_per_page)
    for tile in tl.range(begin, end, tl.num_programs(1)):
        page_idx, slot, first_pos, _mask_key, mask_row = locate_tile(
            tile, table_row_ptr, seq_len, num_pages, PAGE_SIZE, CFG.tile, CFG.tiles_per_page
        )
        mask_row = mask_row & (first_pos + offs_n >= first)
        k_ptrs = page_slot_ptrs(k_head_ptr, page_idx, slot, stride_k_page, stride_k_slot)
        x = load_rows(k_ptrs, mask_row, HEAD_DIM, CFG.head_dim_pad).to(tl.float32)
        less = x - mean[None, :]
        takes = tl.max(tl.abs(less), 1) < tl.max(tl.abs(x), 1)
        codes, scales = int8_rows(tl.where(takes[:, None], less, x))
        row_strides = PAGE_SIZE * num_kv_heads, num_kv_heads
        scale_ptrs = page_slot_ptrs(scales_ptr + kv_head, page_idx, slot, row_strides[0], row_strides[1])
        codes_head_ptr = codes_ptr + kv_head * HEAD_DIM
        codes_ptrs = page_slot_ptrs(codes_head_ptr, page_idx, slot, row_strides[0] * HEAD_DIM, row_strides[1] * HEAD_DIM)
        tl.store(scale_ptrs, tl.where(takes, -scales, scales), mask=mask_row)
        tl.store(codes_ptrs[:, None] + offs_d[None, :], codes, mask=mask_row[:, None] & mask_d[None, :])
