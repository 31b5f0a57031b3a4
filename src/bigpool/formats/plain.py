"""Unquantised caches: bf16, fp16 and fp32, bits as they come."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._format import KVFormat


@dataclass(frozen=True)
class Plain(KVFormat):
    """Rows are stored in the dtype of the cache. NaN and infinity are stored like any other value."""

    def quantize(self, rows: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return rows.to(self.dtype), None

    def codes_as(self, codes: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        return codes.to(dtype)


PLAIN = (
    Plain("bf16", torch.bfloat16, "none"),
    Plain("fp16", torch.float16, "none"),
    Plain("fp32", torch.float32, "none"),
)
