"""From a sink back to every narrow value that is observed on the way: extended, narrowed, compared, divided, clamped."""

from __future__ import annotations

from dataclasses import dataclass

from .expr import BY_TYPE, OBSERVERS, RING, Node, Sink, walk
from .poly import Expander

# How an observed value enters an address: as it is, divided first, multiplied first; or it only decides a mask or a bound.
DIRECT, DIVIDED, SCALED, COMPARED = "direct", "divided", "scaled", "compared"
MAX_VISITS = 4000
# Of one kernel so many parts are walked, and so many values are judged. Real kernels take a tenth of that.
MAX_PARTS, MAX_OBSERVED = 200_000, 4_000


@dataclass(frozen=True, slots=True)
class Observed:
    """A value that has to fit `limits` where it is observed.

    `scale` is what the value is multiplied with after that, before it is added to the pointer. `via` is the cast that widens
    (or narrows) it, None where a pointer does. `term` says which term of the sink it is part of.
    """

    root: Node
    limits: tuple[int, int]
    context: str
    sink: Sink
    term: int
    via: Node | None = None
    scale: tuple[Node, ...] = ()
    factor: int = 1

    @property
    def narrowing(self) -> bool:
        return self.via is not None and self.via.op == "trunc"


def followed(sinks: list[Sink]) -> int:
    """How many of the sinks of a kernel can be followed, the first ones, so that a huge kernel ends."""
    parts = 0
    for place, sink in enumerate(sinks):
        for term in (*sink.terms, *([] if sink.guard is None else [sink.guard])):
            parts += sum(1 for _ in walk(term))
        if parts > MAX_PARTS:
            return place
    return len(sinks)


class Slice:
    """Walks one sink. `found` lists what is observed; `complete` is False where the walk hit its budget."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.found: list[Observed] = []
        self.unknowns: list[Node] = []
        self.trusted: set[str] = set()
        self.complete = True
        self._seen: set[tuple[int, str]] = set()
        self._narrow = Expander(
            lambda node: node.width <= 32 and node.op != "trunc" and (node.op != "ext" or node.detail == "constant")
        )
        self._wide = Expander(lambda node: node.width in (0, 64) and (node.op != "ext" or node.detail == "constant"))
        self._stack: list[tuple[Node, str, tuple[Node, ...], int]] = []
        start = {"mask": COMPARED, "bound": COMPARED, "coordinate": SCALED}.get(sink.kind, DIRECT)
        for self._term, term in enumerate(sink.terms):
            self._arrive(term, start, (), 1, None)
            self._run()

    def _run(self) -> None:
        while self._stack:
            if len(self._seen) > MAX_VISITS:
                self.complete = False
                self._stack.clear()
                return
            self._visit(*self._stack.pop())

    def _arrive(self, node: Node, context: str, scale: tuple[Node, ...], factor: int, via: Node | None) -> None:
        """`node` is used as a value by something that is not a sum or a product of its own width."""
        if node.narrow and (node.op in RING or node.op in ("phi", "select")):
            self.found.append(Observed(node, node.limits, context, self.sink, self._term, via, scale, factor))
        self._stack.append((node, context, scale, factor))

    def _visit(self, node: Node, context: str, scale: tuple[Node, ...], factor: int) -> None:
        if (node.uid, context) in self._seen:
            return
        self._seen.add((node.uid, context))
        if node.var is not None:
            if node.var.reason:
                self.unknowns.append(node)
        elif node.op == "ext":
            if node.detail.startswith(BY_TYPE):
                self.trusted.add(node.detail.removeprefix(BY_TYPE))
            if node.detail != "constant":
                self._arrive(node.args[0], context, scale, factor, node)
        elif node.op == "trunc":
            child = node.args[0]
            self.found.append(Observed(child, node.limits, context, self.sink, self._term, node, scale, factor))
            self._stack.append((child, context, scale, factor))
        elif node.op in RING or node.op == "select":
            self._sum(node, context, scale, factor)
        elif node.op == "phi":
            for arg in (node.args[0], node.args[-1]):
                self._stack.append((arg, context, scale, factor))
        elif node.op in OBSERVERS:
            self._operands(node, context, scale, factor)

    def _sum(self, node: Node, context: str, scale: tuple[Node, ...], factor: int) -> None:
        """Goes on with the atoms of a sum of products."""
        if node.op == "select" and len(node.args) == 3:
            self._arrive(node.args[2], COMPARED, (), 1, None)
        expander = self._narrow if node.narrow else self._wide
        for poly in expander.ways(node):
            for mono, coefficient in poly.items():
                for place, part in enumerate(mono):
                    if part is node:
                        for arg in node.args[:2]:
                            self._arrive(arg, context, scale, factor, None)
                        continue
                    rest = mono[:place] + mono[place + 1 :]
                    scaled = context if context != DIRECT or (not rest and abs(coefficient) == 1) else SCALED
                    self._stack.append((part, scaled, scale + rest, factor * abs(coefficient)))

    def _operands(self, node: Node, context: str, scale: tuple[Node, ...], factor: int) -> None:
        if node.op == "and" and node.width > 1:
            # The low bits of a wrapped value are right.
            return
        if node.op in ("reduce", "scan"):
            self._arrive(node.args[0], context, scale, factor, None)
            return
        if node.op == "cmp":
            context, scale, factor = COMPARED, (), 1
        for place, arg in enumerate(node.args):
            if node.op in ("floordiv", "mod", "shr"):
                if place == 0:
                    divided = DIVIDED if context == DIRECT and node.op != "mod" else context
                    self._arrive(arg, divided, scale, factor, None)
            else:
                self._arrive(arg, context, scale, factor, None)
