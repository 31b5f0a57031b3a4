"""Attention of mixed batches: requests that decode, verify a draft and prefill a chunk, in one call."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from .._check import Contract
from ..tuning import MAX_SEQLEN_Q
from ..workspace import Workspace
from . import _prefill_check, _prefill_launch, _verify_check, _verify_launch
from ._operator import Operator

NAME = "attention"


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    max_seqlen_q: int,
    verify_seqlen_q: int = 16,
    kv_layout: str = "NHD",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    causal: bool = True,
    window_size: int | None = None,
    num_sink_tokens: int = 0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    check: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the new tokens of each request over its paged KV cache, however many tokens a request brings.

    Requests of at most `verify_seqlen_q` query tokens are computed as by `verify_attention`, their keys split over programs, the
    others as by `prefill_attention` with qk="exact". Which is which is decided on the device: the host reads no length, and a
    captured graph may be replayed with others.

    Args:
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q: as of `prefill_attention`.
        max_seqlen_q: the largest q_len, a host integer; what lies beyond it in a longer request is undefined. Where it is at most
            `verify_seqlen_q`, nothing is launched for longer requests.
        verify_seqlen_q: 1..256, the most query tokens of a request that count as a decode or a draft.
        kv_layout, k_scale, v_scale, causal, window_size, num_sink_tokens, softcap, sinks, softmax_scale: as of
            `verify_attention`.
        workspace: scratch of the requests that decode or verify, `Workspace.for_verify(max_seqlen_q=verify_seqlen_q, ...)`. None
            allocates `4 * num_reqs * verify_seqlen_q * num_q_heads * splits * (head_dim + 4)` bytes on each call.
        out: written in place if given, like q, no element twice; rows that belong to no request are undefined.
        return_lse: also return the natural log of the sum of exponentials, fp32 [num_tokens, num_q_heads].
        check: look at the values of block_table, seq_lens and cu_seqlens_q too. Syncs the host.
        backend: "auto", "triton" or "torch", as of `verify_attention`.

    Returns:
        out like q, or (out, lse); tokens that see no key, and pages outside the pool, as of `verify_attention`.

    Deterministic run to run for given sizes. Does not sync the host unless `check`; CUDA-graph capturable. What a token does not
    see never reaches it. Not differentiable.

    Raises:
        ArgumentError: listing every fault.  WorkspaceError: the workspace is too small, and by how much.
        BackendError: the backend cannot run here.
    """
    arguments = _verify_check.Arguments(
        q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q, kv_layout=kv_layout, k_scale=k_scale, v_scale=v_scale, causal=causal, window_size=window_size,
        num_sink_tokens=num_sink_tokens, chunk_size=None, softcap=softcap, alibi_slopes=None, sinks=sinks, tree_mask=None,
        out_scale=None, deterministic=None, softmax_scale=softmax_scale, num_splits=None, workspace=workspace, out=out,
        backend=backend,
    )  # fmt: skip
    _check_arguments(arguments, verify_seqlen_q)
    if check:
        _verify_check.check_values(arguments, NAME)
    out, lse = _run(arguments, verify_seqlen_q)
    return (out, lse) if return_lse else out


def _check_arguments(a: _verify_check.Arguments, verify_seqlen_q: int) -> None:
    """Raises ArgumentError with every fault that can be seen without looking at values on a device."""
    contract = Contract(NAME)
    shape_ok = _verify_check._check_tensors(contract, a)
    _prefill_check._check_scalars(contract, a, _prefill_check.Modes("exact", "exact", None, None))
    length_ok = _verify_check._is_int(verify_seqlen_q, 1, MAX_SEQLEN_Q)
    expected, remedy = f"an int 1..{MAX_SEQLEN_Q}", "longer requests are prefilled"
    contract.require(length_ok, "verify_seqlen_q", expected, f"{verify_seqlen_q!r}", remedy)
    _verify_check._check_rules(contract, a)
    _verify_check._check_workspace(contract, a)
    if shape_ok:
        _prefill_check._check_shapes(contract, a)
        _verify_check._check_scales(contract, a)
        _prefill_check._check_sinks(contract, a)
        _verify_check._check_out(contract, a)
    contract.finish()


