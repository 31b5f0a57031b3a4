"""The merge of splits on Hopper: launched while the splits are still computed, and waiting for them on the device."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["num_splits"])
def verify_merge_sm90_kernel(
    part_ptr, out_ptr, lse_ptr, cu_seqlens_q_ptr, num_splits,
    stride_part_token, stride_part_head, stride_part_split, stride_out_token, stride_out_head, stride_lse_token,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT_TILE: tl.constexpr, LONGEST: tl.constexpr = 0,
):  # fmt: skip
    """Grid (num_reqs, max_seqlen_q * HEAD_DIM // BLOCK_D, num_q_heads): some dims of one query token and head."""
    BLOCKS: tl.constexpr = HEAD_DIM // BLOCK_D
    q_start = tl.load(cu_seqlens_q_ptr + tl.program_id(0))
    q_len = tl.load(cu_seqlens_q_ptr + tl.program_id(0) + 1) - q_start
    if LONGEST:
        q_len = tl.where(q_len > LONGEST, 0, q_len)
    gdc_wait()
    if tl.program_id(1) // BLOCKS >= q_len:
        return
    token = q_start.to(tl.int64) + tl.program_id(1) // BLOCKS
    head = tl.program_id(2).to(tl.int64)
    part_token = token
    if LONGEST:
        part_token = tl.program_id(0).to(tl.int64) * LONGEST + tl.program_id(1) // BLOCKS
    row_ptr = part_ptr + part_token * stride_part_token + head * stride_part_head
    offs_d = tl.program_id(1) % BLOCKS * BLOCK_D + tl.arange(0, BLOCK_D)
    m = float("-inf")
    l = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in tl.range(0, num_splits, SPLIT_TILE):
        split = first + tl.arange(0, SPLIT_TILE)
        mask = split < num_splits
        # bigpool: assume split * stride_part_split < 2**31, Workspace refuses splits of a token and head that span more
        split_ptrs = row_ptr + split * stride_part_split
        part = tl.load(split_ptrs[:, None] + offs_d[None, :], mask=mask[:, None], other=0.0)
        m_split = tl.load(split_ptrs + HEAD_DIM, mask=mask, other=float("-inf"))
        l_split = tl.load(split_ptrs + HEAD_DIM + 1, mask=mask, other=0.0)
        m_new = tl.maximum(m, tl.max(m_split, 0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        # A split without keys weighs nothing, whatever its row holds.
        weight = tl.where(l_split == 0.0, 0.0, tl.exp2(m_split - shift))
        alpha = tl.exp2(m - shift)
        l = l * alpha + tl.sum(l_split * weight, 0)
        acc = acc * alpha + tl.sum(tl.where((l_split != 0.0)[:, None], part, 0.0) * weight[:, None], 0)
        m = m_new
    l = tl.where(l == 0.0, 1.0, l)
    out = (acc / l).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * stride_out_token + head * stride_out_head + offs_d, out)
    if tl.program_id(1) % BLOCKS == 0:
        tl.store(lse_ptr + token * stride_lse_token + head, (m + tl.log2(l)) * LN2)
