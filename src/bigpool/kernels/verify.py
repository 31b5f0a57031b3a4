"""Split-KV attention for a few query tokens per request over a paged cache: partials, then a merge.

Rows of a tile are query tokens x query heads of one kv head: row r is token r // GROUP, head r % GROUP.
Scores are kept in units of log2, so that every exponential is exp2.

Codes of a quantised cache meet q and the weights as exact numbers. A scale per tensor or head is one factor. A scale per token
and head multiplies the column of scores (K), or goes into the exponent (V): the running maximum is over p * scale, so that
weights lie in [0, 1] whatever the scales, and the softmax sum takes them without the scale.
"""

import triton
import triton.language as tl

from ._formats import decode, decode_unit, encode_fp8
from ._logits import LN2, LOG2_E, soft_capped
from ._masks import tile_bounds, visible_keys
from ._paging import load_rows, locate_tile, page_slot_ptrs

# bigpool.formats.MIN_SCALE
MIN_SCALE = tl.constexpr(2.0**-100)


@triton.jit
def _values(raw, words, SPEC: tl.constexpr, DTYPE: tl.constexpr):
    """(a tuple of tiles, a part of the head dim each; scales [N]) of a tile as it is stored."""
    KV_FORMAT: tl.constexpr = SPEC.kv_format
    CONVERT: tl.constexpr = SPEC.convert
    if KV_FORMAT == "int4":
        zero = words.to(tl.int32, bitcast=True) & 15
        values = (
            decode(raw, zero, KV_FORMAT, False, DTYPE, CONVERT),
            decode(raw, zero, KV_FORMAT, True, DTYPE, CONVERT),
        )
    else:
        values = (decode(raw, words, KV_FORMAT, False, DTYPE, CONVERT),)
    return values


@triton.jit
def _scores(q, k, k_scale, v_scale, bias, scale_log2, SPEC: tl.constexpr):
    """[M, N] in units of log2, with the scale of V as a summand where it is per token and head."""
    s = tl.dot(q[0], tl.trans(k[0]), input_precision="ieee")
    if len(q) == 2:
        s = tl.dot(q[1], tl.trans(k[1]), s, input_precision="ieee")
    s = s * scale_log2
    if SPEC.scales == "token_head":
        s = s * k_scale[None, :]
    if SPEC.softcap != 0.0:
        s = soft_capped(s, SPEC.softcap)
    if SPEC.alibi:
        s = s + bias
    if SPEC.scales == "token_head":
        s = s + tl.log2(v_scale)[None, :]
    return s


@triton.jit
def _add_values(acc, v, p, alpha, visible, EDGE: tl.constexpr, SPEC: tl.constexpr):
    acc = acc * alpha[:, None]
    if EDGE and SPEC.kv_format != "int8" and SPEC.kv_format != "int4":
        # 0 * NaN is NaN: a NaN in a later draft token must reach only the rows that see it.
        finite = tl.abs(v.to(tl.float32)) < float("inf")
        bad_key = tl.max(tl.where(finite, 0, 1), 1)
        sees_bad = tl.max(tl.where(visible, bad_key[None, :], 0), 1)
        acc = tl.where(sees_bad[:, None] > 0, float("nan"), acc)
        v = tl.where(finite, v, 0.0)
    acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return acc


