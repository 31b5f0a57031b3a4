"""Verify attention: a few query tokens per request over a paged KV cache."""

from __future__ import annotations

import torch

from .._check import Contract
from ..workspace import Workspace
from ._operator import BACKENDS, require_interpreter
from ._verify_check import Arguments, check_arguments, check_values
from ._verify_launch import OPERATOR
from ._verify_launch import launch as _launch

__all__ = ["BACKENDS", "_launch", "require_interpreter", "verify_attention"]


def verify_attention(
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
    causal: bool = True,
    window_size: int | None = None,
    num_sink_tokens: int = 0,
    chunk_size: int | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    deterministic: str | None = None,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    check: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last few tokens of each request over its paged KV cache, the keys of one request split over programs.

    Query token i of a request with q_len query tokens sits at position `p = seq_len - q_len + i` and sees key j iff
    `j < seq_len` and (`causal`: `j <= p`) and (`j < num_sink_tokens`, or `j > p - window_size` and
    `j >= p // chunk_size * chunk_size`). q_len 1 is decode. The keys of the query tokens must be in the cache already.

    Args:
        q: [num_tokens, num_q_heads, head_dim], bf16, fp16 or fp32; requests one after another; any strides between tokens
            and heads. head_dim 16..512, padded inside to a power of two.
        k_cache, v_cache: NHD [num_pages, page_size, num_kv_heads, head_dim] or HND [num_pages, num_kv_heads, page_size,
            head_dim], q's dtype, or a quantised cache: float8_e4m3fn, float8_e5m2, int8, or uint8 [..., head_dim / 2] (int4,
            keys stored rotated); docs/formats.md has their bytes. Any page size, any strides but 1 in the last axis, which may
            differ between the two; one page of one head spans fewer than 2^31 elements. The number of pages has no limit below
            2^31.
        block_table: int32 [num_reqs, max_pages_per_req], page ids. Entries past the end of a request are not read, nor those
            of pages that no token sees.
        seq_lens: int32 [num_reqs], the length of each request *including* its new tokens, at most 2^31 - 2^16.
        cu_seqlens_q: int32 [num_reqs + 1], exclusive prefix sums of the q_lens; non-decreasing.
        max_seqlen_q: the largest q_len, a host integer up to 256; what lies beyond it in a longer request is undefined.
        k_scale, v_scale: fp32. fp8: None (1.0), one element, [num_kv_heads], or the cache's axes without the last; int8 and int4:
            the cache's axes without the last, any strides. K and V have scales of one kind.
        causal: False lets every token see all keys of its request.
        window_size: None, or how many positions up to its own a token sees, counted in cache slots.
        num_sink_tokens: the first keys of a request, which a window or a chunk leaves visible.
        chunk_size: None, or local attention: a token sees its own chunk of positions only.
        softcap: None, or c: scores become `c * tanh(score / c)`, after the scale and before ALiBi.
        alibi_slopes: None, or fp32 [num_q_heads]: `slope * (j - p)` is added to scores.
        sinks: None, or fp32 [num_q_heads]: a logit a head that joins the softmax without a value; lse counts it.
        tree_mask: None, or int32 [num_tokens, ceil(max_seqlen_q / 32)], see `pack_tree_mask`: bit t of a token's row says whether
            it sees the key of query token t of its request, in place of the causal rule. Needs causal.
        out_scale: None, or fp32, one element: `out` is fp8, the result / out_scale to nearest even, saturated.
        deterministic: None, or "batch": the bits of a token depend on neither the other requests, nor the width of the table, nor
            how many tokens a call brings. Its scratch grows with the width of the table: docs/verify.md.
        softmax_scale: head_dim ** -0.5 if None.
        num_splits: programs per request and kv head; None chooses from sizes alone, so that a captured graph stays valid.
        workspace: scratch, see Workspace.for_verify; None allocates per call.
        out: written in place if given, like q (with out_scale float8_e4m3fn or float8_e5m2), no element twice; rows that belong
            to no request are not written.
        return_lse: also return the natural log of the sum of exponentials, fp32 [num_tokens, num_q_heads].
        check: look at the values of block_table, seq_lens and cu_seqlens_q too. Syncs the host.
        backend: "auto": the card's kernels for CUDA tensors, the plain-torch twin for CPU tensors. "triton": the kernels in plain
            Triton; they take CPU tensors when Triton runs its interpreter (TRITON_INTERPRET=1; fp16 and fp32 q, since its bf16
            arithmetic is wrong). "torch": the twin.

    Returns:
        out like q (float8_e4m3fn with out_scale), or (out, lse). A query token that sees no key (seq_len 0, or seq_len < q_len)
        gives 0 and lse -inf (with sinks: its sink). A token that sees a key whose page id is outside the pool gives NaN; such a
        page is never read. A longer seq_len than the table holds counts as what it holds. Rows of `out` and `lse` that belong to
        no request are undefined.

    Deterministic run to run for given sizes. Does not sync the host unless `check`; CUDA-graph capturable. NaN or infinity in
    keys, values or scales that a token does not see never reaches its row; in values of the newest keys it makes all of a row
    that sees them NaN. A NaN scale of a key that a token sees makes its row NaN.

    Not differentiable: out and lse carry no gradient.

    Raises:
        ArgumentError: listing every fault.  WorkspaceError: the workspace is too small, and by how much.
        BackendError: the backend cannot run here.

    Source: online softmax, Milakov and Gimelshein 2018 (arXiv 1805.02867); split-KV merge, FlashDecoding (2023); sinks and
    windows, Xiao et al. 2023 (arXiv 2309.17453); ALiBi, Press et al. 2021 (arXiv 2108.12409).
    """
    arguments = Arguments(
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, kv_layout, k_scale, v_scale, causal, window_size,
        num_sink_tokens, chunk_size, softcap, alibi_slopes, sinks, tree_mask, out_scale, deterministic, softmax_scale, num_splits,
        workspace, out, backend,
    )  # fmt: skip
    check_arguments(arguments)
    if check:
        check_values(arguments)
    out, lse = _run(arguments)
    return (out, lse) if return_lse else out


def _run(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Sees the cache as NHD, allocates what is returned, and hands over to the backend."""
    k_pages, v_pages, k_scale, v_scale = a.as_nhd
    out, lse = a.results()
    call = (
        a.q, k_pages, v_pages, a.block_table, a.seq_lens, a.cu_seqlens_q, out, lse,
        None if a.workspace is None else a.workspace.part, a.max_seqlen_q, a.num_splits or 0, a.scale, k_scale, v_scale,
        a.alibi_slopes, a.sinks, a.tree_mask, a.out_scale, a.causal, a.window_size or 0, a.num_sink_tokens, a.chunk_size or 0,
        float(a.softcap or 0.0), a.deterministic == "batch",
    )  # fmt: skip
    OPERATOR.run(a.backend, call, device=a.q.device, dtype=a.q.dtype)
    return out, lse


