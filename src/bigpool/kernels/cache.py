"""The writer of paged caches: rows of new tokens are quantised and stored, K and V in one launch.

Every rounding is spelled out, so that codes and scales are those of bigpool.formats bit by bit: divisions are IEEE, sums of the
rotation have one order, and no product is followed by a sum that a compiler could fuse with it.
"""

import triton
import triton.language as tl

from ._formats import encode_fp8
from ._paging import page_slot_ptrs, split_slot

# 1.5 * 2^23: adding it to |x| < 2^22 leaves no bit for a fraction, so that fp32 itself rounds to nearest, ties to even.
ROUND = tl.constexpr(12582912.0)
MIN_SCALE = tl.constexpr(2.0**-100)


@triton.jit
def _round(x):
    return (x + ROUND) - ROUND


@triton.jit
def _is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _row_scale(span, CODE_MAX: tl.constexpr):
    """Scales of rows of this largest magnitude or span: 1 for rows of zeros."""
    scale = tl.maximum(tl.div_rn(span, CODE_MAX), MIN_SCALE)
    return tl.where(span == 0.0, 1.0, scale)


@triton.jit
def _butterfly(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """Sum and difference of each two columns that lie HALF apart."""
    pairs = tl.permute(tl.reshape(x, (ROWS, WIDTH // (2 * HALF), 2, HALF)), (0, 1, 3, 2))
    first, second = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2)), (ROWS, WIDTH))


@triton.jit
def _rotate(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """x [ROWS, WIDTH] times the normalised Hadamard matrix of each block of 2^STAGES columns."""
    for stage in tl.static_range(STAGES):
        x = _butterfly(x, ROWS, WIDTH, 1 << stage)
    return x * (2.0 ** (-0.5 * STAGES))


@triton.jit
def _load_float(ptrs, mask):
    """Values at `ptrs` as fp32; 16-bit integers are the bits of bf16, which Triton's interpreter cannot convert."""
    x = tl.load(ptrs, mask=mask, other=0)
    if ptrs.dtype.element_ty == tl.int16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _store_int8(x, data_ptrs, scale_ptrs, mask_head, mask):
    bad = tl.max(tl.where(_is_finite(x), 0, 1), 1) > 0
    scale = _row_scale(tl.max(tl.where(bad[:, None], 0.0, tl.abs(x)), 1), 127.0)
    codes = _round(tl.div_rn(tl.where(bad[:, None], 0.0, x), tl.broadcast_to(scale[:, None], x.shape)))
    tl.store(data_ptrs, codes.to(tl.int8), mask=mask)
    tl.store(scale_ptrs, tl.where(bad, float("nan"), scale), mask=mask_head)


@triton.jit
def _store_int4(
    x, row_ptrs, scale_ptrs, mask_head,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, HEAD_TILE: tl.constexpr, HALF_PAD: tl.constexpr,
):  # fmt: skip
    """The padding of `x` holds zeros, which every range holds anyway."""
    bad = tl.max(tl.where(_is_finite(x), 0, 1), 1) > 0
    x = tl.where(bad[:, None], 0.0, x)
    low, high = tl.minimum(tl.min(x, 1), 0.0), tl.maximum(tl.max(x, 1), 0.0)
    too_wide = ~_is_finite(high - low)
    bad = bad | too_wide
    low, high = tl.where(too_wide, 0.0, low), tl.where(too_wide, 0.0, high)
    step = _row_scale(high - low, 15.0)
    zero = tl.minimum(_round(tl.div_rn(-low, step)), 15.0)
    word = ((step.to(tl.int32, bitcast=True) & -16) | zero.to(tl.int32)).to(tl.float32, bitcast=True)
    codes = _round(tl.div_rn(tl.where(bad[:, None], 0.0, x), tl.broadcast_to(word[:, None], x.shape))) + zero[:, None]
    codes = tl.minimum(tl.maximum(codes, 0.0), 15.0).to(tl.int32)

    HALF: tl.constexpr = HEAD_DIM // 2
    byte = tl.arange(0, HALF_PAD)
    first = tl.broadcast_to(byte[None, :], (HEAD_TILE, HALF_PAD))
    second = tl.minimum(first + HALF, HEAD_DIM_PAD - 1)
    packed = tl.gather(codes, first, 1) | (tl.gather(codes, second, 1) << 4)
    mask = mask_head[:, None] & (byte < HALF)[None, :]
    tl.store(row_ptrs[:, None] + byte[None, :], packed.to(tl.uint8), mask=mask)
    tl.store(scale_ptrs, tl.where(bad, float("nan"), word), mask=mask_head)


@triton.jit
def _store_fp8(
    x, data_ptrs, scale_ptrs, mask_head, mask,
    SCALES: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    LARGEST: tl.constexpr = 448.0 if FP8 == "e4m3" else 57344.0
    if SCALES == "token_head":
        bad = tl.max(tl.where(_is_finite(x), 0, 1), 1) > 0
        scale = _row_scale(tl.max(tl.where(bad[:, None], 0.0, tl.abs(x)), 1), LARGEST)
        y = tl.div_rn(tl.where(bad[:, None], 0.0, x), tl.broadcast_to(scale[:, None], x.shape))
        tl.store(scale_ptrs, tl.where(bad, float("nan"), scale), mask=mask_head)
    else:
        y = x
        if SCALES != "none":
            scale = tl.load(scale_ptrs, mask=mask_head, other=1.0)
            y = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        y = tl.where(_is_finite(x), y, float("nan"))
    tl.store(data_ptrs, encode_fp8(y, FP8), mask=mask)


@triton.jit
def _write_rows(
    in_ptrs, row_ptrs, scale_ptrs, mask_head, IS_KEY: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, HEAD_TILE: tl.constexpr,
    FORMAT: tl.constexpr, SCALES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows [HEAD_TILE, HEAD_DIM] at `in_ptrs` [HEAD_TILE] in the format of the cache to `row_ptrs` and `scale_ptrs`."""
    offs_d = tl.arange(0, HEAD_DIM_PAD)
    mask = mask_head[:, None] & (offs_d < HEAD_DIM)[None, :]
    value_ptrs = in_ptrs[:, None] + offs_d[None, :]
    data_ptrs = row_ptrs[:, None] + offs_d[None, :]
    if FORMAT == "plain":
        tl.store(data_ptrs, tl.load(value_ptrs, mask=mask, other=0), mask=mask)
    else:
        x = _load_float(value_ptrs, mask)
        if IS_KEY and FORMAT == "int4":
            x = _rotate(x, HEAD_TILE, HEAD_DIM_PAD, STAGES)
        if FORMAT == "int8":
            _store_int8(x, data_ptrs, scale_ptrs, mask_head, mask)
        elif FORMAT == "int4":
            _store_int4(x, row_ptrs, scale_ptrs, mask_head, HEAD_DIM, HEAD_DIM_PAD, HEAD_TILE, HEAD_DIM_PAD // 2)
        elif FORMAT == "fp8_e4m3":
            _store_fp8(x, data_ptrs, scale_ptrs, mask_head, mask, SCALES, "e4m3")
        else:
            _store_fp8(x, data_ptrs, scale_ptrs, mask_head, mask, SCALES, "e5m2")


@triton.jit(do_not_specialize=["num_pages"])
def write_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, slot_mapping_ptr, num_pages,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_kc_page, stride_kc_slot, stride_kc_head,
    stride_vc_page, stride_vc_slot, stride_vc_head,
    stride_ks_page, stride_ks_slot, stride_ks_head,
    stride_vs_page, stride_vs_slot, stride_vs_head,
    PAGE_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr,
    HEAD_TILE: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (num_tokens, cdiv(NUM_KV_HEADS, HEAD_TILE)). Strides of scales are 0 where one scale stands for what they pass over.

    A slot that is negative or beyond the pool is not written. Page ids are int64 because slots are, without a widening here.
    """
    token = tl.program_id(0).to(tl.int64)
    # bigpool: assume slot_mapping_ptr: int64, write_kv refuses other dtypes
    slot = tl.load(slot_mapping_ptr + token)
    page_idx, page_slot = split_slot(slot, PAGE_SIZE)
    if (slot < 0) | (page_idx >= num_pages):
        return
    head = (tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)).to(tl.int64)
    mask_head = head < NUM_KV_HEADS
    _write_rows(
        k_ptr + token * stride_k_token + head * stride_k_head,
        page_slot_ptrs(k_cache_ptr + head * stride_kc_head, page_idx, page_slot, stride_kc_page, stride_kc_slot),
        page_slot_ptrs(k_scale_ptr + head * stride_ks_head, page_idx, page_slot, stride_ks_page, stride_ks_slot),
        mask_head, True, HEAD_DIM, HEAD_DIM_PAD, HEAD_TILE, FORMAT, SCALES, STAGES,
    )  # fmt: skip
    _write_rows(
        v_ptr + token * stride_v_token + head * stride_v_head,
        page_slot_ptrs(v_cache_ptr + head * stride_vc_head, page_idx, page_slot, stride_vc_page, stride_vc_slot),
        page_slot_ptrs(v_scale_ptr + head * stride_vs_head, page_idx, page_slot, stride_vs_page, stride_vs_slot),
        mask_head, False, HEAD_DIM, HEAD_DIM_PAD, HEAD_TILE, FORMAT, SCALES, STAGES,
    )  # fmt: skip
