"""Split-KV attention for a few query tokens per request over a paged cache: partials, then a merge.

Rows of a tile are query tokens x query heads of one kv head: row r is token r // GROUP, head r % GROUP.
Scores are kept in units of log2, so that every exponential is exp2.
"""

import triton
import triton.language as tl

from ._paging import load_page_idx, page_slot_ptrs

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tile_positions(
    tile, table_row_ptr, kv_end, num_pages, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, TILES_PER_PAGE: tl.constexpr
):
    """Page ids, slots, positions, which lanes hold a key, and which of those have a page of the pool."""
    offs_n = tl.arange(0, TILE)
    if TILES_PER_PAGE == 0:
        pos = tile * TILE + offs_n
        mask_key = pos < kv_end
        slot = pos % PAGE_SIZE
        page_idx = load_page_idx(table_row_ptr, pos // PAGE_SIZE, mask_key)
    else:
        page_col = tile // TILES_PER_PAGE
        slot = (tile % TILES_PER_PAGE) * TILE + offs_n
        pos = page_col * PAGE_SIZE + slot
        mask_key = (slot < PAGE_SIZE) & (pos < kv_end)
        page_idx = load_page_idx(table_row_ptr, page_col, True)
    slots_in_pool = tl.where((page_idx >= 0) & (page_idx < num_pages), PAGE_SIZE, 0)
    mask_row = mask_key & (slot < slots_in_pool)
    return page_idx, slot, pos, mask_key, mask_row


@triton.jit
def _load_rows(ptrs, mask_row, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr):
    """Rows [N, HEAD_DIM_PAD] at `ptrs` [N]; 0 in masked rows and in the padding."""
    offs_d = tl.arange(0, HEAD_DIM_PAD)
    mask = mask_row[:, None]
    if HEAD_DIM != HEAD_DIM_PAD:
        mask = mask & (offs_d < HEAD_DIM)[None, :]
    return tl.load(ptrs[:, None] + offs_d[None, :], mask=mask, other=0.0)


@triton.jit
def _attend(q, k, v, scores_mask, mask_key, mask_row, m, l, acc, scale_log2, EDGE: tl.constexpr):
    """One online-softmax step. A key whose page is not in the pool makes the rows that see it NaN."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    s = tl.where(mask_row[None, :] | ~mask_key[None, :], s, float("nan"))
    s = tl.where(scores_mask, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - shift[:, None])
    alpha = tl.exp2(m - shift)
    l = l * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    if EDGE:
        # 0 * NaN is NaN: a NaN in a later draft token must reach only the rows that see it.
        finite = tl.abs(v.to(tl.float32)) < float("inf")
        bad_key = tl.max(tl.where(finite, 0, 1), 1)
        sees_bad = tl.max(tl.where(scores_mask, bad_key[None, :], 0), 1)
        acc = tl.where(sees_bad[:, None] > 0, float("nan"), acc)
        v = tl.where(finite, v, 0.0)
    acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return m_new, l, acc


@triton.jit(do_not_specialize=["num_pages", "max_seq_len", "stride_table_req"])
def verify_partial_kernel(
    q_ptr, k_ptr, v_ptr, dest_ptr, lse_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_q_ptr,
    scale_log2, num_pages, max_seq_len,
    stride_q_token, stride_q_head,
    stride_k_page, stride_k_slot, stride_k_head,
    stride_v_page, stride_v_slot, stride_v_head,
    stride_dest_token, stride_dest_head, stride_dest_split,
    stride_lse_token, stride_table_req,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr, TILES_PER_PAGE: tl.constexpr, BLOCK_M: tl.constexpr, ROW_TILES: tl.constexpr,
):  # fmt: skip
    """Grid (num_reqs, num_splits * ROW_TILES, num_kv_heads).

    With one split `dest` is the output and `lse` [num_tokens, num_q_heads] is written. With several, `dest` is scratch
    [num_tokens, num_q_heads, num_splits, HEAD_DIM + 4] fp32: an unnormalised sum, its maximum and its weight, two values unused.
    """
    req = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1) // ROW_TILES
    num_splits = tl.num_programs(1) // ROW_TILES
    row0 = (tl.program_id(1) % ROW_TILES) * BLOCK_M

    q_start = tl.load(cu_seqlens_q_ptr + req)
    q_len = tl.load(cu_seqlens_q_ptr + req + 1) - q_start
    token0 = q_start.to(tl.int64)
    if row0 // GROUP >= q_len:
        return
    seq_len = tl.maximum(tl.minimum(tl.load(seq_lens_ptr + req), max_seq_len), 0)

    row = row0 + tl.arange(0, BLOCK_M)
    q_idx = row // GROUP
    mask_q = q_idx < q_len
    token = token0 + q_idx
    head = kv_head * GROUP + row % GROUP
    q = _load_rows(q_ptr + token * stride_q_token + head * stride_q_head, mask_q, HEAD_DIM, HEAD_DIM_PAD)

    q_pos = seq_len - q_len + q_idx
    last_idx = tl.minimum((row0 + BLOCK_M - 1) // GROUP, q_len - 1)
    kv_end = tl.maximum(seq_len - q_len + last_idx + 1, 0)
    full_end = tl.maximum(seq_len - q_len + row0 // GROUP + 1, 0)
    if TILES_PER_PAGE == 0:
        num_tiles = tl.cdiv(kv_end, TILE)
        num_full = full_end // TILE
    else:
        num_tiles = kv_end // PAGE_SIZE * TILES_PER_PAGE + tl.cdiv(kv_end % PAGE_SIZE, TILE)
        num_full = full_end // PAGE_SIZE * TILES_PER_PAGE + full_end % PAGE_SIZE // TILE
    tiles_per_split = tl.cdiv(num_tiles, num_splits)
    tile_begin = tl.minimum(split * tiles_per_split, num_tiles)
    tile_end = tl.minimum(tile_begin + tiles_per_split, num_tiles)
    edge_begin = tl.minimum(tl.maximum(num_full, tile_begin), tile_end)

    table_row_ptr = block_table_ptr + req * stride_table_req
    k_head_ptr = k_ptr + kv_head * stride_k_head
    v_head_ptr = v_ptr + kv_head * stride_v_head
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PAD], tl.float32)
    for tile in tl.range(tile_begin, edge_begin):
        page_idx, slot, pos, mask_key, mask_row = _tile_positions(
            tile, table_row_ptr, kv_end, num_pages, PAGE_SIZE, TILE, TILES_PER_PAGE
        )
        k = _load_rows(page_slot_ptrs(k_head_ptr, page_idx, slot, stride_k_page, stride_k_slot), mask_row, HEAD_DIM, HEAD_DIM_PAD)
        v = _load_rows(page_slot_ptrs(v_head_ptr, page_idx, slot, stride_v_page, stride_v_slot), mask_row, HEAD_DIM, HEAD_DIM_PAD)
        m, l, acc = _attend(q, k, v, mask_key[None, :], mask_key, mask_row, m, l, acc, scale_log2, False)
    for tile in tl.range(edge_begin, tile_end, num_stages=1):
        page_idx, slot, pos, mask_key, mask_row = _tile_positions(
            tile, table_row_ptr, kv_end, num_pages, PAGE_SIZE, TILE, TILES_PER_PAGE
        )
        k = _load_rows(page_slot_ptrs(k_head_ptr, page_idx, slot, stride_k_page, stride_k_slot), mask_row, HEAD_DIM, HEAD_DIM_PAD)
        v = _load_rows(page_slot_ptrs(v_head_ptr, page_idx, slot, stride_v_page, stride_v_slot), mask_row, HEAD_DIM, HEAD_DIM_PAD)
        visible = mask_key[None, :] & (pos[None, :] <= q_pos[:, None])
        m, l, acc = _attend(q, k, v, visible, mask_key, mask_row, m, l, acc, scale_log2, True)

    offs_d = tl.arange(0, HEAD_DIM_PAD)
    # bigpool: assume split * stride_dest_split < 2**31, Workspace refuses splits of a token and head that span more
    dest_ptrs = dest_ptr + token * stride_dest_token + head * stride_dest_head + split * stride_dest_split
    mask_dest = mask_q[:, None] & (offs_d < HEAD_DIM)[None, :]
    if num_splits == 1:
        # A row that sees no key has m -inf, l 0 and acc 0: it gives 0 and lse -inf.
        l = tl.where(l == 0.0, 1.0, l)
        out = acc / l[:, None]
        tl.store(dest_ptrs[:, None] + offs_d[None, :], out.to(dest_ptr.dtype.element_ty), mask=mask_dest)
        tl.store(lse_ptr + token * stride_lse_token + head, (m + tl.log2(l)) * LN2, mask=mask_q)
    else:
        tl.store(dest_ptrs[:, None] + offs_d[None, :], acc.to(dest_ptr.dtype.element_ty), mask=mask_dest & (l != 0.0)[:, None])
        tl.store(dest_ptrs + HEAD_DIM, m.to(dest_ptr.dtype.element_ty), mask=mask_q)
        tl.store(dest_ptrs + HEAD_DIM + 1, l.to(dest_ptr.dtype.element_ty), mask=mask_q)


@triton.jit(do_not_specialize=["num_splits"])
def verify_merge_kernel(
    part_ptr, out_ptr, lse_ptr, cu_seqlens_q_ptr, num_splits,
    stride_part_token, stride_part_head, stride_part_split, stride_out_token, stride_out_head, stride_lse_token,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr, SPLIT_TILE: tl.constexpr,
):  # fmt: skip
    """Grid (num_reqs, max_seqlen_q, num_q_heads): the weighted sum of the splits of one query token and head."""
    q_start = tl.load(cu_seqlens_q_ptr + tl.program_id(0))
    q_len = tl.load(cu_seqlens_q_ptr + tl.program_id(0) + 1) - q_start
    if tl.program_id(1) >= q_len:
        return
    token = q_start.to(tl.int64) + tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)

    row_ptr = part_ptr + token * stride_part_token + head * stride_part_head
    offs_s = tl.arange(0, SPLITS_PAD)
    m_splits = tl.load(row_ptr + offs_s * stride_part_split + HEAD_DIM, mask=offs_s < num_splits, other=float("-inf"))
    l_splits = tl.load(row_ptr + offs_s * stride_part_split + HEAD_DIM + 1, mask=offs_s < num_splits, other=0.0)
    m = tl.max(m_splits, 0)
    shift = tl.where(m == float("-inf"), 0.0, m)
    l = tl.sum(l_splits * tl.exp2(m_splits - shift), 0)

    offs_d = tl.arange(0, HEAD_DIM_PAD)
    mask_d = offs_d < HEAD_DIM
    acc = tl.zeros([HEAD_DIM_PAD], tl.float32)
    for first in tl.range(0, num_splits, SPLIT_TILE):
        split = first + tl.arange(0, SPLIT_TILE)
        # bigpool: assume split * stride_part_split < 2**31, Workspace refuses splits of a token and head that span more
        split_ptrs = row_ptr + split * stride_part_split
        l_split = tl.load(split_ptrs + HEAD_DIM + 1, mask=split < num_splits, other=0.0)
        m_split = tl.load(split_ptrs + HEAD_DIM, mask=split < num_splits, other=float("-inf"))
        # A split without keys wrote no sum: what its row holds must not be read.
        weight = tl.where(l_split == 0.0, 0.0, tl.exp2(m_split - shift))
        part = tl.load(split_ptrs[:, None] + offs_d[None, :], mask=(l_split != 0.0)[:, None] & mask_d[None, :], other=0.0)
        acc += tl.sum(part * weight[:, None], 0)
    l = tl.where(l == 0.0, 1.0, l)
    out = acc / l
    tl.store(out_ptr + token * stride_out_token + head * stride_out_head + offs_d, out.to(out_ptr.dtype.element_ty), mask=mask_d)
    tl.store(lse_ptr + token * stride_lse_token + head, (m + tl.log2(l)) * LN2)
