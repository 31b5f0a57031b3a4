"""Chunked prefill over a paged cache: ragged requests, one tile of keys for all query heads of a kv head.

Rows of a tile are query tokens x query heads of one kv head: row r is token r // GROUP, head r % GROUP.
Scores are kept in units of log2, so that every exponential is exp2.

Codes of a quantised cache meet q and the weights as exact numbers, their scales as in verify attention.
int8: codes and scales of keys less a mean key come from a pass before (prefill_keys). What is taken from every key adds the same
number to all scores of a row, which the softmax does not see; the soft cap and lse do, and get it back. Where codes are kept,
the keys at the head of the request are exact, and a key whose scale is below 0 gets back what the mean took.
fp8: codes of values come from a pass before (prefill_values); weights become codes times 256, so that small ones have digits.
"""

import triton
import triton.language as tl

from ._formats import decode, decode_parts, decode_unit, encode_fp8
from ._logits import LN2, LOG2_E, soft_capped
from ._masks import tile_bounds, tile_of, tiles_before, visible_keys
from ._paging import load_rows, locate_tile, page_slot_ptrs
from ._ragged import first_scratch_row, first_value_tile, request_lengths, tile_of_visit
from .cache import _is_finite
from .prefill_keys import int8_rows, prefill_keep_kernel, prefill_quantise_kernel, prefill_sum_keys_kernel
from .prefill_values import prefill_max_values_kernel, prefill_quantise_values_kernel

# The passes before the attention, so that one module is a version of all.
__all__ = [
    "prefill_attention_kernel", "prefill_keep_kernel", "prefill_max_values_kernel", "prefill_quantise_kernel",
    "prefill_quantise_values_kernel", "prefill_sum_keys_kernel",
]  # fmt: skip

# bigpool.formats.MIN_SCALE
MIN_SCALE = tl.constexpr(2.0**-100)
# What weights are multiplied with before they become fp8, whose largest number is 448.
FP8_WEIGHT = tl.constexpr(256.0)


@triton.jit
def _exact_scores(q, k, k_scale, scale_log2, CFG: tl.constexpr):
    """[M, N] in units of log2; q and k are tuples, a part of the head dim each."""
    s = tl.dot(q[0], tl.trans(k[0]), input_precision="ieee")
    if len(q) == 2:
        s = tl.dot(q[1], tl.trans(k[1]), s, input_precision="ieee")
    s = s * scale_log2
    if CFG.spec.scales == "token_head":
        s = s * k_scale[None, :]
    return s


@triton.jit
def _code_scores(q_codes, codes, code_scale, row_scale, row_shift, CFG: tl.constexpr):
    """[M, N] in units of log2; stateless without what the mean took."""
    s = tl.dot(q_codes, tl.trans(codes), out_dtype=tl.int32).to(tl.float32)
    if CFG.qk == "kept":
        taken = tl.where((code_scale < 0)[None, :], row_shift[:, None], 0.0)
        s = s * tl.abs(code_scale)[None, :] * row_scale[:, None] + taken
    else:
        s = s * code_scale[None, :] * row_scale[:, None]
        if CFG.spec.softcap != 0.0:
            s += row_shift[:, None]
    return s


