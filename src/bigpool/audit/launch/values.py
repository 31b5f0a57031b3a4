"""What a value of TTIR can be, and what is known about a launch from outside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..expr import Node, select

Bounds = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address: what was added to an argument, one term after the other. `tensor` says of each term that lanes differ."""

    name: str
    terms: tuple[Node, ...] = ()
    tensor: tuple[bool, ...] = ()
    item_bytes: int = 0
    unknown: str = ""
    block: bool = False


@dataclass(frozen=True, slots=True)
class Data:
    """A value that is no integer."""


Value = Node | Pointer | Data
DATA = Data()


@dataclass(frozen=True, slots=True)
class Given:
    """What is known from outside: values of integer arguments, ranges of named values, programs per axis."""

    values: Mapping[str, int] = field(default_factory=dict)
    ranges: Bounds = field(default_factory=dict)
    grid: tuple[int, ...] | None = None
    backend: str = "cuda"
    strides: frozenset[str] = frozenset()
    # Names of the arguments in order: Triton before 3.6 does not write them.
    names: tuple[str, ...] = ()


def merge(values: list[Value] | tuple[Value, ...]) -> Value:
    """One of several values that different ways lead to."""
    result = values[0]
    for other in values[1:]:
        if isinstance(result, Node) and isinstance(other, Node):
            result = select(None, result, other, result.span)
        elif isinstance(result, Pointer) and isinstance(other, Pointer) and result != other:
            if result.name == other.name and len(result.terms) == len(other.terms):
                terms = tuple(select(None, a, b, a.span) for a, b in zip(result.terms, other.terms, strict=True))
                result = Pointer(result.name, terms, result.tensor, result.item_bytes, result.unknown or other.unknown)
            else:
                # Both are checked where they are made; which one it is does not matter to either.
                result = Pointer(result.name, result.terms + other.terms, result.tensor + other.tensor, result.item_bytes)
    return result
