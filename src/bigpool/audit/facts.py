"""What a mask, a branch or an early return says about a value, and the same value with that said."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .expr import INT32_MAX, INT32_MIN, Node, const
from .ranges import Ranges

_INVERSE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
# Comparisons by the names that Python's `ast` has for them.
_SIGNS = {"Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">=", "Eq": "==", "NotEq": "!="}
_SWAPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
MAX_FACTS = 64
MAX_NODES = 4000


@dataclass(frozen=True, slots=True)
class Fact:
    """`left comparison right` holds."""

    left: Node
    comparison: str
    right: Node


def holds(condition: Node, wanted: bool = True) -> list[Fact]:
    """What follows from a condition being true (or false)."""
    found: list[Fact] = []
    stack = [(condition, wanted)]
    while stack and len(found) < MAX_FACTS:
        node, truth = stack.pop()
        if node.op == "cmp":
            sign = _SIGNS.get(node.detail, node.detail)
            comparison = sign if truth else _INVERSE.get(sign, "")
            if comparison in _SWAPPED:
                found.append(Fact(_bare(node.args[0]), comparison, _bare(node.args[1])))
        elif node.op == ("and" if truth else "or") and node.width == 1:
            stack += [(arg, truth) for arg in node.args]
        elif node.op == "xor" and node.args[1].op == "const" and node.args[1].value:
            stack.append((node.args[0], not truth))
        elif node.op == "ext" and node.args[0].width == 1:
            stack.append((node.args[0], truth))
    return found


def _bare(node: Node) -> Node:
    while node.op == "ext":
        node = node.args[0]
    return node


def _bounds(facts: Iterable[Fact]) -> dict[int, tuple[Node, list[Node], list[Node]]]:
    """For each compared value: the node, its upper bounds, its lower bounds (all inclusive, exact)."""
    bounds: dict[int, tuple[Node, list[Node], list[Node]]] = {}
    for fact in facts:
        for left, comparison, right in (
            (fact.left, fact.comparison, fact.right),
            (fact.right, _SWAPPED[fact.comparison], fact.left),
        ):
            if left.op == "const":
                continue
            _, upper, lower = bounds.setdefault(left.uid, (left, [], []))
            if comparison in ("<", "<=", "=="):
                upper.append(_exact("sub", right, 1) if comparison == "<" else right)
            if comparison in (">", ">=", "=="):
                lower.append(_exact("add", right, 1) if comparison == ">" else right)
    return bounds


def _exact(op: str, node: Node, amount: int) -> Node:
    return Node(op, (node, const(amount)), 0, True, node.span)


def refined(terms: tuple[Node, ...], facts: Iterable[Fact], ranges: Ranges) -> tuple[Node, ...] | None:
    """`terms` with what the facts say, None if they say nothing new.

    A value is narrowed only if it cannot wrap itself: a comparison of a wrapped value says nothing.
    """
    copies = narrowed(facts, ranges)
    changed = tuple(copies.of(term) for term in terms)
    return None if changed == terms or copies.exhausted else changed


def narrowed(facts: Iterable[Fact], ranges: Ranges) -> Copies:
    """Copies of values in which what the facts bound is bounded."""
    replaced: dict[int, Node] = {}
    for uid, (node, upper, lower) in _bounds(facts).items():
        low, high = ranges.of(node)
        if node.narrow and not INT32_MIN <= low <= high <= INT32_MAX:
            continue
        tighter = [bound for bound in upper if ranges.of(bound)[1] < high]
        raised = [bound for bound in lower if ranges.of(bound)[0] > low]
        fresh = node
        for op, bounds in (("min", tighter), ("max", raised)):
            for bound in bounds[:2]:
                fresh = Node(op, (fresh, bound), node.width, node.signed, node.span, name=node.name)
        if fresh is not node:
            replaced[uid] = fresh
    return Copies(replaced)


class Copies:
    """Copies of graphs with some nodes replaced. Loop-carried values are not entered."""

    def __init__(self, replaced: dict[int, Node]) -> None:
        self.known = replaced
        self.exhausted = False

    def of(self, root: Node) -> Node:
        stack = [root]
        while stack:
            node = stack[-1]
            if node.uid in self.known:
                stack.pop()
                continue
            if node.op == "phi" or not node.args:
                self.known[node.uid] = node
                continue
            missing = [arg for arg in node.args if arg.uid not in self.known]
            if missing:
                stack += missing
                continue
            args = tuple(self.known[arg.uid] for arg in node.args)
            same = all(new is old for new, old in zip(args, node.args, strict=True))
            fresh = Node(node.op, args, node.width, node.signed, node.span, node.var, node.value, node.detail, node.name)
            self.known[node.uid] = node if same else fresh
            self.exhausted = self.exhausted or len(self.known) > MAX_NODES
        return self.known[root.uid]
