"""How many values a tile has: the `arange`s that it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ..expr import Node, Origin, binary, const, walk
from .values import Pointer

# Of a value so many parts are looked at to find its tiles.
MAX_PARTS = 300


def of_pointer(pointer: Pointer) -> tuple[Node, ...]:
    """The tiles along which an address changes."""
    return tuple(dict.fromkeys(lane for term in pointer.terms for lane in lanes(term.node)))


def lanes(node: Node) -> Iterator[Node]:
    """The tiles along which a value changes, one `arange` each."""
    for part in islice(walk(node), MAX_PARTS):
        if part.var is not None:
            yield from (part,) if part.var.origin is Origin.ARANGE else part.var.lanes


def length(node: Node) -> tuple[Node, ...]:
    """How many values a reduction or a scan goes over: one number where all come from one `arange`, else none."""
    tiles = list(dict.fromkeys(lanes(node)))
    high = tiles[0].var.high if len(tiles) == 1 and tiles[0].var is not None else None
    return () if high is None else (binary("add", high, const(1)),)