def _run(a: _verify_check.Arguments, verify_seqlen_q: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sees the cache as NHD, allocates what is returned, and hands over to the backend."""
    k_pages, v_pages, k_scale, v_scale = a.as_nhd
    out, lse = a.results()
    call = (
        a.q, k_pages, v_pages, a.block_table, a.seq_lens, a.cu_seqlens_q, out, lse,
        None if a.workspace is None else a.workspace.part, a.max_seqlen_q, verify_seqlen_q, a.scale, k_scale, v_scale, a.sinks,
        a.causal, a.window_size or 0, a.num_sink_tokens, float(a.softcap or 0.0),
    )  # fmt: skip
    OPERATOR.run(a.backend, call, device=a.q.device, dtype=a.q.dtype)
    return out, lse


@dataclass(frozen=True)
class Call:
    """The arguments of the torch operator, in its order. Caches and scales are seen as NHD; 0 is None."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    scratch: torch.Tensor | None
    max_seqlen_q: int
    verify_seqlen_q: int
    softmax_scale: float
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    causal: bool = True
    window_size: int = 0
    num_sink_tokens: int = 0
    softcap: float = 0.0

    @property
    def shared(self) -> dict[str, Any]:
        """What the calls of both ops have too."""
        apart = ("scratch", "max_seqlen_q", "verify_seqlen_q")
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in apart}

    @property
    def verify(self) -> _verify_launch.Call:
        """Of the requests that are short enough."""
        longest = min(self.max_seqlen_q, self.verify_seqlen_q)
        return _verify_launch.Call(**self.shared, scratch=self.scratch, max_seqlen_q=longest, num_splits=0)

    @property
    def prefill(self) -> _prefill_launch.Call:
        """Of the others: a request of a negative length is left alone, so that `out` may be q."""
        long_lens = torch.where(self.cu_seqlens_q.diff() > self.verify_seqlen_q, self.seq_lens, -1)
        scratch: dict[str, Any] = dict.fromkeys(("sums", "codes", "scales", "means", "value_codes", "value_scales"))
        shared = {**self.shared, "seq_lens": long_lens}
        return _prefill_launch.Call(**shared, **scratch, max_keys=0, max_seqlen_q=self.max_seqlen_q)


@torch.no_grad()
def launch(*arguments: Any, plain: bool = False) -> None:
    """Launches a Call: long requests, then short ones. `plain`: the kernels in plain Triton, whatever the card."""
    call, of_verify, of_prefill = Call(*arguments), None, None
    if plain:
        from ..kernels import prefill, verify

        of_verify, of_prefill = verify, prefill
    has_long = call.max_seqlen_q > call.verify_seqlen_q
    if has_long:
        _prefill_launch.run(call.prefill, of_prefill)
    _verify_launch.run(call.verify, longest=call.verify_seqlen_q if has_long else 0, kernels=of_verify)


def run_twin(*arguments: Any) -> None:
    """`launch` on the plain-torch twin of verify attention, to which every length is the same."""
    call = Call(*arguments)
    _verify_launch.twin(_verify_launch.Call(**call.shared, scratch=None, max_seqlen_q=call.max_seqlen_q, num_splits=0))


OPERATOR = Operator(
    NAME,
    "Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, "
    "Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? scratch, SymInt max_seqlen_q, int verify_seqlen_q, float softmax_scale, "
    "Tensor? k_scale=None, Tensor? v_scale=None, Tensor? sinks=None, bool causal=True, int window_size=0, "
    "int num_sink_tokens=0, float softcap=0.",
    launch=launch, twin=run_twin, plain=partial(launch, plain=True),
)  # fmt: skip