@triton.jit
def _attend(s, v, v_scale, bad_scale, visible, mask_key, mask_row, m, l, acc, EDGE: tl.constexpr, SPEC: tl.constexpr):
    """One online-softmax step. A key whose page is not in the pool makes the rows that see it NaN."""
    s = tl.where(mask_row[None, :] | ~mask_key[None, :], s, float("nan"))
    s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - shift[:, None])
    alpha = tl.exp2(m - shift)
    if SPEC.scales == "token_head":
        l = l * alpha + tl.sum(p * (1.0 / v_scale)[None, :], 1)
        p = tl.where(visible & bad_scale[None, :], float("nan"), p)
    else:
        l = l * alpha + tl.sum(p, 1)
    first = _add_values(acc[0], v[0], p, alpha, visible, EDGE, SPEC)
    if len(acc) == 2:
        acc = (first, _add_values(acc[1], v[1], p, alpha, visible, EDGE, SPEC))
    else:
        acc = (first,)
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
    SPEC: tl.constexpr,
    k_scale_ptr=None, v_scale_ptr=None,
    stride_k_scale_page=0, stride_k_scale_slot=0, stride_k_scale_head=0,
    stride_v_scale_page=0, stride_v_scale_slot=0, stride_v_scale_head=0,
    alibi_ptr=None, sinks_ptr=None, out_scale_ptr=None, tree_ptr=None, stride_tree_token=0,
):  # fmt: skip
    """Grid (num_reqs, num_splits * ROW_TILES, num_kv_heads).

    With one split `dest` is the output and `lse` [num_tokens, num_q_heads] is written. With several, `dest` is scratch
    [num_tokens, num_q_heads, num_splits, HEAD_DIM + 4] fp32: an unnormalised sum, its maximum and its weight, two values unused.
    """
    # Values of SPEC that go on as arguments need a name of their own: Triton 3.6 takes no bare strings.
    KV_FORMAT: tl.constexpr = SPEC.kv_format
    CONVERT: tl.constexpr = SPEC.convert
    PARTS: tl.constexpr = 2 if KV_FORMAT == "int4" else 1
    WIDTH: tl.constexpr = HEAD_DIM // PARTS
    WIDTH_PAD: tl.constexpr = HEAD_DIM_PAD // PARTS
    req = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1) // ROW_TILES
    num_splits = tl.num_programs(1) // ROW_TILES
    row0 = (tl.program_id(1) % ROW_TILES) * BLOCK_M

    q_start = tl.load(cu_seqlens_q_ptr + req)
    q_len = tl.load(cu_seqlens_q_ptr + req + 1) - q_start
    token0 = q_start.to(tl.int64)
    if SPEC.longest:
        q_len = tl.where(q_len > SPEC.longest, 0, q_len)
    if row0 // GROUP >= q_len:
        return
    seq_len = tl.maximum(tl.minimum(tl.load(seq_lens_ptr + req), max_seq_len), 0)

    row = row0 + tl.arange(0, BLOCK_M)
    q_idx = row // GROUP
    mask_q = q_idx < q_len
    token = token0 + q_idx
    head = kv_head * GROUP + row % GROUP
    q_ptrs = q_ptr + token * stride_q_token + head * stride_q_head
    q_first = load_rows(q_ptrs, mask_q, WIDTH, WIDTH_PAD)
    q = (q_first, load_rows(q_ptrs + WIDTH, mask_q, WIDTH, WIDTH_PAD)) if PARTS == 2 else (q_first,)

    draft_start = seq_len - q_len
    q_pos = draft_start + q_idx
    first_pos = draft_start + row0 // GROUP
    last_pos = draft_start + tl.minimum((row0 + BLOCK_M - 1) // GROUP, q_len - 1)
    if SPEC.tree_words:
        kv_end = seq_len
        full_end = tl.maximum(draft_start, 0)
    elif SPEC.causal:
        kv_end = tl.maximum(last_pos + 1, 0)
        full_end = tl.maximum(first_pos + 1, 0)
    else:
        kv_end = seq_len
        full_end = seq_len
    begin, full_begin, full_end, end, sink_tiles, gap = tile_bounds(
        kv_end, full_end, first_pos, last_pos, split, num_splits, PAGE_SIZE, TILE, TILES_PER_PAGE, SPEC
    )

    table_row_ptr = block_table_ptr + req * stride_table_req
    k_head_ptr = k_ptr + kv_head * stride_k_head
    v_head_ptr = v_ptr + kv_head * stride_v_head
    scale_log2 = scale_log2 * decode_unit(KV_FORMAT, CONVERT)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        # A sink is a weight without a value: where the first split starts.
        m = tl.where((split == 0) & mask_q, tl.load(sinks_ptr + head, mask=mask_q, other=0.0) * LOG2_E, m)
        l = tl.where(m == float("-inf"), 0.0, 1.0)
    acc_zero = tl.zeros([BLOCK_M, WIDTH_PAD], tl.float32)
    acc = (acc_zero, acc_zero) if PARTS == 2 else (acc_zero,)
    if SPEC.scales == "token_head":
        k_scale_head_ptr = k_scale_ptr + kv_head * stride_k_scale_head
        v_scale_head_ptr = v_scale_ptr + kv_head * stride_v_scale_head
    elif k_scale_ptr is not None:
        scale_log2 = scale_log2 * tl.load(k_scale_ptr + kv_head * stride_k_scale_head)
    tree_row_ptr = tree_ptr
    if SPEC.tree_words:
        tree_row_ptr = tree_ptr + token * stride_tree_token
    if SPEC.alibi:
        slope = tl.load(alibi_ptr + head, mask=mask_q, other=0.0) * LOG2_E

    bounds = (begin, full_begin, full_end, end)
    for PHASE in tl.static_range(0 if SPEC.window or SPEC.chunk else 1, 3):
        # The middle phase holds the tiles that every row sees whole.
        for visit in tl.range(bounds[PHASE], bounds[PHASE + 1], num_stages=None if PHASE == 1 else 1):
            tile = visit
            if SPEC.sink_tokens:
                tile += tl.where(visit < sink_tiles, 0, gap)
            elif SPEC.window or SPEC.chunk:
                tile += gap
            page_idx, slot, first_pos, mask_key, mask_row = locate_tile(
                tile, table_row_ptr, kv_end, num_pages, PAGE_SIZE, TILE, TILES_PER_PAGE
            )
            pos = first_pos + tl.arange(0, TILE)
            k = load_rows(page_slot_ptrs(k_head_ptr, page_idx, slot, stride_k_page, stride_k_slot), mask_row, WIDTH, WIDTH_PAD)
            v = load_rows(page_slot_ptrs(v_head_ptr, page_idx, slot, stride_v_page, stride_v_slot), mask_row, WIDTH, WIDTH_PAD)
            k_scale, v_scale, bad_scale, bias = None, None, None, None
            if SPEC.scales == "token_head":
                k_scale_ptrs = page_slot_ptrs(k_scale_head_ptr, page_idx, slot, stride_k_scale_page, stride_k_scale_slot)
                v_scale_ptrs = page_slot_ptrs(v_scale_head_ptr, page_idx, slot, stride_v_scale_page, stride_v_scale_slot)
                k_scale = tl.load(k_scale_ptrs, mask=mask_row, other=1.0)
                v_scale = tl.load(v_scale_ptrs, mask=mask_row, other=1.0)
            if SPEC.alibi:
                bias = slope[:, None] * (pos[None, :] - q_pos[:, None]).to(tl.float32)
            visible = mask_key[None, :]
            if PHASE != 1:
                visible = visible_keys(pos, mask_key, q_pos, mask_q, tree_row_ptr, draft_start, SPEC)
            k_parts = _values(k, k_scale, SPEC, q[0].dtype)
            v_parts = _values(v, v_scale, SPEC, q[0].dtype)
            if SPEC.scales == "token_head":
                bad_scale = v_scale != v_scale
                v_scale = tl.where(v_scale > MIN_SCALE, v_scale, tl.where(bad_scale, 1.0, MIN_SCALE))
            s = _scores(q, k_parts, k_scale, v_scale, bias, scale_log2, SPEC)
            m, l, acc = _attend(s, v_parts, v_scale, bad_scale, visible, mask_key, mask_row, m, l, acc, PHASE != 1, SPEC)

    offs_d = tl.arange(0, WIDTH_PAD)
    dest_token = token
    if SPEC.longest:
        dest_token = tl.where(num_splits > 1, req * SPEC.longest + q_idx, token)
    # bigpool: assume split * stride_dest_split < 2**31, Workspace refuses splits of a token and head that span more
    dest_ptrs = dest_ptr + dest_token * stride_dest_token + head * stride_dest_head + split * stride_dest_split
    mask_dest = mask_q[:, None] & (offs_d < WIDTH)[None, :]
    v_factor = decode_unit(KV_FORMAT, CONVERT)
    if SPEC.scales != "token_head" and v_scale_ptr is not None:
        v_factor = v_factor * tl.load(v_scale_ptr + kv_head * stride_v_scale_head)
    if num_splits == 1:
        # A row that sees no key has m -inf, l 0 and acc 0: it gives 0 and lse -inf.
        l = tl.where(l == 0.0, 1.0, l)
        tl.store(lse_ptr + token * stride_lse_token + head, (m + tl.log2(l)) * LN2, mask=mask_q)
    else:
        tl.store(dest_ptrs + HEAD_DIM, m.to(dest_ptr.dtype.element_ty), mask=mask_q)
        tl.store(dest_ptrs + HEAD_DIM + 1, l.to(dest_ptr.dtype.element_ty), mask=mask_q)
    for PART in tl.static_range(PARTS):
        sums = acc[PART]
        if SPEC.kv_format != "plain":
            sums = sums * v_factor
        part_ptrs = dest_ptrs[:, None] + (PART * WIDTH + offs_d)[None, :]
        if num_splits == 1:
            store_out(part_ptrs, sums / l[:, None], out_scale_ptr, mask_dest, SPEC)
        else:
            tl.store(part_ptrs, sums.to(dest_ptr.dtype.element_ty), mask=mask_dest & (l != 0.0)[:, None])


@triton.jit
def store_out(ptrs, out, out_scale_ptr, mask, SPEC: tl.constexpr):
    """Outputs in the dtype of `ptrs`, or as fp8 codes of multiples of the output's scale."""
    FP8: tl.constexpr = SPEC.out_format
    if FP8 != "":
        tl.store(ptrs, encode_fp8(out / tl.load(out_scale_ptr), FP8), mask=mask)
    else:
        tl.store(ptrs, out.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_splits"])
def verify_merge_kernel(
    part_ptr, out_ptr, lse_ptr, cu_seqlens_q_ptr, num_splits,
    stride_part_token, stride_part_head, stride_part_split, stride_out_token, stride_out_head, stride_lse_token,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr, SPLIT_TILE: tl.constexpr,
    SPEC: tl.constexpr, out_scale_ptr=None,
):  # fmt: skip
    """Grid (num_reqs, max_seqlen_q, num_q_heads): the weighted sum of the splits of one query token and head.

    Splits are taken in order, SPLIT_TILE at a time, so that splits without keys at the end change no bit.
    """
    q_start = tl.load(cu_seqlens_q_ptr + tl.program_id(0))
    q_len = tl.load(cu_seqlens_q_ptr + tl.program_id(0) + 1) - q_start
    if SPEC.longest:
        q_len = tl.where(q_len > SPEC.longest, 0, q_len)
    if tl.program_id(1) >= q_len:
        return
    token = q_start.to(tl.int64) + tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)

    part_token = token
    if SPEC.longest:
        part_token = tl.program_id(0).to(tl.int64) * SPEC.longest + tl.program_id(1)
    row_ptr = part_ptr + part_token * stride_part_token + head * stride_part_head
    m = tl.full([], float("-inf"), tl.float32)
    for first in tl.range(0, num_splits, SPLITS_PAD):
        split = first + tl.arange(0, SPLITS_PAD)
        # bigpool: assume split * stride_part_split < 2**31, Workspace refuses splits of a token and head that span more
        m_splits = tl.load(row_ptr + split * stride_part_split + HEAD_DIM, mask=split < num_splits, other=float("-inf"))
        m = tl.maximum(m, tl.max(m_splits, 0))
    shift = tl.where(m == float("-inf"), 0.0, m)

    offs_d = tl.arange(0, HEAD_DIM_PAD)
    mask_d = offs_d < HEAD_DIM
    l = tl.zeros([], tl.float32)
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
        l += tl.sum(l_split * weight, 0)
        acc += tl.sum(part * weight[:, None], 0)
    l = tl.where(l == 0.0, 1.0, l)
    store_out(out_ptr + token * stride_out_token + head * stride_out_head + offs_d, acc / l, out_scale_ptr, mask_d, SPEC)
    tl.store(lse_ptr + token * stride_lse_token + head, (m + tl.log2(l)) * LN2)
