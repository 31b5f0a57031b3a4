"""Merges attention over parts of a context: outputs weighted by their log-sum-exp."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_states", "num_heads"])
def merge_states_kernel(
    outs_ptr, lses_ptr, out_ptr, lse_ptr, num_states, num_heads,
    stride_outs_state, stride_outs_token, stride_outs_head,
    stride_lses_state, stride_lses_token, stride_lses_head,
    stride_out_token, stride_out_head, stride_lse_token,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, HEAD_TILE: tl.constexpr,
):  # fmt: skip
    """Grid (num_tokens, cdiv(num_heads, HEAD_TILE)). States are walked by moving pointers: no product with a state's stride."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)).to(tl.int64)
    mask_head = head < num_heads
    offs_d = tl.arange(0, HEAD_DIM_PAD)
    mask = mask_head[:, None] & (offs_d < HEAD_DIM)[None, :]

    first_lse_ptrs = lses_ptr + token * stride_lses_token + head * stride_lses_head
    lse_ptrs = first_lse_ptrs
    top = tl.full([HEAD_TILE], float("-inf"), tl.float32)
    for _ in tl.range(0, num_states):
        top = tl.maximum(top, tl.load(lse_ptrs, mask=mask_head, other=float("-inf")))
        lse_ptrs += stride_lses_state
    # A token without a state: every weight is exp(-inf - 0) = 0.
    shift = tl.where(top == float("-inf"), 0.0, top)

    lse_ptrs = first_lse_ptrs
    row_ptrs = outs_ptr + token * stride_outs_token + head * stride_outs_head
    total = tl.zeros([HEAD_TILE], tl.float32)
    acc = tl.zeros([HEAD_TILE, HEAD_DIM_PAD], tl.float32)
    for _ in tl.range(0, num_states):
        lse = tl.load(lse_ptrs, mask=mask_head, other=float("-inf"))
        weight = tl.exp(lse - shift)
        # 0 * NaN is NaN: the rows of a state that saw no key are not read.
        seen = mask & (lse != float("-inf"))[:, None]
        row = tl.load(row_ptrs[:, None] + offs_d[None, :], mask=seen, other=0.0).to(tl.float32)
        acc += row * weight[:, None]
        total += weight
        lse_ptrs += stride_lses_state
        row_ptrs += stride_outs_state
    divisor = tl.where(total == 0.0, 1.0, total)
    out = acc / divisor[:, None]
    out_ptrs = out_ptr + token * stride_out_token + head * stride_out_head
    tl.store(out_ptrs[:, None] + offs_d[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + token * stride_lse_token + head, top + tl.log(divisor), mask=mask_head)
