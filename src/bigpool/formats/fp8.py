"""fp8 e4m3 and e5m2, with a scale per tensor, per kv head, or per token and head.

Source: Micikevicius et al. 2022, "FP8 formats for deep learning" (arXiv 2209.05433); e4m3 is torch's e4m3fn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._format import KVFormat, Scales, row_scale

NAN_CODE = 0x7F


@dataclass(frozen=True)
class Fp8(KVFormat):
    """value = fp8(code) * scale. Finite values saturate at the largest one; NaN and infinity become the NaN code 0x7f."""

    def quantize(self, rows: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = rows.float()
        if self.scales == "token_head":
            scale = row_scale(rows.abs().amax(-1), torch.finfo(self.dtype).max)
            good_row = scale.isfinite().unsqueeze(-1)
            return self._encode(torch.where(good_row, rows / scale.unsqueeze(-1), 0.0)), scale
        scaled = rows if scale is None else rows / self.row_scales(scale).to(rows.device)
        return self._encode(torch.where(rows.isfinite(), scaled, float("nan"))), scale

    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        largest = torch.finfo(self.dtype).max
        codes = values.clamp(-largest, largest).to(self.dtype).view(torch.uint8)
        return codes.masked_fill(values.isnan(), NAN_CODE).view(self.dtype)

    def codes_as(self, codes: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        return codes.to(dtype)


_KINDS: tuple[Scales, ...] = ("tensor", "head", "token_head")
FP8 = (
    *(Fp8("fp8_e4m3", torch.float8_e4m3fn, scales) for scales in _KINDS),
    *(Fp8("fp8_e5m2", torch.float8_e5m2, scales) for scales in _KINDS),
)