def pack_tree_mask(visible: torch.Tensor) -> torch.Tensor:
    """The bits of a tree mask: bool [num_tokens, draft] to int32 [num_tokens, ceil(draft / 32)], bit t % 32 of word t // 32.

    `visible[row, t]`: whether the query token `row` sees the key of query token t of its own request; its own bit counts too.
    `draft` is the largest number of query tokens of a request (max_seqlen_q).

    Raises:
        ArgumentError: not a bool tensor of two axes.
    """
    contract = Contract("pack_tree_mask")
    contract.tensor("visible", visible.contiguous() if isinstance(visible, torch.Tensor) else visible, "num_tokens draft",
                    (torch.bool,), "call visible.bool()")  # fmt: skip
    contract.finish()
    num_tokens, draft = visible.shape
    bits = torch.zeros(num_tokens, -(-draft // 32) * 32, dtype=torch.int64, device=visible.device)
    bits[:, :draft] = visible
    words = (bits.view(num_tokens, -1, 32) << torch.arange(32, device=visible.device)).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32)


def unpack_tree_mask(tree_mask: torch.Tensor, draft: int) -> torch.Tensor:
    """bool [num_tokens, draft] of the words of a tree mask: the inverse of `pack_tree_mask`."""
    bits = (tree_mask.unsqueeze(-1) >> torch.arange(32, device=tree_mask.device)) & 1
    return bits.flatten(1)[:, :draft].bool()
