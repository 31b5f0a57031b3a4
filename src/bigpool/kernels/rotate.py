"""Queries against rotated keys: rows times the Hadamard matrix that bigpool.formats.rotate describes, in its order of sums."""

import triton
import triton.language as tl

from .cache import _rotate


@triton.jit
def rotate_rows_kernel(
    x_ptr, out_ptr, num_heads, stride_x_token, stride_x_head, stride_out_token, stride_out_head,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid (num_tokens, HEAD_DIM // BLOCK, cdiv(num_heads, HEADS)): one block of dims of HEADS heads of a token."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(2) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (head < num_heads)[:, None]
    x_ptrs = x_ptr + token * stride_x_token + head * stride_x_head
    x = tl.load(x_ptrs[:, None] + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + token * stride_out_token + head * stride_out_head
    tl.store(out_ptrs[:, None] + offs_d[None, :], _rotate(x, HEADS, BLOCK, STAGES).to(out_ptr.dtype.element_ty), mask=mask)
