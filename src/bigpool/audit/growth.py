"""Which values grow with the data, and which are bounded by a tile; how large a factor usually is.

This decides what is reported at all: `arange * stride` can leave 32 bits only on paper, `page * stride` does on cards that exist.
"""

from __future__ import annotations

from dataclasses import dataclass

from .expr import Node, Origin
from .poly import Mono, common, strip, without
from .ranges import Ranges

# A constexpr of unknown value: a tile, a head dimension.
USUAL_CONSTEXPR = 128
# A scalar argument of unknown value that multiplies an index: a row.
USUAL_ROW = 4096
# A constant factor from here on is the size of a row, not of a tile.
OFFSET_SCALE = 2048
MAX_DEPTH = 120
ARGUMENTS = (Origin.SCALAR, Origin.STRIDE, Origin.NUM_PROGRAMS)
INDICES = (Origin.PROGRAM_ID, Origin.LOAD, Origin.LOOP, Origin.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Shape:
    """A monomial by the kind of its factors. `usual` is what its constant factors come to, divisors taken off."""

    indices: tuple[Node, ...]
    arguments: tuple[Node, ...]
    constexprs: tuple[Node, ...]
    coefficient: int

    @property
    def grows(self) -> int:
        return len(self.indices) + len(self.arguments)

    @property
    def constant(self) -> int:
        return int(abs(self.coefficient) * USUAL_CONSTEXPR ** len(self.constexprs))

    @property
    def scale(self) -> int:
        """Elements from one value of the index to the next, usually."""
        extra = max(0, self.grows - 1) if self.indices else max(0, len(self.arguments) - 1)
        return int(self.constant * USUAL_ROW**extra)

    @property
    def offset_like(self) -> bool:
        """An offset in elements rather than a count of things."""
        if not self.indices:
            return len(self.arguments) > 1 or (len(self.arguments) == 1 and self.constant >= OFFSET_SCALE)
        return self.grows > 1 or self.constant >= OFFSET_SCALE


class Growth:
    """Answers for the nodes of one program."""

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        self._kinds: dict[int, str] = {}
        self._bases: dict[int, frozenset[Node]] = {}
        self._depth = 0

    def kind(self, node: Node) -> str:
        """Is it "index" or "argument" for what grows with the data, "tile" for what does not."""
        found = self._kinds.get(node.uid)
        if found is None:
            if self._depth > MAX_DEPTH:
                return "index"
            self._kinds[node.uid] = "tile"
            self._depth += 1
            found = self._kind(node)
            self._depth -= 1
            self._kinds[node.uid] = found
        return found

    def _kind(self, node: Node) -> str:
        if node.var is not None:
            return self._kind_of_var(node)
        if node.op in ("const", "cmp") or node.width == 1:
            return "tile"
        args = [self.kind(arg) for arg in node.args[:2]]
        if counts(node):
            return "index"
        if node.op in ("floordiv", "shr", "ext", "trunc", "reduce", "scan", "abs", "neg"):
            return args[0]
        if node.op in ("mod", "min", "and"):
            return _least(args)
        if node.op == "phi":
            args = [self.kind(arg) for arg in node.args]
            return "index" if _searched(node) else _most(args)
        return _most(args)

    def _kind_of_var(self, node: Node) -> str:
        var = node.var
        assert var is not None
        if var.origin is Origin.LOOP:
            kinds = [self.kind(bound) for bound in (var.low, var.high) if bound is not None]
            return "tile" if "index" not in kinds and "argument" not in kinds and kinds else "index"
        if var.origin in ARGUMENTS or (var.origin is Origin.CONSTEXPR and "stride" in var.name.lower()):
            return "argument"
        if var.origin in INDICES and var.width >= 16:
            return "index"
        return "tile"

    def shape(self, mono: Mono, coefficient: int) -> Shape:
        mono, coefficient = self.reduced(mono, coefficient)
        parts: dict[str, list[Node]] = {"index": [], "argument": [], "tile": []}
        for factor in mono:
            kind = self.kind(factor)
            if kind == "argument" and factor.var is not None and factor.var.bound_from == "launcher" and factor.var.maximum <= 1:
                # The stride of the last axis, as the launches pass it.
                continue
            low, high = self.ranges.of(factor) if kind == "tile" else (0, 1)
            if low == high:
                coefficient *= high
            else:
                parts[kind].append(factor)
        constexprs = tuple(node for node in parts["tile"] if not _ranged(node))
        return Shape(tuple(parts["index"]), tuple(parts["argument"]), constexprs, coefficient)

    def reduced(self, mono: Mono, coefficient: int) -> tuple[Mono, int]:
        """Cancels divisors: `GROUP * (pid // (GROUP * n))` grows no faster than `pid`."""
        for place, factor in enumerate(mono):
            if factor.op != "floordiv":
                continue
            divisors = self.ranges.expander.ways(factor.args[1])
            if len(divisors) != 1 or len(divisors[0]) != 1:
                continue
            ((divisor, amount),) = divisors[0].items()
            others = mono[:place] + mono[place + 1 :]
            shared = common(others, divisor)
            if not shared and amount == 1 and self.kind(factor.args[0]) == "index":
                # A program id goes as far as the size of its grid.
                shared = next(((other,) for other in others if self.ranges.at_most(other, factor.args[1])), ())
            rest = without(others, shared)
            if rest is None or not amount or coefficient % amount or not shared:
                continue
            numerator = max(self.ranges.expander.ways(factor.args[0])[0].items(), key=self._size, default=((), 1))
            return self.reduced((*rest, *numerator[0]), coefficient // amount * numerator[1])
        return mono, coefficient

    def tiles(self, shape: Shape) -> bool:
        """One entry for each tile of a matrix, `pid_m * cdiv(n, BLOCK)`: 2^31 tiles are beyond any memory."""
        return shape.constant < USUAL_CONSTEXPR and any(
            node.op == "floordiv" and self.kind(node.args[1]) == "tile" and self._rounded_up(node) for node in shape.arguments
        )

    def _rounded_up(self, node: Node) -> bool:
        """Whether a quotient is `(n + BLOCK - 1) // BLOCK`: a number of tiles, not a part of a row."""
        numerators, divisors = self.ranges.expander.ways(node.args[0]), self.ranges.expander.ways(node.args[1])
        return any(mono in poly or not mono for poly in numerators for mono in divisors[0] if len(poly) > 1)

    def _size(self, item: tuple[Mono, int]) -> int:
        return self.ranges.of_mono(*item, identities=0)[1]

    def bases(self, node: Node) -> frozenset[Node]:
        """The variables of index kind that a value is computed from."""
        known = self._bases.get(node.uid)
        if known is None:
            known = self._bases[node.uid] = frozenset(self._walked(node))
        return known

    def _walked(self, node: Node) -> set[Node]:
        found: set[Node]
        found, seen, stack = set(), set(), [node]
        while stack:
            at = stack.pop()
            if at.uid in seen:
                continue
            seen.add(at.uid)
            if (at.var is not None and at.var.origin in INDICES) or counts(at):
                found.add(at)
            if at.op != "cmp" and at.width != 1:
                stack.extend(at.args[:2] if at.op == "select" else at.args)
        return found

    def main_variable(self, *nodes: Node) -> Node | None:
        """The variable to name: a load before a program id before a loop variable before an argument."""
        order = {Origin.LOAD: 0, Origin.PROGRAM_ID: 1, Origin.LOOP: 2, Origin.UNKNOWN: 3}
        bases = {base for node in nodes for base in self.bases(node)}
        return min(bases, key=lambda base: (order[base.var.origin] if base.var else 1.5, base.uid), default=None)


def _ranged(node: Node) -> bool:
    """A tile that starts at 0 and adds nothing to the usual size of a product: arange, a remainder, a flag.

    Nor does what a constexpr holds, `CONFIG.tiles_per_page`: it may be a small count as well as a size.
    """
    node = strip(node)
    if node.var is not None and node.var.origin is Origin.CONSTEXPR:
        return "." in node.var.name
    return node.width == 1 or node.op in ("mod", "cmp", "and") or node.var is not None


def _searched(node: Node) -> bool:
    """Whether a loop-carried value is the number of the pass that met a condition: an id, such as the expert of a tile."""
    update = strip(node.args[-1])
    if update.op != "select" or len(update.args) < 3:
        return False
    sides = [strip(arg) for arg in update.args[:2]]
    passes = any(side.var is not None and side.var.origin is Origin.LOOP for side in sides)
    return passes and any(side is node for side in sides)


def counts(node: Node) -> bool:
    """A number that the kernel counts itself, by a sum or a scan."""
    return node.op in ("reduce", "scan") and node.detail not in ("max", "min")


def _least(kinds: list[str]) -> str:
    return "tile" if "tile" in kinds else "index" if "index" in kinds else "argument"


def _most(kinds: list[str]) -> str:
    return "index" if "index" in kinds else "argument" if "argument" in kinds else "tile"
