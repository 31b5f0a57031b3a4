"""The soft cap of the plain-torch twins and oracles."""

from __future__ import annotations

import torch

LOG2_E = 1.4426950408889634
# bigpool.kernels._logits.SMALL
SMALL = 0.125


def soft_capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """cap tanh(scores / cap) of scores in units of log2; below float64 as kernels do it, by exp2 and a series of small values."""
    y = scores / (cap * LOG2_E)
    if scores.dtype == torch.float64:
        return cap * LOG2_E * torch.tanh(y)
    z = y * y
    series = y + y * z * (-1 / 3 + z * (2 / 15 + z * (-17 / 315)))
    return cap * LOG2_E * torch.where(y.abs() < SMALL, series, 1 - 2 / (1 + torch.exp2(scores * (2 / cap))))
