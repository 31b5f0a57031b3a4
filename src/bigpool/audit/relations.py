"""Relations between sizes: a stated product, such as the number of elements, bounds the chained index over them.

`(i * H + j) * W + k` with `i < N`, `j < H` and `k < W` is at most `N * H * W - 1`. What bounds a part of it is put in its place,
the sum is multiplied out, and what is left must be stated: sizes by a number or by a product, tiles by what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .expr import INT32_MAX, MAX_COUNT, Node, Origin, Program, const, walk
from .facts import Copies, Fact, holds
from .poly import Mono, Poly, plus, times, without
from .ranges import Ranges
from .slices import COMPARED, Observed

# A product is one of arguments: something else in the kernel may have the name of one.
SIZES = (Origin.SCALAR, Origin.STRIDE, Origin.CONSTEXPR)
MAX_ROUNDS = 8
MAX_TERMS = 64


class Relations:
    """Bounds of one program. `tiles`: constexprs that are the length of an `arange`; `reach`: how far a term goes usually."""

    def __init__(self, program: Program, ranges: Ranges, tiles: set[Node], reach: Callable[[Mono, int], int]) -> None:
        self.products = program.products
        self.extents = program.extents
        self.ranges = ranges
        self.tiles = tiles
        self.reach = reach
        self.lanes: dict[int, Node] = {}
        # The last program id is not negative: a grid of nothing runs nothing.
        self.last = {part.uid for last in self.extents.values() for part in walk(last)}

    def keep(self, observed: Observed) -> bool:
        """Whether what was stated keeps a value in its range, on the lanes that are not masked off."""
        low, high = observed.limits
        guard = observed.sink.guard
        self.lanes = {}
        facts = holds(guard) if guard is not None and observed.context != COMPARED else []
        copies = Copies({node.uid: fresh for node, fresh in self._bounded(facts)})
        root = copies.of(observed.root)
        most = self.most(root)
        return not copies.exhausted and most is not None and low <= 0 <= most <= high

    def _bounded(self, facts: Iterable[Fact]) -> Iterable[tuple[Node, Node]]:
        """Values that a mask bounds from above and that do not wrap before it does, each with what stands for it."""
        for fact in facts:
            left, right, sign = fact.left, fact.right, fact.comparison
            if sign in (">", ">="):
                left, right, sign = right, left, {">": "<", ">=": "<="}[sign]
            if sign not in ("<", "<=", "==") or left.op == "const" or left.op == "phi" or not self._fits(left):
                continue
            if right.var is None and right.op != "const" and not self._fits(right):
                continue
            bound = Node("sub", (right, const(1)), 0) if sign == "<" else right
            fresh = Node("min", (left, bound), left.width, left.signed, left.span, name=left.name)
            self.lanes[fresh.uid] = bound
            yield left, fresh

    def _fits(self, node: Node) -> bool:
        """Whether a value that is compared does not wrap itself. A count stays a few tiles below 2^31."""
        if node.var is not None or not node.narrow:
            return True
        ways = self.ranges.expander.ways(node)
        if all(self.reach(mono, factor) <= INT32_MAX for poly in ways for mono, factor in poly.items()):
            return True
        most = self.most(node, MAX_COUNT)
        return most is not None and most <= INT32_MAX

    def most(self, node: Node, cap: int | None = None) -> int | None:
        """The largest value of what is not negative, None if nothing that was stated bounds it. `cap`: of one size."""
        found = [self._of_poly(poly, cap) for poly in self.ranges.expander.ways(node)]
        return None if None in found else max(value for value in found if value is not None)

    def _of_poly(self, poly: Poly, cap: int | None) -> int | None:
        if any(factor < 0 for mono, factor in poly.items() if mono) or not all(self._natural(mono) for mono in poly):
            return None
        whole = self._multiplied_out(poly)
        if whole is None:
            return None
        total = 0
        for mono, factor in whole.items():
            if not mono:
                total += factor
            elif factor > 0:
                value = self._of_mono(mono, cap)
                if value is None:
                    return None
                total += factor * value
            elif not self._natural(mono):
                return None
        return total

    def _natural(self, mono: Mono) -> bool:
        parts = (factor.args[0] if factor.uid in self.lanes else factor for factor in mono)
        return all(part.uid in self.last or self.ranges.of(part)[0] >= 0 for part in parts)

    def _multiplied_out(self, poly: Poly) -> Poly | None:
        """A polynomial that is never smaller, of sizes instead of indices."""
        for _ in range(MAX_ROUNDS):
            fresh: Poly = {}
            changed = False
            for mono, factor in poly.items():
                larger = self._larger(mono) if factor > 0 else None
                changed = changed or larger is not None
                fresh = plus(fresh, times(larger or {mono: 1}, {(): factor}))
            if len(fresh) > MAX_TERMS:
                return None
            if not changed:
                return fresh
            poly = fresh
        return None

    def _larger(self, mono: Mono) -> Poly | None:
        for factor in mono:
            rest = without(mono, (factor,))
            assert rest is not None
            if not self._natural(mono):
                return None
            if factor.op == "floordiv" and (whole := self._single(factor.args[1])) is not None and len(whole) == 1:
                ((divisor, amount),) = whole.items()
                left = without(rest, divisor)
                if left is not None and amount == 1 and divisor and (top := self._single(factor.args[0])) is not None:
                    return times(top, {left: 1})
            bound = self._bound(factor)
            if bound is not None:
                return times(bound, {rest: 1})
        return None

    def _bound(self, node: Node) -> Poly | None:
        """What a factor is never larger than."""
        if node.uid in self.lanes:
            return self._single(self.lanes[node.uid])
        var = node.var
        if var is not None and var.origin is Origin.PROGRAM_ID and var.axis in self.extents:
            return self._single(self.extents[var.axis])
        if var is not None and var.origin is Origin.LOOP and var.high is not None:
            return self._single(var.high)
        if var is not None and var.origin is Origin.ARANGE and var.high is not None:
            return self._single(var.high)
        if node.op == "mod":
            divisor = self._single(node.args[1])
            return None if divisor is None else plus(divisor, {(): 1}, -1)
        return self._quotient(node) if node.op == "floordiv" else None

    def _quotient(self, node: Node) -> Poly | None:
        """`x // d` of an `x < q * d` is less than `q`."""
        top, divisor = self._single(node.args[0]), self._single(node.args[1])
        if top is None or divisor is None or len(divisor) != 1 or not all(self._natural(mono) for mono in top):
            return None
        if any(factor < 0 for factor in top.values()) or (whole := self._multiplied_out(top)) is None:
            return None
        ((mono, amount),) = divisor.items()
        whole = plus(whole, {(): 1})
        lefts = {left: factor for part, factor in whole.items() if (left := without(part, mono)) is not None}
        return plus(lefts, {(): 1}, -1) if mono and amount == 1 and len(lefts) == len(whole) else None

    def _single(self, node: Node) -> Poly | None:
        ways = self.ranges.expander.ways(node)
        return ways[0] if len(ways) == 1 else None

    def _of_mono(self, mono: Mono, cap: int | None) -> int | None:
        found = []
        for names, most in self.products:
            rest = _remaining(mono, names)
            if rest is not None and (value := self._of_factors(rest, cap)) is not None:
                found.append((most if cap is None else min(most, cap)) * value)
        if (value := self._of_factors(mono, cap)) is not None:
            found.append(value)
        return min(found, default=None)

    def _of_factors(self, mono: Iterable[Node], cap: int | None) -> int | None:
        value = 1
        for factor in mono:
            if not self._stated(factor):
                return None
            most = self.ranges.of(factor)[1]
            value *= most if cap is None else min(most, cap)
        return value

    def _stated(self, node: Node) -> bool:
        """Whether the bound of a value is no default."""
        var = node.var
        if var is None:
            return bool(node.args) and node.op != "phi" and all(map(self._stated, node.args[:2]))
        known = var.declared or var.bound_from == "launcher" or var.origin in (Origin.PROGRAM_ID, Origin.ARANGE)
        return known or node in self.tiles


def _remaining(mono: Mono, names: tuple[str, ...]) -> list[Node] | None:
    """What a stated product leaves of a monomial. Sizes that the monomial does not have are 1 or more."""
    wanted, rest = list(names), []
    for factor in mono:
        name = factor.var.name if factor.var is not None and factor.var.origin in SIZES else ""
        if name in wanted:
            wanted.remove(name)
        else:
            rest.append(factor)
    return rest if len(wanted) < len(names) else None


def product_names(text: str) -> tuple[str, ...]:
    """`N * H * W` as the names in it."""
    return tuple(sorted(name.strip() for name in text.split("*")))
