"""Shapes of verify attention over a cache in a stated format, written as `b1-q8-kv32k-p880-h24/4-d256-int8`, and their work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from bigpool import formats
from bigpool.bench import shapes
from bigpool.bench.shapes import FORMATS, Shape
from bigpool.bench.work import Work
from bigpool.cost import Cost
from bigpool.formats import SCALE_BYTES, KVFormat

# Rows that are quantised at once, so that their fp32 copies stay small.
CHUNK_ROWS = 1 << 18


def format_of(name: str) -> KVFormat:
    return formats.named(name, FORMATS[name])


@dataclass(frozen=True)
class FormatShape(Shape):
    """A Shape whose cache is in `kv_format`, a name of FORMATS. bf16 and fp16 are the dtype of q too."""

    kv_format: str = "bf16"

    @property
    def name(self) -> str:
        """What `parse` reads back."""
        return f"{super().name}-{self.kv_format}"

    @property
    def alike(self) -> Shape:
        """The same sizes without a format: shapes that are alike are timed in the same rounds."""
        return Shape(**{name: value for name, value in asdict(self).items() if name != "kv_format"})

    @property
    def is_plain(self) -> bool:
        """Whether the cache is in q's dtype."""
        return FORMATS[self.kv_format] == "none"

    def dtype_of_q(self, asked: torch.dtype) -> torch.dtype:
        """`asked` for a quantised cache, else the cache's own."""
        return format_of(self.kv_format).dtype if self.is_plain else asked

    def cost(self, itemsize: int) -> Cost:
        """With the bytes of the format, scales included. `itemsize` of q, in bytes."""
        if self.is_plain:
            return super().cost(itemsize)
        kv_format = format_of(self.kv_format)
        cost = self._cost(itemsize, kv_format.row_bytes(self.head_dim))
        heads = 2 * self.num_kv_heads * SCALE_BYTES if kv_format.scales == "head" else 0
        return replace(cost, bytes_read=cost.bytes_read + heads)


def with_formats(asked: Sequence[Shape], names: Sequence[str]) -> tuple[Shape, ...]:
    """Every shape in every format, those that are alike next to each other; shapes that name a format keep it."""
    made: list[Shape] = []
    for shape in asked:
        if isinstance(shape, FormatShape) or not names:
            made.append(shape)
        else:
            made += [FormatShape(**asdict(shape), kv_format=name) for name in dict.fromkeys(names)]
    return tuple(made)


def parse(text: str) -> Shape:
    """A shape from its name, with a format where the name has one."""
    parts = text.lower().split("-")
    found = [part for part in parts if part in FORMATS]
    shape = shapes.parse("-".join(part for part in parts if part not in FORMATS))
    return FormatShape(**asdict(shape), kv_format=found[-1]) if found else shape


def groups(asked: Sequence[Shape]) -> list[list[Shape]]:
    """Shapes that are timed in the same rounds: those that differ in their format alone."""
    found: dict[Shape, list[Shape]] = {}
    for shape in dict.fromkeys(asked):
        found.setdefault(shape.alike if isinstance(shape, FormatShape) else shape, []).append(shape)
    return list(found.values())


def plain_of(group: Sequence[Shape]) -> FormatShape | None:
    """What the others of a group are compared with: the first whose cache is in q's dtype."""
    return next((shape for shape in group if isinstance(shape, FormatShape) and shape.is_plain), None)


class FormatWork(Work):
    """As Work, with the same rows in every format: `k_cache`, `v_cache` hold their codes, `k_scale`, `v_scale` fp32 scales.

    fp8: [num_kv_heads], the largest magnitude of a head over that of the format; int8 and int4: [num_pages, page_size,
    num_kv_heads]. The oracle is attention over the dequantised rows.
    """

    def __init__(self, shape: FormatShape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        super().__init__(shape, shape.dtype_of_q(dtype), device, seed)
        if shape.is_plain:
            return
        self.kv_format = format_of(shape.kv_format)
        self.k_cache, self.k_scale = _quantised(self.k_cache, self.kv_format, rotated=self.kv_format.rotates_k)
        self.v_cache, self.v_scale = _quantised(self.v_cache, self.kv_format, rotated=False)


def _quantised(rows: torch.Tensor, kv_format: KVFormat, *, rotated: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(codes, scales) of NHD rows, some pages at a time."""
    scale = None
    if kv_format.scales == "head":
        scale = rows.abs().amax((0, 1, 3)).float() / torch.finfo(kv_format.dtype).max
    pages = max(CHUNK_ROWS // (rows.shape[1] * rows.shape[2]), 1)
    chunks = torch.split(rows, pages)
    parts: list[tuple[Any, Any]] = [kv_format.quantize(formats.rotate(part) if rotated else part, scale) for part in chunks]
    # torch.cat knows no fp8.
    codes = torch.cat([codes.view(torch.uint8) for codes, _ in parts]).view(kv_format.dtype)
    return codes, scale if scale is not None else torch.cat([scales for _, scales in parts])