@triton.jit
def _weigh(s, v_scale, m, l, CFG: tl.constexpr):
    """(weights, what earlier sums are multiplied with, maximum, sum of weights) after one more tile of scores."""
    if CFG.spec.scales == "token_head":
        s = s + tl.log2(v_scale)[None, :]
    m_new = tl.maximum(m, tl.max(s, 1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m - shift)
    p = tl.exp2(s - shift[:, None])
    if CFG.spec.scales == "token_head":
        l = l * alpha + tl.sum(p * (1.0 / v_scale)[None, :], 1)
    else:
        l = l * alpha + tl.sum(p, 1)
    return p, alpha, m_new, l


@triton.jit
def _spoil(acc, bad_key, visible):
    """`acc` with NaN in the rows that see a bad key: 0 * NaN is NaN, and must reach no other row."""
    sees_bad = tl.max(tl.where(visible, bad_key[None, :], 0), 1)
    return tl.where(sees_bad[:, None] > 0, float("nan"), acc)


@triton.jit
def _add_values(acc, v, p, visible, EDGE: tl.constexpr, CFG: tl.constexpr):
    if EDGE and CFG.spec.kv_format != "int8" and CFG.spec.kv_format != "int4":
        finite = _is_finite(v.to(tl.float32))
        acc = _spoil(acc, tl.max(tl.where(finite, 0, 1), 1), visible)
        v = tl.where(finite, v, 0.0)
    return tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")


@triton.jit
def _add_fp8_values(acc, raw, p, visible, EDGE: tl.constexpr, CFG: tl.constexpr):
    """`raw` [HEAD_DIM_PAD, TILE] as codes. Each tile is summed by itself, then in fp32: matrix units keep few bits of fp8."""
    p = p * FP8_WEIGHT
    if EDGE:
        is_nan = (raw & 0x7F) == 0x7F
        acc = _spoil(acc, tl.max(tl.where(is_nan, 1, 0), 0), visible)
        raw = tl.where(is_nan, 0, raw)
    if CFG.pv == "fp8":
        v = tl.trans(raw.to(tl.float8e4nv, bitcast=True))
        acc = tl.dot(p.to(tl.float8e4nv), v, acc, max_num_imprecise_acc=CFG.tile)
    else:
        # For Triton's interpreter: the same numbers, as fp32.
        unit = decode_unit("e4m3", "plain")
        p = decode(encode_fp8(p, "e4m3"), None, "e4m3", False, tl.float32, "plain") * unit
        v = decode(raw, None, "e4m3", False, tl.float32, "plain") * unit
        acc = tl.dot(p, tl.trans(v), acc, input_precision="ieee")
    return acc


@triton.jit
def _bounds(seq_len, chunk_start, row0, q_len, fits, CFG: tl.constexpr):
    """(end of the visible keys, begins of four phases, their ends, sink tiles, gap), see the loop of the kernel."""
    SPEC: tl.constexpr = CFG.spec
    PAGE_SIZE: tl.constexpr = CFG.page_size
    first_pos = chunk_start + row0 // CFG.group
    last_pos = chunk_start + tl.minimum((row0 + CFG.block_m - 1) // CFG.group, q_len - 1)
    kv_end = seq_len
    full_end = seq_len
    if CFG.spec.causal:
        kv_end = tl.maximum(last_pos + 1, 0)
        full_end = tl.maximum(first_pos + 1, 0)
    if CFG.qk == "int8" or CFG.pv != "exact":
        kv_end = tl.where(fits, kv_end, 0)
        full_end = tl.where(fits, full_end, 0)
    begin, full_begin, full_end, end, sink_tiles, gap = tile_bounds(
        kv_end, full_end, first_pos, last_pos, 0, 1, PAGE_SIZE, CFG.tile, CFG.tiles_per_page, SPEC
    )
    head_end = 0
    if CFG.qk == "kept":
        EXACT_KEYS: tl.constexpr = CFG.exact_keys
        # A tile with keys of both kinds is visited twice.
        head_end = tl.minimum(tiles_before(EXACT_KEYS, PAGE_SIZE, CFG.tile, CFG.tiles_per_page), end)
        begin = tl.minimum(tile_of(EXACT_KEYS, PAGE_SIZE, CFG.tile, CFG.tiles_per_page), end)
        full_begin = head_end
        full_end = tl.maximum(full_end, full_begin)
    return kv_end, (0, begin, full_begin, full_end), (head_end, full_begin, full_end, end), sink_tiles, gap


@triton.jit(do_not_specialize=["num_pages", "max_seq_len", "max_keys", "stride_table_req"])
def prefill_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_q_ptr,
    scale_log2, num_pages, max_seq_len, max_keys,
    stride_q_token, stride_q_head,
    stride_k_page, stride_k_slot, stride_k_head,
    stride_v_page, stride_v_slot, stride_v_head,
    stride_out_token, stride_out_head, stride_table_req,
    CFG: tl.constexpr,
    k_scale_ptr=None, v_scale_ptr=None, sinks_ptr=None,
    codes_ptr=None, code_scale_ptr=None, mean_ptr=None,
):  # fmt: skip
    """Grid (row tiles, num_kv_heads, num_reqs), the longest row tiles first. lse is contiguous; CFG is a PrefillShape.

    int8 scores: `codes` [max_keys, num_kv_heads, HEAD_DIM] and `code_scale` [max_keys, num_kv_heads] of scratch, or, where codes
    are kept, with the axes of a cache's pages, contiguous; `mean` [num_reqs, num_kv_heads, HEAD_DIM].
    fp8 weights: `v` is the codes of the scratch, `v_scale` [num_reqs, num_kv_heads, HEAD_DIM], strides of v are not used.
    """
    # Values of CFG that go on as arguments need a name of their own: Triton 3.6 takes no bare strings.
    SPEC: tl.constexpr = CFG.spec
    KV_FORMAT: tl.constexpr = CFG.spec.kv_format
    CONVERT: tl.constexpr = CFG.spec.convert
    PAGE_SIZE: tl.constexpr = CFG.page_size
    TILE: tl.constexpr = CFG.tile
    BLOCK_M: tl.constexpr = CFG.block_m
    GROUP: tl.constexpr = CFG.group
    HEAD_DIM: tl.constexpr = CFG.head_dim
    HEAD_DIM_PAD: tl.constexpr = CFG.head_dim_pad
    KEPT: tl.constexpr = CFG.qk == "kept"
    FP8: tl.constexpr = CFG.pv != "exact"
    ROW_SCALES: tl.constexpr = CFG.spec.scales == "token_head"
    PARTS: tl.constexpr = 2 if KV_FORMAT == "int4" else 1
    WIDTH: tl.constexpr = HEAD_DIM // PARTS
    WIDTH_PAD: tl.constexpr = HEAD_DIM_PAD // PARTS
    kv_head = tl.program_id(1).to(tl.int64)
    req = tl.program_id(2).to(tl.int64)
    num_kv_heads = tl.num_programs(1)
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    q_start, q_len, seq_len = request_lengths(req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len)
    if row0 // GROUP >= q_len:
        return

    row = row0 + tl.arange(0, BLOCK_M)
    q_idx = row // GROUP
    mask_q = q_idx < q_len
    token = q_start.to(tl.int64) + q_idx
    head = kv_head * GROUP + row % GROUP
    q_ptrs = q_ptr + token * stride_q_token + head * stride_q_head
    q_first = load_rows(q_ptrs, mask_q, WIDTH, WIDTH_PAD)
    q = (q_first, load_rows(q_ptrs + WIDTH, mask_q, WIDTH, WIDTH_PAD)) if PARTS == 2 else (q_first,)
    offs_d = tl.arange(0, WIDTH_PAD)

    first_row = req * 0
    fits = q_len > 0
    if CFG.qk == "int8" or FP8:
        first_row = first_scratch_row(req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len)
        fits = first_row + seq_len <= max_keys
    chunk_start = seq_len - q_len
    q_pos = chunk_start + q_idx
    kv_end, begins, ends, sink_tiles, gap = _bounds(seq_len, chunk_start, row0, q_len, fits, CFG)
    q_codes, row_scale, row_shift = None, None, None
    if CFG.qk != "exact":
        has_mean = mask_q & (seq_len > CFG.exact_keys) if KEPT else mask_q
        mean_ptrs = mean_ptr + (req * num_kv_heads + kv_head) * HEAD_DIM + offs_d
        mean = tl.load(mean_ptrs, mask=offs_d < HEAD_DIM, other=0.0)
        # What the mean of K took from every score of a row.
        row_shift = tl.where(has_mean, tl.sum(q_first.to(tl.float32) * mean[None, :], 1) * scale_log2, 0.0)
        q_codes, q_scale = int8_rows(q_first)
        row_scale = q_scale * scale_log2

    scale_log2 = scale_log2 * decode_unit(KV_FORMAT, CONVERT)
    if ROW_SCALES:
        k_scale_head_ptr = k_scale_ptr + kv_head * CFG.k_scale_strides[2]
        v_scale_head_ptr = v_scale_ptr + kv_head * CFG.v_scale_strides[2]
    elif k_scale_ptr is not None:
        scale_log2 = scale_log2 * tl.load(k_scale_ptr + kv_head * CFG.k_scale_strides[2])
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        # A sink is a weight without a value.
        sink = tl.load(sinks_ptr + head, mask=mask_q, other=0.0) * LOG2_E
        if CFG.qk == "int8" and CFG.spec.softcap == 0.0:
            sink -= row_shift
        m = tl.where(mask_q, sink, m)
        l = tl.where(m == float("-inf"), 0.0, 1.0)
    if CFG.qk == "int8" or FP8:
        l = tl.where(fits, l, float("nan"))
    acc_zero = tl.zeros([BLOCK_M, WIDTH_PAD], tl.float32)
    acc = (acc_zero, acc_zero) if PARTS == 2 else (acc_zero,)
    table_row_ptr = block_table_ptr + req * stride_table_req
    k_head_ptr = k_ptr + kv_head * stride_k_head
    v_head_ptr = v_ptr + kv_head * stride_v_head
    offs_n = tl.arange(0, TILE)
    # Phases: keys that are exact where others are kept codes; tiles at the first edge; tiles that every row sees whole; tiles at
    # the last edge.
    for PHASE in tl.static_range(0 if KEPT else 1 if CFG.spec.window else 2, 4):
        for visit in tl.range(begins[PHASE], ends[PHASE], num_stages=None if PHASE == 2 else 1):
            tile = tile_of_visit(visit, sink_tiles, gap, CFG)
            page_idx, slot, tile_pos, mask_key, mask_row = locate_tile(
                tile, table_row_ptr, kv_end, num_pages, PAGE_SIZE, TILE, CFG.tiles_per_page
            )
            k_scale, v_scale, bad_scale = None, None, None
            if ROW_SCALES:
                k_scale_ptrs = page_slot_ptrs(k_scale_head_ptr, page_idx, slot, CFG.k_scale_strides[0], CFG.k_scale_strides[1])
                v_scale_ptrs = page_slot_ptrs(v_scale_head_ptr, page_idx, slot, CFG.v_scale_strides[0], CFG.v_scale_strides[1])
                k_scale = tl.load(k_scale_ptrs, mask=mask_row, other=1.0)
                v_scale = tl.load(v_scale_ptrs, mask=mask_row, other=1.0)
            if CFG.qk != "exact" and PHASE != 0:
                if KEPT:
                    mask_code = mask_row
                    code_row = page_slot_ptrs(kv_head, page_idx, slot, PAGE_SIZE * num_kv_heads, num_kv_heads)
                else:
                    mask_code = mask_key
                    code_row = (first_row + tile_pos) * num_kv_heads + kv_head + offs_n * num_kv_heads
                codes = load_rows(codes_ptr + code_row * HEAD_DIM, mask_code, HEAD_DIM, HEAD_DIM_PAD)
                code_scale = tl.load(code_scale_ptr + code_row, mask=mask_code, other=0.0)
                s = _code_scores(q_codes, codes, code_scale, row_scale, row_shift, CFG)
            else:
                k_ptrs = page_slot_ptrs(k_head_ptr, page_idx, slot, stride_k_page, stride_k_slot)
                k = decode_parts(load_rows(k_ptrs, mask_row, WIDTH, WIDTH_PAD), k_scale, KV_FORMAT, q_first.dtype, CONVERT)
                s = _exact_scores(q, k, k_scale, scale_log2, CFG)
            if CFG.spec.softcap != 0.0:
                s = soft_capped(s, CFG.spec.softcap)
            visible = mask_key[None, :]
            # A lane without a key has no weight. A key whose page is not in the pool makes the rows that see it NaN; its
            # scale in scratch already does.
            if CFG.qk != "int8":
                s = s + tl.where(mask_row, 0.0, tl.where(mask_key, float("nan"), float("-inf")))[None, :]
            elif PHASE == 2 and CFG.tiles_per_page != 0 and PAGE_SIZE % TILE != 0:
                s = tl.where(visible, s, float("-inf"))
            if PHASE != 2:
                pos = tile_pos + offs_n
                if KEPT:
                    mask_key = mask_key & ((pos < CFG.exact_keys) if PHASE == 0 else (pos >= CFG.exact_keys))
                visible = visible_keys(pos, mask_key, q_pos, mask_q, None, chunk_start, SPEC)
                s = tl.where(visible, s, float("-inf"))
            if FP8:
                value_tile = (first_value_tile(first_row, req, CFG) + tile) * num_kv_heads + kv_head
                v_ptrs = v_ptr + value_tile * (HEAD_DIM * TILE) + offs_d[:, None] * TILE + offs_n[None, :]
                raw = tl.load(v_ptrs, mask=(offs_d < HEAD_DIM)[:, None] & (offs_n >= 0)[None, :], other=0)
                p, alpha, m, l = _weigh(s, v_scale, m, l, CFG)
                acc = (_add_fp8_values(acc[0] * alpha[:, None], raw, p, visible, PHASE != 2, CFG),)
            else:
                v_ptrs = page_slot_ptrs(v_head_ptr, page_idx, slot, stride_v_page, stride_v_slot)
                v = decode_parts(load_rows(v_ptrs, mask_row, WIDTH, WIDTH_PAD), v_scale, KV_FORMAT, q_first.dtype, CONVERT)
                if ROW_SCALES:
                    bad_scale = v_scale != v_scale
                    v_scale = tl.where(v_scale > MIN_SCALE, v_scale, tl.where(bad_scale, 1.0, MIN_SCALE))
                p, alpha, m, l = _weigh(s, v_scale, m, l, CFG)
                if ROW_SCALES:
                    p = tl.where(visible & bad_scale[None, :], float("nan"), p)
                first = _add_values(acc[0] * alpha[:, None], v[0], p, visible, PHASE != 2, CFG)
                if PARTS == 2:
                    acc = (first, _add_values(acc[1] * alpha[:, None], v[1], p, visible, PHASE != 2, CFG))
                else:
                    acc = (first,)

    # A row that sees no key has m -inf, l 0 and acc 0: it gives 0 and lse -inf.
    l = tl.where(l == 0.0, 1.0, l)
    m_nat = m
    if CFG.qk == "int8" and CFG.spec.softcap == 0.0:
        m_nat += row_shift
    tl.store(lse_ptr + token * (num_kv_heads * GROUP) + head, (m_nat + tl.log2(l)) * LN2, mask=mask_q)
    v_factor = decode_unit(KV_FORMAT, CONVERT)
    if FP8:
        v_factor_ptrs = v_scale_ptr + (req * num_kv_heads + kv_head) * HEAD_DIM + offs_d
        v_factor = tl.load(v_factor_ptrs, mask=offs_d < HEAD_DIM, other=0.0)[None, :] * (1.0 / FP8_WEIGHT)
    elif not ROW_SCALES and v_scale_ptr is not None:
        v_factor = v_factor * tl.load(v_scale_ptr + kv_head * CFG.v_scale_strides[2])
    for PART in tl.static_range(PARTS):
        sums = acc[PART]
        if FP8 or KV_FORMAT != "plain":
            sums = sums * v_factor
        out_ptrs = (out_ptr + token * stride_out_token + head * stride_out_head)[:, None] + (PART * WIDTH + offs_d)[None, :]
        tl.store(out_ptrs, (sums / l[:, None]).to(out_ptr.dtype.element_ty), mask=mask_q[:, None] & (offs_d < WIDTH)[None, :])
