"""Prefill attention: chunks of new tokens of many requests over a paged KV cache."""

from __future__ import annotations

from typing import Any

import torch

from ._prefill_check import NAME, check_arguments, check_room
from ._prefill_launch import launch as _launch
from ._prefill_launch import run_twin
from ._prefill_plan import PrefillWorkspace, prefill_scratch_bytes
from ._verify_check import Arguments, check_values
from .verify import require_interpreter

__all__ = ["PrefillWorkspace", "_launch", "prefill_attention", "prefill_scratch_bytes"]


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    max_seqlen_q: int,
    kv_layout: str = "NHD",
    softmax_scale: float | None = None,
    qk: str = "exact",
    causal: bool = True,
    window_size: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    workspace: PrefillWorkspace | None = None,
    check: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of a chunk of new tokens of each request over its paged KV cache, the chunk's own keys included.

    Query token i of a request with q_len query tokens sits at position `p = seq_len - q_len + i` and sees key j iff
    `j < seq_len` and (`causal`: `j <= p`) and (`window_size`: `j > p - window_size`). The keys of the query tokens must be in the
    cache already. Requests may have any q_len, 0 and 1 too.

    Args:
        q: [num_tokens, num_q_heads, head_dim], bf16, fp16 or fp32; requests one after another; any strides between tokens
            and heads, so that a slice of a fused projection needs no copy. head_dim 16..256, padded inside to a power of two.
        k_cache, v_cache: NHD [num_pages, page_size, num_kv_heads, head_dim] or HND [num_pages, num_kv_heads, page_size,
            head_dim], q's dtype. Any page size, any strides but 1 in the last axis, which may differ between the two; one page
            of one head spans fewer than 2^31 elements. The number of pages has no limit below 2^31.
        block_table: int32 [num_reqs, max_pages_per_req], page ids; at most 65,535 requests. Entries past the end of a request
            are not read, nor those of pages that no token sees.
        seq_lens: int32 [num_reqs], the length of each request *including* its new tokens, at most 2^31 - 2^16.
        cu_seqlens_q: int32 [num_reqs + 1], exclusive prefix sums of the q_lens; non-decreasing.
        max_seqlen_q: the largest q_len, a host integer; what lies beyond it in a longer request is undefined.
        softmax_scale: head_dim ** -0.5 if None.
        qk: "exact": scores from products in q's dtype, summed in fp32. "int8": K less its mean over the visible keys of the
            request, and q, each rounded to int8 with a scale per row; integer products. P V is in q's dtype in both.
            docs/prefill.md has the errors.
        causal: False lets every token see all keys of its request.
        window_size: None, or how many positions up to its own a token sees.
        softcap: None, or c: scores become `c * tanh(score / c)`, after the scale.
        out: written in place if given, like q, no element twice; rows that belong to no request are not written.
        return_lse: also return the natural log of the sum of exponentials, fp32 [num_tokens, num_q_heads].
        workspace: scratch of qk="int8", see PrefillWorkspace.empty. None allocates on each call what the table could hold:
            num_reqs * max_pages_per_req * page_size keys.
        check: look at the values of block_table, seq_lens and cu_seqlens_q too, and whether keys fit the scratch. Syncs the host.
        backend: "auto": Triton for CUDA tensors, the plain-torch twin for CPU tensors. "triton" takes CPU tensors when Triton
            runs its interpreter (TRITON_INTERPRET=1; fp16 and fp32, since its bf16 arithmetic is wrong). "torch": the twin.

    Returns:
        out like q, or (out, lse). A query token that sees no key (seq_len 0, or seq_len < q_len) gives 0 and lse -inf. A token
        that sees a key whose page id is outside the pool gives NaN; such a page is never read. A longer seq_len than the table
        holds counts as what it holds. int8: the tokens of a request that does not fit the workspace give NaN. Rows of `out` and
        `lse` that belong to no request are undefined.

    Deterministic run to run; the bits of a request do not depend on the other requests. Does not sync the host unless `check`;
    CUDA-graph capturable. Lengths compile nothing anew. NaN or infinity in keys or values that a token does not see never
    reaches its row; in values of the newest keys it makes all of a row that sees them NaN.

    Not differentiable: out and lse carry no gradient.

    Raises:
        ArgumentError: listing every fault.  WorkspaceError: `check`: the keys do not fit, and by how much.
        BackendError: the backend cannot run here.

    Source: online softmax, Milakov and Gimelshein 2018 (arXiv 1805.02867); the mean taken from K before it is rounded to int8,
    SageAttention, Zhang et al. 2024 (arXiv 2410.02367).
    """
    arguments = Arguments(
        q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q, kv_layout=kv_layout, k_scale=None, v_scale=None, causal=causal, window_size=window_size,
        num_sink_tokens=0, chunk_size=None, softcap=softcap, alibi_slopes=None, sinks=None, tree_mask=None, out_scale=None,
        deterministic=None, softmax_scale=softmax_scale, num_splits=None, workspace=None, out=out, backend=backend,
    )  # fmt: skip
    check_arguments(arguments, qk, workspace)
    if check:
        check_values(arguments, NAME)
        if workspace is not None:
            check_room(arguments, workspace)
    out, lse = _run(arguments, qk, workspace)
    return (out, lse) if return_lse else out


def _run(a: Arguments, qk: str, workspace: PrefillWorkspace | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Sees the cache as NHD, allocates what is returned, and hands over to the backend."""
    k_pages, v_pages = a.k_cache, a.v_cache
    if a.kv_layout == "HND":
        k_pages, v_pages = k_pages.transpose(1, 2), v_pages.transpose(1, 2)
    q = a.q
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if a.out is None else a.out
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    scale = q.shape[-1] ** -0.5 if a.softmax_scale is None else a.softmax_scale
    scratch: tuple[torch.Tensor | None, ...] = (None,) * 4
    if workspace is not None:
        scratch = workspace.codes, workspace.scales, workspace.sums, workspace.means
    call: tuple[Any, ...] = (
        q, k_pages, v_pages, a.block_table, a.seq_lens, a.cu_seqlens_q, out, lse, *scratch, a.max_seqlen_q, scale, qk == "int8",
        a.causal, a.window_size or 0, float(a.softcap or 0.0),
    )  # fmt: skip
    if a.backend == "triton" and q.device.type == "cpu":
        require_interpreter(q.dtype)
        _launch(*call)
    elif a.backend == "torch":
        run_twin(*call)
    else:
        torch.ops.bigpool.prefill_attention(*call)
    return out, lse
