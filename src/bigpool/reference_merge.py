"""The plain-torch twin of `merge_states`: what CPU tensors run, and in float64 the oracle."""

from __future__ import annotations

import torch


def merge_states(
    outs: torch.Tensor, lses: torch.Tensor, *, compute_dtype: torch.dtype = torch.float32, reverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `bigpool.merge_states` for stacked states: (out, lse).

    `compute_dtype` float64 makes it the oracle: out and lse are float64 then. `reverse` sums the states last to first, which
    makes it the reordered baseline of the error rule.
    """
    if reverse:
        outs, lses = outs.flip(0), lses.flip(0)
    logs = lses.to(compute_dtype)
    top = logs.amax(0)
    shift = torch.where(top == float("-inf"), 0.0, top)
    total, out = torch.zeros_like(top), outs.new_zeros(outs.shape[1:], dtype=compute_dtype)
    for state, log in zip(outs, logs, strict=True):
        weight = torch.exp(log - shift)
        seen = (log != float("-inf")).unsqueeze(-1)
        out += torch.where(seen, state.to(compute_dtype), 0.0) * weight.unsqueeze(-1)
        total += weight
    divisor = torch.where(total == 0, 1.0, total)
    out /= divisor.unsqueeze(-1)
    return out if compute_dtype == torch.float64 else out.to(outs.dtype), top + torch.log(divisor)
