"""What every format can do. Rows are [..., num_kv_heads, head_dim] throughout, whatever the layout of the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

Scales = Literal["none", "tensor", "head", "token_head"]
SCALES: tuple[Scales, ...] = ("none", "tensor", "head", "token_head")
SCALE_BYTES = 4
# No writer stores a smaller scale, and readers take a smaller one for this: its logarithm and its inverse stay far inside fp32.
MIN_SCALE = 2.0**-100


@dataclass(frozen=True)
class KVFormat(ABC):
    """A format: `name`, the `dtype` of a stored element, what a scale stands for (`scales`), values `packed` in an element.

    `rotates_k`: keys are stored rotated (see `rotate`), values never. Everything here works on rows as they are stored.
    """

    name: str
    dtype: torch.dtype
    scales: Scales
    packed: ClassVar[int] = 1
    rotates_k: ClassVar[bool] = False

    def row_elements(self, head_dim: int) -> int:
        """Stored elements of a row's data."""
        return head_dim // self.packed

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of a row with its own scale, if it has one."""
        return self.row_elements(head_dim) * self.dtype.itemsize + (SCALE_BYTES if self.scales == "token_head" else 0)

    @abstractmethod
    def quantize(self, rows: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(codes [..., num_kv_heads, row_elements], scales [..., num_kv_heads] fp32 or None) of rows of any float dtype.

        `scale` is the given one where it stands for a tensor or a head, and comes back. Codes are rounded to nearest, ties
        to even. A row with NaN or infinity gets scale NaN and codes 0; where scales are given, the element becomes NaN.
        """

    @abstractmethod
    def codes_as(self, codes: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Exact integers or fp8 values [..., num_kv_heads, head_dim] in `dtype`: what a kernel multiplies before the scale."""

    def row_scales(self, scales: torch.Tensor | None) -> torch.Tensor:
        """fp32 factors that broadcast against [..., num_kv_heads, head_dim]."""
        if scales is None:
            return torch.ones(())
        if self.scales == "tensor":
            return scales.reshape(())
        return scales.unsqueeze(-1)

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values [..., num_kv_heads, head_dim] as stored (rotated where the format rotates); exact in float64."""
        return self.codes_as(codes, scales, dtype) * self.row_scales(scales).to(codes.device, dtype)


def row_scale(amax: torch.Tensor, code_max: float) -> torch.Tensor:
    """fp32 scales of rows whose largest magnitude (or span) is `amax`: 1 for rows of zeros, NaN for rows that are not finite."""
    # By a tensor: torch multiplies by the reciprocal of a plain number on a GPU.
    scale = (amax / torch.full_like(amax, code_max)).clamp(min=MIN_SCALE)
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(amax.isfinite(), scale, float("nan"))
