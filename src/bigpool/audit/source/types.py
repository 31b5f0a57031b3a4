"""Triton's types, read from expressions."""

from __future__ import annotations

import re

from .values import DType

_NAME = re.compile(r"(?:tl\.)?(u?)(int|i|uint|u)(8|16|32|64)$")
_FLOATS = re.compile(r"(?:tl\.)?(b?float|fp|bf)(\d+)|float8\w*")


def named(name: str) -> DType | None:
    """The type `name` stands for in triton.language or in an annotation: int64, "i64", "*fp16"; None if it names none."""
    if found := re.fullmatch(r"(?:\w+\.)*pointer_type\((.*)\)", name.strip()):
        return DType("pointer", 64, named(found[1]) or DType())
    name = name.strip().rpartition(".")[2]
    if name.startswith("*"):
        return DType("pointer", 64, named(name[1:].removeprefix("k")) or DType())
    if name in ("int1", "i1", "bool"):
        return DType("uint", 1)
    if found := _NAME.match(name):
        unsigned = found[1] == "u" or found[2] in ("uint", "u")
        return DType("uint" if unsigned else "int", int(found[3]))
    if found := _FLOATS.match(name):
        bits = found[2] or re.sub(r"\D.*", "", name.removeprefix("float")) or "32"
        return DType("float", int(bits))
    return None


def item_bytes(dtype: DType) -> int:
    return max(1, dtype.bits // 8) if dtype.kind in ("int", "uint", "float") else 0
