"""Chunked prefill over a paged cache: ragged requests, one tile of keys for all query heads of a kv head; exact or int8 scores.

Rows of a tile are query tokens x query heads of one kv head: row r is token r // GROUP, head r % GROUP.
Scores are kept in units of log2, so that every exponential is exp2.

int8: two passes before the attention write, for each key, the codes and the scale of the key less the mean key of its request
and head. What is taken from every key adds the same number to all scores of a row, which the softmax does not see; the soft cap
and lse do, and get it back.
Rows of that scratch are keys, request after request, whatever their pages; requests without query tokens have none.
"""

import triton
import triton.language as tl

from ._masks import first_key, tile_bounds, tile_of, tiles_before, visible_keys
from ._paging import load_rows, locate_tile, page_slot_ptrs
from .cache import _is_finite, _round, _row_scale, _store_int8

LN2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
REQS_AT_ONCE = tl.constexpr(128)


@triton.jit
def _clamped_len(req, mask, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len):
    """Keys, int64, of requests that have query tokens; 0 for others."""
    q_len = tl.load(cu_seqlens_q_ptr + req + 1, mask=mask, other=0) - tl.load(cu_seqlens_q_ptr + req, mask=mask, other=0)
    seq_len = tl.load(seq_lens_ptr + req, mask=mask, other=0).to(tl.int64)
    return tl.where(q_len > 0, tl.maximum(tl.minimum(seq_len, max_seq_len), 0), 0)


@triton.jit
def _first_scratch_row(req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len):
    """The scratch row, int64, of a request's first key."""
    offs = tl.arange(0, REQS_AT_ONCE)
    row = tl.sum(_clamped_len(offs, offs < req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len), 0)
    for before in tl.range(REQS_AT_ONCE, req, REQS_AT_ONCE):
        more = before + offs
        row += tl.sum(_clamped_len(more, more < req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len), 0)
    return row


@triton.jit
def _lengths(req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len, SPEC: tl.constexpr):
    """(first query token, q_len, seq_len, first key that any query token sees) of a request."""
    q_start = tl.load(cu_seqlens_q_ptr + req)
    q_len = tl.load(cu_seqlens_q_ptr + req + 1) - q_start
    seq_len = tl.maximum(tl.minimum(tl.load(seq_lens_ptr + req), max_seq_len), 0)
    return q_start, q_len, seq_len, first_key(seq_len - q_len, SPEC)


