"""int4 with a scale and a zero point per token and head, two values a byte; keys are stored rotated.

Byte j of a row holds dim j in its low nibble and dim j + head_dim / 2 in its high one. Scale and zero point share one fp32 word:
its lowest 4 bits are the zero point, and the word with these bits is the scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ._format import KVFormat, row_scale

CODE_MAX = 15


def zero_points(scales: torch.Tensor) -> torch.Tensor:
    """The zero points 0..15, int32, that the fp32 words `scales` hold."""
    return scales.view(torch.int32) & CODE_MAX


@dataclass(frozen=True)
class Int4(KVFormat):
    """value = scale * (code - zero point), codes and zero points 0..15; a row's range always holds 0."""

    packed: ClassVar[int] = 2
    rotates_k: ClassVar[bool] = True

    def quantize(self, rows: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = rows.float()
        low, high = rows.amin(-1).clamp(max=0.0), rows.amax(-1).clamp(min=0.0)
        step = row_scale(high - low, CODE_MAX)
        zero = (-low / step).round().clamp(max=CODE_MAX).nan_to_num(nan=0.0).to(torch.int32)
        words = (step.view(torch.int32) & ~CODE_MAX | zero).view(torch.float32)
        codes = (rows / words.unsqueeze(-1)).round() + zero.unsqueeze(-1)
        codes = codes.clamp(0, CODE_MAX).nan_to_num(nan=0.0).to(torch.uint8)
        first, second = codes.chunk(2, -1)
        return first | second << 4, words

    def codes_as(self, codes: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        assert scales is not None, "int4 words hold the zero points"
        values = torch.cat((codes & CODE_MAX, codes >> 4), -1).to(torch.int32)
        return (values - zero_points(scales).unsqueeze(-1)).to(dtype)


INT4 = (Int4("int4", torch.uint8, "token_head"),)
