"""Why a finding is not of high confidence: what of it the text of the kernel does not show.

High means that the width, the growth of the index and the length of a row are all seen. An index that a small grid axis or a
remainder bounds, and a stride whose size is only assumed, are said to be so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from math import prod

from .expr import Node, Origin, Program, Var, walk
from .growth import ARGUMENTS, OFFSET_SCALE, USUAL_CONSTEXPR, USUAL_ROW, Growth
from .poly import Mono, strip, without
from .ranges import Ranges

# A lane of a tile of this many elements runs along a row.
LONG_TILE = 1024
# An index that its launches keep below this reaches 2^31 only with rows of 2^17 elements and more; a row of so few elements only
# with 2^25 of them.
FEW, SHORT_ROW = 2**14, 64
# Fewer elements for each program than this is no tile.
SMALL_TILE = 32
ADDRESSES = ("address", "atomic", "base")
UNKNOWN_ITEM_BYTES = 2
AXES = (Origin.PROGRAM_ID, Origin.ARANGE, Origin.LOOP, Origin.LOAD)
PARTS = ("floordiv", "mod", "shr", "and")
# What a count of pieces is called: each piece stands for a tile of something larger.
PIECES = re.compile(r"(num|n)_?(block|tile|split|chunk|part|partial|segment)s?$|partial|local_(max|arg|sum)", re.I)


class Doubts:
    """What one program shows about the axes of its addresses."""

    def __init__(self, program: Program, ranges: Ranges, growth: Growth, max_memory: int) -> None:
        self.ranges = ranges
        self.growth = growth
        self.max_memory = max_memory
        self.pieces, self.inner = program.pieces, program.inner
        self.lanes = set(_bounded_lanes(program))
        self.shared = {axis for var in _variables(program) for axis in self._shared(var)}
        self.axes = {
            axes: sink.item_bytes or UNKNOWN_ITEM_BYTES
            for sink in program.sinks
            if sink.kind in ADDRESSES and (axes := self._axes_of(sink.terms))
        }
        self.terms = {
            (mono, coefficient, sink.item_bytes)
            for sink in program.sinks
            if sink.kind in ADDRESSES
            for term in sink.terms
            for poly in ranges.expander.ways(term)
            for mono, coefficient in poly.items()
        }

    def of(self, mono: Mono, coefficient: int, terms: Iterable[Node]) -> str:
        """What makes a product doubtful; empty if nothing does. `terms` are what is added to the pointer."""
        shape = self.growth.shape(mono, coefficient)
        if shape.arguments and all(node.var is not None and node.var.declared for node in shape.arguments):
            return ""
        if not shape.arguments and not shape.constexprs:
            if self._counted(coefficient, terms):
                return "the number of rows is a constexpr: the axis around it has a step of so many"
            # The step is a number: the interval itself says that the grid reaches the wall.
            return ""
        axes = {axis for node in shape.indices for axis in self._axes(node)}
        if axes and min(axes) > 0 and not self._tiled(mono, terms):
            return f"axis {min(axes)} of a grid ends at 65,535"
        if not shape.arguments and len(shape.indices) == 1 and abs(shape.coefficient) < OFFSET_SCALE:
            return "the length of a row is a constexpr of unknown value"
        if any(node.var is not None and node.var.axis in self.shared for node in map(strip, shape.indices)):
            return "the kernel shares its work among its programs: the grid may be as small as the card"
        if any(self._part(node) for node in shape.indices):
            return "the index is only a part of the grid: a quotient or a remainder"
        if self._scaled(mono, coefficient):
            return "another address multiplies the same product further: its tensor would be beyond memory first"
        if self._within(self._axes_of(terms)):
            return "another address has the same axes and one more: its tensor would be beyond memory first"
        if any(node.var.name in self.pieces or PIECES.search(node.var.name) for node in shape.arguments if node.var is not None):
            return "a row has one entry for each block of a larger tensor, which would be beyond memory first"
        if len(shape.arguments) == 1 and not self._row_seen(shape.arguments[0], terms):
            return "no data-sized axis is seen inside the stride: a row may be short, or one element"
        return ""

    def launched(self, index: Node, factors: Iterable[Node], pointer: str) -> str:
        """What the launches of the kernel say against a product."""
        if pointer in self.inner:
            return f"{self.inner[pointer]} has the same sizes and one more: it may be beyond memory first"
        held = [base.var for base in self.growth.bases(index) if base.var is not None and base.var.bound_from == "launcher"]
        if held and self.ranges.of(index)[1] < FEW:
            return f"every launch keeps {held[0].name} below {held[0].maximum + 1:,}"
        sizes = [
            factor.var.maximum if factor.var and factor.var.bound_from == "launcher" else SHORT_ROW + 1 for factor in factors
        ]
        return f"every launch has rows of at most {prod(sizes):,}" if sizes and prod(sizes) <= SHORT_ROW else ""

    def _counted(self, coefficient: int, terms: Iterable[Node]) -> bool:
        """Whether lanes go in steps of a constexpr times the own step, a number: `lane * (ROWS * 2048) + row * 2048`."""
        for other, step in self._beside(None, terms):
            rows = [node for node in other if node.var is not None and node.var.origin is Origin.CONSTEXPR]
            lanes = [node for node in other if node.var is not None and node.var.origin is Origin.ARANGE]
            if rows and lanes and len(rows) + len(lanes) == len(other) and step % coefficient == 0:
                return True
        return False

    def _shared(self, var: Var) -> Iterator[int]:
        """Axes of the grid along which each program does more than one piece of work."""
        if var.origin is Origin.NUM_PROGRAMS:
            yield var.axis
        if var.origin is Origin.LOOP and var.low is not None:
            ways = self.ranges.expander.ways(var.low)
            for mono in ways[0] if len(ways) == 1 else ():
                ids = [node.var.axis for node in mono if node.var is not None and node.var.origin is Origin.PROGRAM_ID]
                if ids and all(self.growth.kind(node) != "tile" for node in mono):
                    yield ids[0]

    def _row_seen(self, stride: Node, terms: Iterable[Node]) -> bool:
        """Whether lanes run along a row, and how far they go depends on the data. A row that is read one by one is short."""
        beside = list(self._beside(stride, terms))
        lanes = any(
            part.var is not None and part.var.origin is Origin.ARANGE
            for mono, _ in beside
            for node in mono
            for part in walk(node)
        )
        return lanes and any(self._along(mono, coefficient) for mono, coefficient in beside)

    def _beside(self, stride: Node | None, terms: Iterable[Node]) -> Iterator[tuple[Mono, int]]:
        """What is added in steps other than the stride, if one is given: inner and outer axes."""
        for term in terms:
            for poly in self.ranges.expander.ways(term):
                yield from ((mono, coefficient) for mono, coefficient in poly.items() if stride is None or stride not in mono)

    def _tiled(self, mono: Mono, terms: Iterable[Node]) -> bool:
        """Whether the index counts tiles, not single things: the lanes of a tile of the size that multiplies it are added."""
        for term in terms:
            for poly in self.ranges.expander.ways(term):
                for other in poly:
                    for lane in other:
                        size = lane.var.high if lane.var is not None and lane.var.origin is Origin.ARANGE else None
                        rest = without(other, (lane,))
                        others = without(mono, rest or ())
                        if size is not None and others is not None and any(part in others for part in walk(size)):
                            return True
        return False

    def _axes(self, node: Node) -> Iterator[int]:
        for base in self.growth.bases(node):
            if base.var is not None and base.var.origin is Origin.PROGRAM_ID:
                yield base.var.axis
            else:
                yield 0

    def _part(self, node: Node) -> bool:
        """Whether a quotient or a remainder stands between the grid and the index."""
        node = strip(node)
        while node.op in ("select", "phi"):
            node = strip(node.args[0])
        return node.op in PARTS

    def _scaled(self, mono: Mono, coefficient: int) -> bool:
        """Whether some address holds the same product times a row: its tensor is beyond memory before this one wraps."""
        for other, factor, item_bytes in self.terms:
            rest = without(other, mono)
            if rest is None or (not rest and abs(factor) <= abs(coefficient)):
                continue
            kinds = [self.growth.kind(node) for node in rest]
            if "index" in kinds or any(node.var is not None and node.var.origin is Origin.ARANGE for node in rest):
                continue
            size = abs(factor) // max(1, abs(coefficient))
            for node, kind in zip(rest, kinds, strict=True):
                low, high = self.ranges.of(node)
                size *= high if low == high else USUAL_ROW if kind == "argument" else USUAL_CONSTEXPR
            if 2**31 * size * (item_bytes or 2) > self.max_memory:
                return True
        return False

    def _axes_of(self, terms: Iterable[Node]) -> frozenset[tuple[Node, bool]]:
        """What an address is indexed by, each with whether it is divided first: ids, lanes, loops, loaded values."""
        found: dict[Node, bool] = {}
        stack = [(term, False) for term in terms]
        seen = set()
        while stack:
            node, divided = stack.pop()
            if (node.uid, divided) in seen:
                continue
            seen.add((node.uid, divided))
            if node.var is not None and node.var.origin in AXES:
                found[node] = found.get(node, True) and divided
            if node.op in ("floordiv", "shr"):
                stack.append((node.args[0], True))
            elif node.op != "cmp":
                stack += [(arg, divided) for arg in node.args]
        return frozenset(found.items())

    def _within(self, axes: frozenset[tuple[Node, bool]]) -> bool:
        """Whether another address has all these axes, and lanes that run along one more, or undivided along one of these."""
        nodes = {node for node, _ in axes}
        for others, item_bytes in self.axes.items():
            if others == axes or not nodes <= {node for node, _ in others}:
                continue
            if any(divided and (node, False) not in axes for node, divided in others):
                continue
            for node, divided in others - axes:
                if node.var is None or divided or (node not in nodes and node.var.origin is not Origin.ARANGE):
                    continue
                high = node.var.high if node not in nodes else None
                size = high.value if high is not None and high.op == "const" else USUAL_CONSTEXPR
                if 2**31 * size * item_bytes > self.max_memory:
                    return True
        return False

    def _along(self, mono: Mono, coefficient: int) -> bool:
        """Whether a term runs along a row whose length depends on the data."""
        shape = self.growth.shape(mono, coefficient)
        for node in mono:
            for part in walk(node):
                var = part.var
                if var is None:
                    continue
                if var.origin is Origin.ARANGE and (
                    part in self.lanes or (_known(part) and self.ranges.of(part)[1] + 1 >= LONG_TILE)
                ):
                    return True
                if var.origin is Origin.LOOP and self.growth.kind(part) != "tile":
                    return True
                if var.origin is Origin.PROGRAM_ID and (shape.arguments or shape.constant >= SMALL_TILE):
                    return True
        return False


def _variables(program: Program) -> Iterator[Var]:
    """Every variable that a sink depends on, those in the bounds of others included."""
    seen: set[int] = set()
    stack = [term for sink in program.sinks for term in sink.terms]
    while stack:
        for node in walk(stack.pop()):
            if node.uid not in seen and node.var is not None:
                yield node.var
                stack += [bound for bound in (node.var.low, node.var.high) if bound is not None and bound.uid not in seen]
            seen.add(node.uid)


def _known(node: Node) -> bool:
    """Whether the length of a tile is a number."""
    var = node.var
    return var is not None and (var.high is None or all(part.var is None for part in walk(var.high)))


def _bounded_lanes(program: Program) -> Iterator[Node]:
    """Lanes of tiles that a mask compares with something that is only known at run time: the row has that length."""
    compared: set[Node] = set()
    for sink in program.sinks:
        if sink.kind != "mask":
            continue
        for term in sink.terms:
            for node in walk(term):
                if node.op == "cmp" and node not in compared:
                    compared.add(node)
                    sides = [list(walk(arg)) for arg in node.args]
                    for own, other in (sides, sides[::-1]):
                        if any(part.var is not None and part.var.origin in (*ARGUMENTS, Origin.LOAD) for part in other):
                            yield from (part for part in own if part.var is not None and part.var.origin is Origin.ARANGE)