@triton.jit(do_not_specialize=["num_pages", "max_seq_len", "stride_table_req"])
def prefill_sum_keys_kernel(
    k_ptr, sums_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_q_ptr, num_pages, max_seq_len,
    stride_k_page, stride_k_slot, stride_k_head, stride_table_req,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr, TILES_PER_PAGE: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Grid (num_reqs, shares, num_kv_heads): sums [num_reqs, shares, num_kv_heads, HEAD_DIM] fp32, a share of the tiles each.

    What is not finite counts as 0: it must not reach the rows that do not see it.
    """
    req = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    kv_head = tl.program_id(2).to(tl.int64)
    _, q_len, seq_len, low = _lengths(req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len, SPEC)
    if q_len <= 0:
        return
    table_row_ptr = block_table_ptr + req * stride_table_req
    k_head_ptr = k_ptr + kv_head * stride_k_head
    offs_n = tl.arange(0, TILE)
    first_tile = tile_of(low, PAGE_SIZE, TILE, TILES_PER_PAGE)
    end_tile = tiles_before(seq_len, PAGE_SIZE, TILE, TILES_PER_PAGE)
    total = tl.zeros([HEAD_DIM_PAD], tl.float32)
    for tile in tl.range(first_tile + share, end_tile, tl.num_programs(1)):
        page_idx, slot, first_pos, _mask_key, mask_row = locate_tile(
            tile, table_row_ptr, seq_len, num_pages, PAGE_SIZE, TILE, TILES_PER_PAGE
        )
        mask_row = mask_row & (first_pos + offs_n >= low)
        k_ptrs = page_slot_ptrs(k_head_ptr, page_idx, slot, stride_k_page, stride_k_slot)
        k = load_rows(k_ptrs, mask_row, HEAD_DIM, HEAD_DIM_PAD).to(tl.float32)
        total += tl.sum(tl.where(_is_finite(k), k, 0.0), 0)
    offs_d = tl.arange(0, HEAD_DIM_PAD)
    row = (req * tl.num_programs(1) + share) * tl.num_programs(2) + kv_head
    tl.store(sums_ptr + row * HEAD_DIM + offs_d, total, mask=offs_d < HEAD_DIM)


@triton.jit(do_not_specialize=["num_pages", "max_seq_len", "max_keys", "stride_table_req"])
def prefill_quantise_kernel(
    k_ptr, sums_ptr, means_ptr, codes_ptr, scales_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_q_ptr,
    num_pages, max_seq_len, max_keys,
    stride_k_page, stride_k_slot, stride_k_head, stride_table_req,
    SHARES: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr, TILES_PER_PAGE: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Grid (num_reqs, programs, num_kv_heads): codes [max_keys, num_kv_heads, HEAD_DIM], scales [max_keys, num_kv_heads], means.

    A key with NaN or infinity, or whose page is not in the pool, gets scale NaN. A request that does not fit writes nothing.
    """
    req = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(2).to(tl.int64)
    num_kv_heads = tl.num_programs(2)
    _, q_len, seq_len, low = _lengths(req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len, SPEC)
    first_row = _first_scratch_row(req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len)
    if (q_len <= 0) | (first_row + seq_len > max_keys):
        return
    offs_n, offs_s, offs_d = tl.arange(0, TILE), tl.arange(0, SHARES), tl.arange(0, HEAD_DIM_PAD)
    mask_d = offs_d < HEAD_DIM
    sums_head_ptr = sums_ptr + (req * SHARES * num_kv_heads + kv_head) * HEAD_DIM
    sums_ptrs = sums_head_ptr + offs_s[:, None] * (num_kv_heads * HEAD_DIM) + offs_d[None, :]
    sums = tl.load(sums_ptrs, mask=mask_d[None, :], other=0.0)
    mean = tl.sum(sums, 0) / tl.maximum(seq_len - low, 1).to(tl.float32)
    if tl.program_id(1) == 0:
        tl.store(means_ptr + (req * num_kv_heads + kv_head) * HEAD_DIM + offs_d, mean, mask=mask_d)

    table_row_ptr = block_table_ptr + req * stride_table_req
    k_head_ptr = k_ptr + kv_head * stride_k_head
    first_tile = tile_of(low, PAGE_SIZE, TILE, TILES_PER_PAGE)
    end_tile = tiles_before(seq_len, PAGE_SIZE, TILE, TILES_PER_PAGE)
    for tile in tl.range(first_tile + tl.program_id(1), end_tile, tl.num_programs(1)):
        page_idx, slot, first_pos, mask_key, mask_row = locate_tile(
            tile, table_row_ptr, seq_len, num_pages, PAGE_SIZE, TILE, TILES_PER_PAGE
        )
        k_ptrs = page_slot_ptrs(k_head_ptr, page_idx, slot, stride_k_page, stride_k_slot)
        x = load_rows(k_ptrs, mask_row, HEAD_DIM, HEAD_DIM_PAD).to(tl.float32) - mean[None, :]
        x = tl.where(mask_row[:, None], x, float("nan"))
        mask_key = mask_key & (first_pos + offs_n >= low)
        row_ptr = scales_ptr + (first_row + first_pos) * num_kv_heads + kv_head
        codes_row_ptr = codes_ptr + ((first_row + first_pos) * num_kv_heads + kv_head) * HEAD_DIM
        codes_ptrs = codes_row_ptr + (offs_n * (num_kv_heads * HEAD_DIM))[:, None] + offs_d[None, :]
        _store_int8(x, codes_ptrs, row_ptr + offs_n * num_kv_heads, mask_key, mask_key[:, None] & mask_d[None, :])


@triton.jit
def _int8_rows(x):
    """(codes [M, D] int8, scales [M]) of rows; a row with NaN or infinity has scale NaN."""
    x = x.to(tl.float32)
    bad = tl.max(tl.where(_is_finite(x), 0, 1), 1) > 0
    x = tl.where(bad[:, None], 0.0, x)
    scale = _row_scale(tl.max(tl.abs(x), 1), 127.0)
    codes = _round(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))).to(tl.int8)
    return codes, tl.where(bad, float("nan"), scale)


