"""Polynomials over the values of a graph: what sums and products are, exactly, before anything wraps.

A polynomial maps a monomial, a sorted tuple of atoms, to its coefficient. Atoms are nodes that are neither sums nor products.
A value after a branch has several polynomials, one for each way to come there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from .expr import RING, Node

Mono = tuple[Node, ...]
Poly = dict[Mono, int]
MAX_WAYS = 8
MAX_TERMS = 48
MAX_DEPTH = 120


def atom(node: Node) -> Poly:
    return {(node,): 1}


def plus(left: Poly, right: Poly, sign: int = 1) -> Poly:
    total = Counter(left)
    for mono, coefficient in right.items():
        total[mono] += sign * coefficient
    return {mono: coefficient for mono, coefficient in total.items() if coefficient}


def times(left: Poly, right: Poly) -> Poly:
    total: Counter[Mono] = Counter()
    for mono, coefficient in left.items():
        for other, factor in right.items():
            total[tuple(sorted(mono + other, key=_uid))] += coefficient * factor
    return {mono: coefficient for mono, coefficient in total.items() if coefficient}


def without(mono: Mono, factors: Iterable[Node]) -> Mono | None:
    """`mono` divided by `factors`, None if it does not divide."""
    rest = list(mono)
    for factor in factors:
        if factor not in rest:
            return None
        rest.remove(factor)
    return tuple(rest)


def common(mono: Mono, other: Mono) -> Mono:
    """The factors that two monomials share."""
    rest, shared = list(other), []
    for factor in mono:
        if factor in rest:
            rest.remove(factor)
            shared.append(factor)
    return tuple(shared)


def _uid(node: Node) -> int:
    return node.uid


class Expander:
    """Turns nodes into polynomials. `enter(node)` says whether an extension, a narrowing or an operation is looked through."""

    def __init__(self, enter: Callable[[Node], bool], pinned: Iterable[Node] = ()) -> None:
        self.enter = enter
        self.pinned = {node.uid for node in pinned}
        self.known: dict[int, list[Poly]] = {}

    def ways(self, node: Node, depth: int = 0) -> list[Poly]:
        """The polynomials of `node`, never empty."""
        found = self.known.get(node.uid)
        if found is None:
            found = self._ways(node, depth) if depth < MAX_DEPTH else [atom(node)]
            if len(found) > MAX_WAYS or any(len(poly) > MAX_TERMS for poly in found):
                found = [atom(node)]
            self.known[node.uid] = found
        return found

    def _ways(self, node: Node, depth: int) -> list[Poly]:
        if node.op == "const":
            return [{(): node.value} if node.value else {}]
        if node.uid in self.pinned or not self.enter(node):
            return [atom(node)]
        if node.op in ("ext", "trunc"):
            return self.ways(node.args[0], depth + 1)
        if node.op == "select":
            both = self.ways(node.args[0], depth + 1) + self.ways(node.args[1], depth + 1)
            return [poly for place, poly in enumerate(both) if poly not in both[:place]]
        if node.op not in RING:
            return [atom(node)]
        if node.op == "neg":
            return [plus({}, poly, -1) for poly in self.ways(node.args[0], depth + 1)]
        left, right = node.args
        if node.op == "shl":
            shift = strip(right)
            if shift.op != "const" or not 0 <= shift.value < 64:
                return [atom(node)]
            return [times(poly, {(): 1 << shift.value}) for poly in self.ways(left, depth + 1)]
        lefts, rights = self.ways(left, depth + 1), self.ways(right, depth + 1)
        if len(lefts) * len(rights) > MAX_WAYS or any(len(a) * len(b) > MAX_TERMS for a in lefts for b in rights):
            return [atom(node)]
        if node.op == "mul":
            return [times(a, b) for a in lefts for b in rights]
        return [plus(a, b, 1 if node.op == "add" else -1) for a in lefts for b in rights]


def strip(node: Node) -> Node:
    """`node` without the casts around it."""
    while node.op in ("ext", "trunc"):
        node = node.args[0]
    return node
