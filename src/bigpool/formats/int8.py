"""int8 with a scale per token and head: symmetric codes -127..127."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._format import KVFormat, row_scale

CODE_MAX = 127


@dataclass(frozen=True)
class Int8(KVFormat):
    """value = code * scale, scale = largest magnitude of the row / 127."""

    def quantize(self, rows: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = rows.float()
        scale = row_scale(rows.abs().amax(-1), CODE_MAX)
        codes = (rows / scale.unsqueeze(-1)).round().nan_to_num(nan=0.0)
        return codes.to(torch.int8), scale

    def codes_as(self, codes: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        return codes.to(dtype)


INT8 = (Int8("int8", torch.int8, "token_head"),)
