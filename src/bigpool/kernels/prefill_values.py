"""Passes over the values before prefill attention with fp8 weights: e4m3 codes of values with a scale per channel and head.

Scratch holds tiles of the attention, each transposed, [HEAD_DIM, TILE], as products of fp8 want their second operand: tiles of
a request one after another, the first at first_value_tile.
"""

import triton
import triton.language as tl

from ._formats import encode_fp8
from ._paging import load_rows, locate_tile, page_slot_ptrs
from ._ragged import first_scratch_row, first_value_tile, is_seen, request_lengths, seen_tiles, tile_of_visit
from .cache import _is_finite, _row_scale


@triton.jit(do_not_specialize=["num_pages", "max_seq_len", "stride_table_req"])
def prefill_max_values_kernel(
    v_ptr, maxima_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_q_ptr, num_pages, max_seq_len,
    stride_v_page, stride_v_slot, stride_v_head, stride_table_req, CFG: tl.constexpr,
):  # fmt: skip
    """Grid (num_reqs, shares, num_kv_heads): maxima [num_reqs, shares, num_kv_heads, HEAD_DIM] fp32 of magnitudes.

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
    v_head_ptr = v_ptr + kv_head * stride_v_head
    offs_n = tl.arange(0, CFG.tile)
    HEAD_DIM_PAD: tl.constexpr = CFG.head_dim_pad
    most = tl.zeros([HEAD_DIM_PAD], tl.float32)
    for visit in tl.range(share, visits, tl.num_programs(1)):
        tile = tile_of_visit(visit, sink_tiles, gap, CFG)
        page_idx, slot, first_pos, _mask_key, mask_row = locate_tile(
            tile, table_row_ptr, seq_len, num_pages, CFG.page_size, CFG.tile, CFG.tiles_per_page
        )
        mask_row = mask_row & is_seen(first_pos + offs_n, low, CFG)
        v_ptrs = page_slot_ptrs(v_head_ptr, page_idx, slot, stride_v_page, stride_v_slot)
        v = load_rows(v_ptrs, mask_row, CFG.head_dim, CFG.head_dim_pad).to(tl.float32)
        most = tl.maximum(most, tl.max(tl.where(_is_finite(v), tl.abs(v), 0.0), 0))
    offs_d = tl.arange(0, CFG.head_dim_pad)
    row = (req * tl.num_programs(1) + share) * tl.num_programs(2) + kv_head
    tl.store(maxima_ptr + row * CFG.head_dim + offs_d, most, mask=offs_d < CFG.head_dim)


@triton.jit(do_not_specialize=["num_pages", "max_seq_len", "max_keys", "stride_table_req"])
def prefill_quantise_values_kernel(
    v_ptr, maxima_ptr, scales_ptr, codes_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_q_ptr,
    num_pages, max_seq_len, max_keys, stride_v_page, stride_v_slot, stride_v_head, stride_table_req,
    SHARES: tl.constexpr, CFG: tl.constexpr, OPERAND_ORDER: tl.constexpr = False,
):  # fmt: skip
    """Grid (num_reqs, programs, num_kv_heads): codes [max_tiles, num_kv_heads, HEAD_DIM, TILE], scales [num_reqs, num_kv_heads,
    HEAD_DIM]. What is not finite becomes the NaN code. A request that does not fit writes nothing. OPERAND_ORDER: key
    16 i + 8 h + 2 t + e of a tile at 16 i + 4 t + 2 h + e, where the first operand of a product of fp8 has what a thread
    holds of scores.
    """
    HEAD_DIM: tl.constexpr = CFG.head_dim
    TILE: tl.constexpr = CFG.tile
    req = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(2).to(tl.int64)
    num_kv_heads = tl.num_programs(2)
    _, q_len, seq_len = request_lengths(req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len)
    first_row = first_scratch_row(req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len)
    if (q_len <= 0) | (first_row + seq_len > max_keys):
        return
    low, visits, sink_tiles, gap = seen_tiles(q_len, seq_len, CFG)
    offs_n, offs_s, offs_d = tl.arange(0, TILE), tl.arange(0, SHARES), tl.arange(0, CFG.head_dim_pad)
    place = offs_n
    if OPERAND_ORDER:
        place = (offs_n & -15) | ((offs_n & 6) << 1) | ((offs_n & 8) >> 2)
    mask_d = offs_d < HEAD_DIM
    maxima_head_ptr = maxima_ptr + (req * SHARES * num_kv_heads + kv_head) * HEAD_DIM
    maxima_ptrs = maxima_head_ptr + offs_s[:, None] * (num_kv_heads * HEAD_DIM) + offs_d[None, :]
    scale = _row_scale(tl.max(tl.load(maxima_ptrs, mask=mask_d[None, :], other=0.0), 0), 448.0)
    if tl.program_id(1) == 0:
        tl.store(scales_ptr + (req * num_kv_heads + kv_head) * HEAD_DIM + offs_d, scale, mask=mask_d)

    table_row_ptr = block_table_ptr + req * stride_table_req
    v_head_ptr = v_ptr + kv_head * stride_v_head
    first_tile = first_value_tile(first_row, req, CFG)
    for visit in tl.range(tl.program_id(1), visits, tl.num_programs(1)):
        tile = tile_of_visit(visit, sink_tiles, gap, CFG)
        page_idx, slot, first_pos, _mask_key, mask_row = locate_tile(
            tile, table_row_ptr, seq_len, num_pages, CFG.page_size, TILE, CFG.tiles_per_page
        )
        mask_row = mask_row & is_seen(first_pos + offs_n, low, CFG)
        v_ptrs = page_slot_ptrs(v_head_ptr, page_idx, slot, stride_v_page, stride_v_slot)
        v = load_rows(v_ptrs, mask_row, HEAD_DIM, CFG.head_dim_pad).to(tl.float32)
        codes = encode_fp8(tl.where(_is_finite(v), tl.div_rn(v, tl.broadcast_to(scale[None, :], v.shape)), float("nan")), "e4m3")
        codes_tile_ptr = codes_ptr + ((first_tile + tile) * num_kv_heads + kv_head) * (HEAD_DIM * TILE)
        tl.store(codes_tile_ptr + offs_d[None, :] * TILE + place[:, None], codes, mask=mask_d[None, :] & (offs_n >= 0)[:, None])
