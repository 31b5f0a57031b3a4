"""Exact intervals: what a value can be, were it computed without wrapping.

`Ranges.of(node)` contains every value that the node can have for values of the variables within their bounds. Where two operands
depend on each other, a few identities keep the bound useful: `(x // n) * n <= x`, `i * (n // p) <= n` for `i <= p`, loop
variables against the end of their loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .expr import Node, Origin, Var
from .poly import Expander, Mono, Poly, atom, common, plus, times, without

Interval = tuple[int, int]
MAX_DEPTH = 60
MAX_IDENTITIES = 3
WORK = 20_000
FAR = 2**80


class Ranges:
    """Intervals of nodes. `pinned` gives nodes an interval of their own, whatever they are computed from."""

    def __init__(self, pinned: Mapping[Node, Interval] | None = None, bounds: Mapping[Var, Interval] | None = None) -> None:
        self.pinned = {node.uid: interval for node, interval in (pinned or {}).items()}
        self.bounds = dict(bounds or {})
        self.expander = Expander(lambda node: True, pinned or ())
        self.known: dict[int, Interval] = {}
        self.open: set[int] = set()
        self.work = WORK

    def of(self, node: Node, depth: int = 0) -> Interval:
        if node.uid in self.pinned:
            return self.pinned[node.uid]
        found = self.known.get(node.uid)
        if found is not None:
            return found
        if depth > MAX_DEPTH or node.uid in self.open or self.work <= 0:
            return _limits(node)
        self.work -= 1
        self.open.add(node.uid)
        found = self._of(node, depth + 1)
        self.open.discard(node.uid)
        found = max(found[0], -FAR), min(found[1], FAR)
        self.known[node.uid] = found
        return found

    def _of(self, node: Node, depth: int) -> Interval:
        if node.op == "const":
            return node.value, node.value
        if node.var is not None:
            return self._of_var(node.var, depth)
        if node.op == "phi":
            return self._of_phi(node, depth)
        ways = self.expander.ways(node)
        if ways != [atom(node)]:
            intervals = [self.of_poly(poly, depth) for poly in ways]
            return min(low for low, _ in intervals), max(high for _, high in intervals)
        return _of_operation(node, [self.of(arg, depth) for arg in node.args])

    def _of_var(self, var: Var, depth: int) -> Interval:
        low, high = self.bounds.get(var, (var.minimum, var.maximum))
        if var not in self.bounds:
            if var.low is not None:
                low = max(low, self.of(var.low, depth)[0])
            if var.high is not None:
                high = max(low, min(high, self.of(var.high, depth)[1]))
        return low, high

    def _of_phi(self, node: Node, depth: int) -> Interval:
        ends = self.phi_ends(node)
        if ends is None:
            return _limits(node)
        intervals = [self.of_poly(poly, depth) for poly in ends]
        return min(low for low, _ in intervals), max(high for _, high in intervals)

    def phi_ends(self, node: Node) -> list[Poly] | None:
        """Polynomials of which the smallest and the largest bound a loop-carried value; None if that is not understood."""
        updates = self.expander.ways(node.args[-1]) if len(node.args) > 1 + node.value else []
        initials = self.expander.ways(node.args[0])
        ends = list(initials)
        if not updates:
            return None
        for update in updates:
            step = plus(update, atom(node), -1)
            if not any(_mentions(mono, node) for mono in step):
                if step and not node.value:
                    return None
                ends += [plus(initial, times(step, atom(node.args[1]))) for initial in initials if step]
            elif any(_mentions(mono, node) for mono in update):
                return None
            else:
                ends.append(update)
        return ends

    def of_poly(self, poly: Poly, depth: int = 0, identities: int = MAX_IDENTITIES) -> Interval:
        low = high = 0
        for mono, coefficient in poly.items():
            smallest, largest = self.of_mono(mono, coefficient, depth, identities)
            low, high = low + smallest, high + largest
        return low, high

    def of_mono(self, mono: Mono, coefficient: int, depth: int = 0, identities: int = MAX_IDENTITIES) -> Interval:
        if coefficient < 0:
            low, high = self.of_mono(mono, -coefficient, depth, identities)
            return -high, -low
        low = high = coefficient
        negative = False
        for factor in mono:
            interval = self.of(factor, depth)
            negative = negative or interval[0] < 0
            products = [a * b for a in (low, high) for b in interval]
            low, high = min(products), max(products)
        if not negative and high > 2**31 - 1 and identities and self.work > 0:
            self.work -= 1
            for poly in self.larger(mono, coefficient):
                high = min(high, max(low, self.of_poly(poly, depth, identities - 1)[1]))
        return low, high

    def larger(self, mono: Mono, coefficient: int) -> Iterator[Poly]:
        """Polynomials that are never smaller than a monomial whose factors are not negative."""
        for place, factor in enumerate(mono):
            rest = mono[:place] + mono[place + 1 :]
            if factor.uid in self.pinned:
                continue
            if factor.var is not None and factor.var.high is not None and factor.var not in self.bounds:
                yield from self._replaced(factor.var.high, rest, coefficient)
            elif factor.op == "floordiv":
                yield from self._undivided(factor, rest, coefficient)
            elif factor.op == "mod":
                yield from self._replaced(factor.args[1], rest, coefficient, -1)
            elif factor.op == "min":
                for arg in factor.args:
                    yield from self._replaced(arg, rest, coefficient)
            elif factor.op == "phi" and (ends := self.phi_ends(factor)) is not None and len(ends) == 2:
                yield times(plus(ends[1], {}), {rest: coefficient})

    def _replaced(self, node: Node, rest: Mono, coefficient: int, add: int = 0) -> Iterator[Poly]:
        ways = self.expander.ways(node)
        if len(ways) == 1:
            yield times(plus(ways[0], {(): add} if add else {}), {rest: coefficient})

    def _undivided(self, factor: Node, rest: Mono, coefficient: int) -> Iterator[Poly]:
        numerators, divisors = self.expander.ways(factor.args[0]), self.expander.ways(factor.args[1])
        if len(numerators) != 1 or len(divisors) != 1:
            return
        if len(divisors[0]) == 1:
            ((mono, divisor),) = divisors[0].items()
            # What is left of the divisor is 1 or more.
            left = without(rest, common(rest, mono))
            if left is not None and divisor > 0 and coefficient % divisor == 0 and self._positive(mono):
                yield times(numerators[0], {left: coefficient // divisor})
            if divisor > 1 and not mono:
                # (x // d) * c <= x * ceil(c / d)
                yield times(numerators[0], {rest: -(-coefficient // divisor)})
        for other in rest:
            if self.at_most(other, factor.args[1]):
                left = without(rest, (other,))
                assert left is not None
                yield times(numerators[0], {left: coefficient})

    def _positive(self, mono: Mono) -> bool:
        """Whether a divisor is positive: it is where a division makes sense and no factor can be negative."""
        return all(self.of(factor)[0] >= 0 for factor in mono)

    def at_most(self, node: Node, bound: Node) -> bool:
        """Whether `node <= bound` follows from what the two are."""
        ways = self.expander.ways(bound)
        if len(ways) == 1 and list(ways[0].values()) == [1] and len(next(iter(ways[0]))) == 1:
            (bound,) = next(iter(ways[0]))
        if node is bound:
            return True
        if node.op == bound.op == "floordiv":
            same = self.expander.ways(node.args[1]) == self.expander.ways(bound.args[1])
            return same and self.at_most(_single(self, node.args[0]), _single(self, bound.args[0]))
        first, second = node.var, bound.var
        if first is None or second is None:
            return False
        return first.origin is Origin.PROGRAM_ID and second.origin is Origin.NUM_PROGRAMS and first.axis == second.axis


def _single(ranges: Ranges, node: Node) -> Node:
    ways = ranges.expander.ways(node)
    if len(ways) == 1 and len(ways[0]) == 1:
        ((mono, coefficient),) = ways[0].items()
        if coefficient == 1 and len(mono) == 1:
            return mono[0]
    return node


def _mentions(mono: Mono, target: Node) -> bool:
    """Whether a value occurs in a monomial, inside its atoms too."""
    stack, seen = list(mono), set()
    while stack:
        node = stack.pop()
        if node is target:
            return True
        if node.uid not in seen:
            seen.add(node.uid)
            stack.extend(node.args)
    return False


def _limits(node: Node) -> Interval:
    return (-FAR, FAR) if node.width == 0 else node.limits


def _of_operation(node: Node, args: list[Interval]) -> Interval:
    handler = _HANDLERS.get(node.op)
    if handler is None:
        return _limits(node)
    return handler(node, args)


def _floordiv(node: Node, args: list[Interval]) -> Interval:
    (low, high), (small, large) = args
    divisors = [value for value in (small, large, 1, -1) if value and small <= value <= large]
    if not divisors:
        return _limits(node)
    # Triton truncates, Python floors: both lie between.
    ends = [end // divisor for end in (low, high) for divisor in divisors]
    ends += [-(-end // divisor) for end in (low, high) if end < 0 for divisor in divisors]
    ends += [-(end // -divisor) for end in (low, high) for divisor in divisors if divisor < 0]
    return min(ends), max(ends)


def _mod(node: Node, args: list[Interval]) -> Interval:
    (low, high), (small, large) = args
    largest = max(abs(small), abs(large)) - 1
    if largest < 0:
        return _limits(node)
    if low >= 0:
        return 0, min(high, largest)
    return (-largest, min(max(high, 0), largest) if small > 0 and high >= 0 else largest)


def _shift_right(node: Node, args: list[Interval]) -> Interval:
    (low, high), (small, large) = args
    if small < 0:
        return _limits(node)
    ends = [end >> min(shift, 200) for end in (low, high) for shift in (small, large)]
    return min(ends), max(ends)


def _shift_left(node: Node, args: list[Interval]) -> Interval:
    (low, high), (small, large) = args
    if small < 0 or large > 63:
        return _limits(node)
    ends = [end << shift for end in (low, high) for shift in (small, large)]
    return min(ends), max(ends)


def _bitwise(node: Node, args: list[Interval]) -> Interval:
    (low, high), (small, large) = args
    if node.op == "and":
        bounds = [end for start, end in args if start >= 0]
        if bounds:
            return 0, min(bounds)
    elif low >= 0 and small >= 0:
        return 0, 2 ** max(high.bit_length(), large.bit_length()) - 1
    bits = max(end.bit_length() for pair in args for end in pair)
    return -(2**bits), 2**bits - 1


def _min_max(node: Node, args: list[Interval]) -> Interval:
    pick = min if node.op == "min" else max
    return pick(low for low, _ in args), pick(high for _, high in args)


def _absolute(node: Node, args: list[Interval]) -> Interval:
    low, high = args[0]
    return (0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))


def _reduce(node: Node, args: list[Interval]) -> Interval:
    low, high = args[0]
    if node.detail in ("max", "min", "sort", "gather"):
        return low, high
    if node.detail in ("sum", "cumsum"):
        count = args[1][1] if len(args) > 1 else 2**20
        return min(low, low * count), max(high, high * count)
    return _limits(node)


def _same(node: Node, args: list[Interval]) -> Interval:
    return args[0]


def _select(node: Node, args: list[Interval]) -> Interval:
    return min(args[0][0], args[1][0]), max(args[0][1], args[1][1])


def _compare(node: Node, args: list[Interval]) -> Interval:
    return 0, 1


_HANDLERS = {
    "floordiv": _floordiv,
    "mod": _mod,
    "shr": _shift_right,
    "shl": _shift_left,
    "and": _bitwise,
    "or": _bitwise,
    "xor": _bitwise,
    "min": _min_max,
    "max": _min_max,
    "abs": _absolute,
    "reduce": _reduce,
    "scan": _reduce,
    "ext": _same,
    "trunc": _same,
    "select": _select,
    "cmp": _compare,
}
