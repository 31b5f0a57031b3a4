"""Merging attention over parts of a context: shared prefixes, context-parallel ranks, prefix and suffix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import reference_merge
from .._check import Contract
from ..tuning import MAX_HEAD_DIM, next_power_of_2
from ._operator import Operator, require_backend

STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Elements of a program's tile: a row of each of a few heads.
TILE_ELEMENTS = 1024
AXES = "num_states num_tokens num_heads"


def merge_states(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
    *,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a whole context out of attention over its parts: each output weighted by exp(lse).

    Args:
        outs: [num_states, num_tokens, num_heads, head_dim], bf16, fp16 or fp32, any strides but 1 in the last axis; or a list
            of num_states tensors without the first axis, which are copied into one first. head_dim up to 512.
        lses: float32 [num_states, num_tokens, num_heads], any strides; or a list. The natural log of the sum of exponentials,
            as `verify_attention(..., return_lse=True)` gives it.
        out: written in place if given: [num_tokens, num_heads, head_dim], the dtype of outs, no element twice.
        backend: "auto": Triton for CUDA tensors, the plain-torch twin for CPU tensors. "triton" takes CPU tensors when Triton
            runs its interpreter (TRITON_INTERPRET=1; fp16 and fp32 only). "torch": the twin.

    Returns:
        (out, lse): [num_tokens, num_heads, head_dim] in the dtype of outs, and float32 [num_tokens, num_heads]; summed in
        float32, states in order. A state with lse -inf saw no key: it adds nothing, even if its out is NaN. Where all lses are
        -inf, out is 0 and lse -inf. An lse of NaN or +inf makes that row NaN.

    Deterministic. Does not sync the host; CUDA-graph capturable. Not differentiable.

    Raises:
        ArgumentError: listing every fault.  BackendError: the backend cannot run here.

    Source: Milakov and Gimelshein 2018 (arXiv 1805.02867); cascades, Ye et al. 2024 (FlashInfer).
    """
    contract = Contract("merge_states")
    states, logs = _stacked(contract, "outs", outs), _stacked(contract, "lses", lses)
    _check(contract, states, logs, out, backend)
    contract.finish()
    if out is None:
        out = torch.empty(states.shape[1:], dtype=states.dtype, device=states.device)
    lse = torch.empty(logs.shape[1:], dtype=torch.float32, device=states.device)
    arguments = (states, logs, out, lse)
    OPERATOR.run(backend, arguments, device=states.device, dtype=states.dtype)
    return out, lse


def _stacked(contract: Contract, name: str, value: Any) -> Any:
    """A list of states as one tensor. Anything else is left to the checks."""
    if not isinstance(value, (list, tuple)):
        return value
    if not value or not all(isinstance(state, torch.Tensor) for state in value):
        contract.fault(
            name, "a tensor or a list of tensors", repr([type(state).__name__ for state in value]), "pass one per state"
        )
        contract.finish()
    kinds = {(tuple(state.shape), str(state.dtype), str(state.device)) for state in value}
    if len(kinds) > 1:
        got = " and ".join(sorted(f"{dtype.removeprefix('torch.')} {list(shape)} on {device}" for shape, dtype, device in kinds))
        contract.fault(name, "states of one shape, dtype and device", got, "pass the same tokens and heads in each state")
        contract.finish()
    return torch.stack(tuple(value))


def _check(contract: Contract, outs: Any, lses: Any, out: Any, backend: str) -> None:
    if contract.tensor("outs", outs, f"{AXES} head_dim", STATE_DTYPES, "stack the states in the first axis"):
        device, head_dim = outs.device, contract.axes["head_dim"]
        contract.tensor(
            "lses", lses, AXES, (torch.float32,), "pass one lse per state, token and head", device=device, any_strides=True
        )
        contract.require(outs.shape[0] > 0, "outs", "1 state or more", "0", "pass the states to merge")
        contract.require(0 < head_dim <= MAX_HEAD_DIM, "outs", f"head_dim 1..{MAX_HEAD_DIM}", f"{head_dim}", "split the heads")
        if out is not None:
            axes, remedy = "num_tokens num_heads head_dim", "pass torch.empty_like(outs[0])"
            contract.tensor("out", out, axes, (outs.dtype,), remedy, device=device, written=True)
    require_backend(contract, backend)


@torch.no_grad()
def _launch(outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, kernels: Any = None) -> None:
    """`kernels`: a version of bigpool.kernels.merge."""
    if kernels is None:
        from ..kernels import merge

        kernels = merge

    num_states, num_tokens, num_heads, head_dim = outs.shape
    if num_tokens == 0 or num_heads == 0:
        return
    head_dim_pad = next_power_of_2(head_dim)
    head_tile = min(next_power_of_2(num_heads), max(TILE_ELEMENTS // head_dim_pad, 1))
    kernels.merge_states_kernel[(num_tokens, -(-num_heads // head_tile))](
        outs, lses, out, lse, num_states, num_heads,
        *outs.stride()[:3], *lses.stride(), *out.stride()[:2], lse.stride(0),
        HEAD_DIM=head_dim, HEAD_DIM_PAD=head_dim_pad, HEAD_TILE=head_tile,
    )  # fmt: skip


@torch.no_grad()
def _run_twin(outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    merged, merged_lse = reference_merge.merge_states(outs, lses)
    out.copy_(merged)
    lse.copy_(merged_lse)


OPERATOR = Operator(
    "merge_states",
        "Tensor outs, Tensor lses, Tensor(a!) out, Tensor(b!) lse",
    launch=_launch, twin=_run_twin, plain=_launch,
)  # fmt: skip
