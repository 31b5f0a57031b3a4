"""Formats of a paged KV cache in plain torch: what a row becomes in the cache, and back. A family of formats is a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ArgumentError
from ..layout import fault
from ._format import MIN_SCALE, SCALE_BYTES, SCALES, KVFormat, row_scale
from .fp8 import FP8
from .int4 import INT4, Int4, zero_points
from .int8 import INT8
from .plain import PLAIN
from .rotation import rotate, rotation_block

if TYPE_CHECKING:
    import torch

__all__ = [
    "MIN_SCALE",
    "NAMES",
    "SCALES",
    "SCALE_BYTES",
    "Int4",
    "KVFormat",
    "named",
    "of",
    "rotate",
    "rotation_block",
    "row_scale",
    "zero_points",
]

ALL: tuple[KVFormat, ...] = (*PLAIN, *FP8, *INT8, *INT4)
NAMES = tuple(dict.fromkeys(kv_format.name for kv_format in ALL))
_BY_TENSORS = {(kv_format.dtype, kv_format.scales): kv_format for kv_format in ALL}


def of(dtype: torch.dtype, scale: torch.Tensor | None, name: str = "scale") -> KVFormat:
    """The format of a cache of this dtype with this scale tensor.

    The rank of `scale` says what a scale stands for: None or one element of rank 0 or 1 for the whole tensor, rank 1 for a kv
    head, rank 3 for a token and head. Sizes are not looked at. `name` is what an error calls the scale.

    Raises:
        ArgumentError: no format has this dtype, or none with such a scale.
    """
    known = [kv_format for kv_format in ALL if kv_format.dtype == dtype]
    if not known:
        names = "|".join(dict.fromkeys(_short(kv_format.dtype) for kv_format in ALL))
        raise ArgumentError("formats.of", f"dtype: expected {names}, got {_short(dtype)}; store the cache in one of them")
    for kv_format in known:
        if kv_format.scales in _kinds_of(scale):
            return kv_format
    wanted = " or ".join(_TEXTS[kv_format.scales] for kv_format in known)
    got = "None" if scale is None else f"[{', '.join(map(str, scale.shape))}]"
    text = f"{name}: expected {wanted} for a cache of {_short(dtype)}, got {got}; see docs/formats.md"
    raise ArgumentError("formats.of", text)


def named(name: str, scales: str | None = None) -> KVFormat:
    """The format of this name; `scales` "tensor", "head" or "token_head" where it has several, None for its first.

    Raises:
        ArgumentError: no such format, or not with such scales.
    """
    known = [kv_format for kv_format in ALL if kv_format.name == name]
    if not known:
        raise ArgumentError("formats.named", fault("format", f"one of {', '.join(NAMES)}", name, "pass one of them"))
    for kv_format in known:
        if scales in (None, kv_format.scales):
            return kv_format
    kinds = " or ".join(repr(kv_format.scales) for kv_format in known)
    raise ArgumentError("formats.named", fault("scales", f"None or {kinds} for {name}", scales, "None takes the first"))


_TEXTS = {
    "none": "None",
    "tensor": "None or one element",
    "head": "[num_kv_heads]",
    "token_head": "a scale per token and head, of the cache's axes without the last",
}


def _kinds_of(scale: torch.Tensor | None) -> tuple[str, ...]:
    if scale is None:
        return ("none", "tensor")
    if scale.dim() == 3:
        return ("token_head",)
    if scale.dim() > 1:
        return ()
    return ("tensor",) if scale.numel() == 1 else ("head",)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
