"""Prefill attention: chunks of new tokens of many requests over a paged KV cache."""

from __future__ import annotations

from typing import Any

import torch

from ._prefill_check import NAME, Modes, check_arguments, check_room, require_fp8
from ._prefill_launch import OPERATOR
from ._prefill_launch import launch as _launch
from ._prefill_scratch import KeyCodes, PrefillWorkspace, key_codes_bytes, prefill_scratch_bytes
from ._verify_check import Arguments, check_values

__all__ = ["KeyCodes", "PrefillWorkspace", "_launch", "key_codes_bytes", "prefill_attention", "prefill_scratch_bytes"]


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
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    qk: str = "exact",
    pv: str = "exact",
    causal: bool = True,
    window_size: int | None = None,
    num_sink_tokens: int = 0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    workspace: PrefillWorkspace | None = None,
    key_codes: KeyCodes | None = None,
    check: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of a chunk of new tokens of each request over its paged KV cache, the chunk's own keys included.

    Query token i of a request with q_len query tokens sits at position `p = seq_len - q_len + i` and sees key j iff
    `j < seq_len` and (`causal`: `j <= p`) and (`j < num_sink_tokens`, or `j > p - window_size`). The keys of the query tokens
    must be in the cache already. Requests may have any q_len, 0 and 1 too.

    Args:
        q: [num_tokens, num_q_heads, head_dim], bf16, fp16 or fp32; requests one after another; any strides between tokens
            and heads, so that a slice of a fused projection needs no copy. head_dim 16..512, padded inside to a power of two.
        k_cache, v_cache: NHD [num_pages, page_size, num_kv_heads, head_dim] or HND [num_pages, num_kv_heads, page_size,
            head_dim], q's dtype, or a quantised cache: float8_e4m3fn, float8_e5m2, int8, or uint8 [..., head_dim / 2] (int4,
            keys stored rotated); docs/formats.md has their bytes. Any page size, any strides but 1 in the last axis, which may
            differ between the two; one page of one head spans fewer than 2^31 elements. The number of pages has no limit below
            2^31.
        block_table: int32 [num_reqs, max_pages_per_req], page ids; at most 65,535 requests. Entries past the end of a request
            are not read, nor those of pages that no token sees.
        seq_lens: int32 [num_reqs], the length of each request *including* its new tokens, at most 2^31 - 2^16.
        cu_seqlens_q: int32 [num_reqs + 1], exclusive prefix sums of the q_lens; non-decreasing.
        max_seqlen_q: the largest q_len, a host integer; what lies beyond it in a longer request is undefined.
        k_scale, v_scale: fp32 scales of a quantised cache, as of verify_attention: None, one element, [num_kv_heads], or the
            cache's axes without the last.
        softmax_scale: head_dim ** -0.5 if None.
        qk: "exact": scores from products in q's dtype, summed in fp32. "int8": K less a mean key, and q, each rounded to int8
            with a scale per row; integer products. docs/prefill.md has the errors, also of `pv`.
        pv: "exact": weights rounded to q's dtype meet V. "fp8": weights, and V with a scale per channel and kv head, rounded to
            e4m3, each tile's products summed by itself and then in fp32. Compute capability 8.9 or later. Both modes of 8 bits
            need a cache in q's dtype.
        causal: False lets every token see all keys of its request.
        window_size: None, or how many positions up to its own a token sees.
        num_sink_tokens: the first keys of a request, which a window leaves visible.
        softcap: None, or c: scores become `c * tanh(score / c)`, after the scale.
        sinks: None, or fp32 [num_q_heads]: a logit a head that joins the softmax without a value; lse counts it.
        out: written in place if given, like q, no element twice; rows that belong to no request are not written.
        return_lse: also return the natural log of the sum of exponentials, fp32 [num_tokens, num_q_heads].
        workspace: scratch of qk="int8" and pv="fp8", see PrefillWorkspace.empty. None allocates on each call what the table could
            hold: num_reqs * max_pages_per_req * page_size keys.
        key_codes: None: qk="int8" rounds all keys of the context on every call. A KeyCodes: only the new tokens' keys, and their
            codes are kept in it, written in place. Every token of a request but its first 128 must have been a query token of
            such a call, its chunk and those before it in any sizes; then, with pv="exact", its output has the same bits whatever
            these sizes were, and pages that requests share may be shared. Needs causal, and no window.
        check: look at the values of block_table, seq_lens and cu_seqlens_q too, and whether keys fit the scratch. Syncs the host.
        backend: "auto": the card's kernels for CUDA tensors, the plain-torch twin for CPU tensors. "triton": the kernels in plain
            Triton; they take CPU tensors when Triton runs its interpreter (TRITON_INTERPRET=1; fp16 and fp32, since its bf16
            arithmetic is wrong). "torch": the twin.

    Returns:
        out like q, or (out, lse). A query token that sees no key (seq_len 0, or seq_len < q_len) gives 0 and lse -inf (with
        sinks: its sink). A token that sees a key whose page id is outside the pool gives NaN; such a page is never read. A longer
        seq_len than the table holds counts as what it holds. The tokens of a request that does not fit the workspace after those
        before it give NaN; the twin needs no workspace. Rows of `out` and `lse` that belong to no request are undefined.

    Of the kernels: deterministic run to run; the bits of a request do not depend on the other requests. Does not sync the host
    unless `check`; CUDA-graph capturable. Lengths compile nothing anew. NaN or infinity in keys or values that a token does not
    see never reaches its row; in values of the newest keys it makes all of a row that sees them NaN.

    Not differentiable: out and lse carry no gradient.

    Raises:
        ArgumentError: listing every fault.  WorkspaceError: `check`: the keys do not fit, and by how much.
        BackendError: the backend cannot run here, or the card has no products of fp8.

    Source: online softmax, Milakov and Gimelshein 2018 (arXiv 1805.02867); the mean taken from K before it is rounded to int8,
    SageAttention, Zhang et al. 2024 (arXiv 2410.02367); fp8 weights, SageAttention2 (arXiv 2411.10958).
    """
    arguments = Arguments(
        q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q, kv_layout=kv_layout, k_scale=k_scale, v_scale=v_scale, causal=causal, window_size=window_size,
        num_sink_tokens=num_sink_tokens, chunk_size=None, softcap=softcap, alibi_slopes=None, sinks=sinks, tree_mask=None,
        out_scale=None, deterministic=None, softmax_scale=softmax_scale, num_splits=None, workspace=None, out=out,
        backend=backend,
    )  # fmt: skip
    modes = Modes(qk, pv, workspace, key_codes)
    check_arguments(arguments, modes)
    if pv == "fp8" and backend != "torch":
        require_fp8(q.device)
    if check:
        check_values(arguments, NAME)
        if workspace is not None:
            check_room(arguments, workspace)
    out, lse = _run(arguments, modes)
    return (out, lse) if return_lse else out


def _run(a: Arguments, modes: Modes) -> tuple[torch.Tensor, torch.Tensor]:
    """Sees the cache as NHD, allocates what is returned, and hands over to the backend."""
    workspace, kept = modes.workspace, modes.key_codes
    k_pages, v_pages, k_scale, v_scale = a.as_nhd
    out, lse = a.results()
    sums, *key_parts, value_codes, value_scales = (None,) * 6 if workspace is None else workspace.tensors
    if kept is not None:
        key_parts = [kept.codes, kept.scales, kept.means]
    call: tuple[Any, ...] = (
        a.q, k_pages, v_pages, a.block_table, a.seq_lens, a.cu_seqlens_q, out, lse, sums, *key_parts, value_codes, value_scales,
        0 if workspace is None else workspace.max_num_keys, a.max_seqlen_q, a.scale, modes.qk if kept is None else "kept",
        modes.pv, k_scale, v_scale, a.sinks, a.causal, a.window_size or 0, a.num_sink_tokens, float(a.softcap or 0.0),
    )  # fmt: skip
    OPERATOR.run(a.backend, call, device=a.q.device, dtype=a.q.dtype)
    return out, lse