@triton.jit
def _add_values(acc, v, p, visible, EDGE: tl.constexpr):
    if EDGE:
        # 0 * NaN is NaN: a NaN in a later token must reach only the rows that see it.
        finite = _is_finite(v.to(tl.float32))
        bad_key = tl.max(tl.where(finite, 0, 1), 1)
        sees_bad = tl.max(tl.where(visible, bad_key[None, :], 0), 1)
        acc = tl.where(sees_bad[:, None] > 0, float("nan"), acc)
        v = tl.where(finite, v, 0.0)
    return tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["num_pages", "max_seq_len", "max_keys", "stride_table_req"])
def prefill_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_q_ptr,
    scale_log2, num_pages, max_seq_len, max_keys,
    stride_q_token, stride_q_head,
    stride_k_page, stride_k_slot, stride_k_head,
    stride_v_page, stride_v_slot, stride_v_head,
    stride_out_token, stride_out_head, stride_table_req,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr, TILES_PER_PAGE: tl.constexpr, BLOCK_M: tl.constexpr, SPEC: tl.constexpr,
    k_scale_ptr=None, k_mean_ptr=None,
):  # fmt: skip
    """Grid (row tiles, num_kv_heads, num_reqs), the longest row tiles first.

    With `k_scale_ptr` [max_keys, num_kv_heads] and `k_mean_ptr` [num_reqs, num_kv_heads, HEAD_DIM] scores are int8: `k_ptr` is
    the codes of the scratch, `stride_k_slot` is from key to key and `stride_k_page` is not used. lse is contiguous.
    """
    kv_head = tl.program_id(1).to(tl.int64)
    req = tl.program_id(2).to(tl.int64)
    num_kv_heads = tl.num_programs(1)
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    q_start, q_len, seq_len, _ = _lengths(req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len, SPEC)
    if row0 // GROUP >= q_len:
        return

    row = row0 + tl.arange(0, BLOCK_M)
    q_idx = row // GROUP
    mask_q = q_idx < q_len
    token = q_start.to(tl.int64) + q_idx
    head = kv_head * GROUP + row % GROUP
    q = load_rows(q_ptr + token * stride_q_token + head * stride_q_head, mask_q, HEAD_DIM, HEAD_DIM_PAD)

    chunk_start = seq_len - q_len
    q_pos = chunk_start + q_idx
    first_pos = chunk_start + row0 // GROUP
    last_pos = chunk_start + tl.minimum((row0 + BLOCK_M - 1) // GROUP, q_len - 1)
    kv_end = seq_len
    full_end = seq_len
    if SPEC.causal:
        kv_end = tl.maximum(last_pos + 1, 0)
        full_end = tl.maximum(first_pos + 1, 0)
    l = tl.zeros([BLOCK_M], tl.float32)
    if k_scale_ptr is not None:
        first_row = _first_scratch_row(req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len)
        fits = first_row + seq_len <= max_keys
        l = tl.where(fits, l, float("nan"))
        kv_end = tl.where(fits, kv_end, 0)
        full_end = tl.where(fits, full_end, 0)
        offs_d = tl.arange(0, HEAD_DIM_PAD)
        mean_ptrs = k_mean_ptr + (req * num_kv_heads + kv_head) * HEAD_DIM + offs_d
        mean = tl.load(mean_ptrs, mask=offs_d < HEAD_DIM, other=0.0)
        # What the mean of K took from every score of a row.
        row_shift = tl.sum(q.to(tl.float32) * mean[None, :], 1) * scale_log2
        q, q_scale = _int8_rows(q)
        row_scale = q_scale * scale_log2
    begin, full_begin, full_end, end, _, gap = tile_bounds(
        kv_end, full_end, first_pos, last_pos, 0, 1, PAGE_SIZE, TILE, TILES_PER_PAGE, SPEC
    )

    table_row_ptr = block_table_ptr + req * stride_table_req
    k_head_ptr = k_ptr + kv_head * stride_k_head
    v_head_ptr = v_ptr + kv_head * stride_v_head
    offs_n = tl.arange(0, TILE)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PAD], tl.float32)
    bounds = (begin, full_begin, full_end, end)
    for PHASE in tl.static_range(0 if SPEC.window else 1, 3):
        # The middle phase holds the tiles that every row sees whole.
        for visit in tl.range(bounds[PHASE], bounds[PHASE + 1], num_stages=None if PHASE == 1 else 1):
            page_idx, slot, tile_pos, mask_key, mask_row = locate_tile(
                visit + gap, table_row_ptr, kv_end, num_pages, PAGE_SIZE, TILE, TILES_PER_PAGE
            )
            v_ptrs = page_slot_ptrs(v_head_ptr, page_idx, slot, stride_v_page, stride_v_slot)
            if k_scale_ptr is not None:
                first_key_row = first_row + tile_pos
                k_ptrs = k_head_ptr + first_key_row * stride_k_slot + offs_n * stride_k_slot
                k = load_rows(k_ptrs, mask_key, HEAD_DIM, HEAD_DIM_PAD)
                k_scale_row_ptr = k_scale_ptr + first_key_row * num_kv_heads + kv_head
                k_scale = tl.load(k_scale_row_ptr + offs_n * num_kv_heads, mask=mask_key, other=0.0)
                s = tl.dot(q, tl.trans(k), out_dtype=tl.int32).to(tl.float32) * k_scale[None, :] * row_scale[:, None]
            else:
                k_ptrs = page_slot_ptrs(k_head_ptr, page_idx, slot, stride_k_page, stride_k_slot)
                k = load_rows(k_ptrs, mask_row, HEAD_DIM, HEAD_DIM_PAD)
                s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            v = load_rows(v_ptrs, mask_row, HEAD_DIM, HEAD_DIM_PAD)
            if SPEC.softcap != 0.0:
                if k_scale_ptr is not None:
                    s += row_shift[:, None]
                # c tanh(s / c), by exp2.
                s = (SPEC.softcap * LOG2_E) * (1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 / SPEC.softcap))))
            visible = mask_key[None, :]
            # A lane without a key has no weight. A key whose page is not in the pool makes the rows that see it NaN; its
            # int8 scale already does.
            if k_scale_ptr is None:
                s = s + tl.where(mask_row, 0.0, tl.where(mask_key, float("nan"), float("-inf")))[None, :]
            elif PHASE == 1 and TILES_PER_PAGE != 0 and PAGE_SIZE % TILE != 0:
                s = tl.where(visible, s, float("-inf"))
            if PHASE != 1:
                visible = visible_keys(tile_pos + offs_n, mask_key, q_pos, mask_q, None, chunk_start, SPEC)
                s = tl.where(visible, s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s - shift[:, None])
            alpha = tl.exp2(m - shift)
            l = l * alpha + tl.sum(p, 1)
            acc = _add_values(acc * alpha[:, None], v, p, visible, PHASE != 1)
            m = m_new

    # A row that sees no key has m -inf, l 0 and acc 0: it gives 0 and lse -inf.
    l = tl.where(l == 0.0, 1.0, l)
    if k_scale_ptr is not None and SPEC.softcap == 0.0:
        m += row_shift
    tl.store(lse_ptr + token * (num_kv_heads * GROUP) + head, (m + tl.log2(l)) * LN2, mask=mask_q)
    offs_d = tl.arange(0, HEAD_DIM_PAD)
    out_ptrs = (out_ptr + token * stride_out_token + head * stride_out_head)[:, None] + offs_d[None, :]
    tl.store(out_ptrs, (acc / l[:, None]).to(out_ptr.dtype.element_ty), mask=mask_q[:, None] & (offs_d < HEAD_DIM)[None, :])
