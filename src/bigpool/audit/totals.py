"""A sum of counts as the end of a flat index: `offs < n + m`. It is a number of elements, and each count may be near 2^31."""

from __future__ import annotations

from .doubt import ADDRESSES
from .expr import Node, Origin, Program, Sink, walk
from .growth import Growth
from .poly import strip
from .slices import COMPARED, Observed


class Totals:
    """Finds such sums in one program."""

    def __init__(self, program: Program, growth: Growth) -> None:
        self.growth = growth
        self.addresses = [sink for sink in program.sinks if sink.kind in ADDRESSES and len(sink.terms) == 1]

    def of(self, observed: Observed) -> list[Node]:
        """The counts of a sum that can leave its range, one that nobody bounded last; empty where it is no such sum."""
        ways = self.growth.ranges.expander.ways(observed.root)
        if observed.context != COMPARED or observed.root.op != "add" or len(ways) != 1 or not self._ends_index(observed):
            return []
        if self.growth.ranges.of_poly(ways[0])[1] <= observed.limits[1]:
            return []
        counted = [mono[0] for mono, amount in ways[0].items() if len(mono) == 1 and amount > 0]
        scalars = [node for node in counted if node.var is not None and node.var.origin is Origin.SCALAR]
        free = [node for node in scalars if node.var is not None and not node.var.declared]
        if len(scalars) < 2 or not free:
            return []
        return [*(node for node in scalars if node is not free[-1]), free[-1]]

    def _ends_index(self, observed: Observed) -> bool:
        """Whether what a value is compared with is all that is added to some pointer: one flat index."""
        for term in observed.sink.terms:
            for node in walk(term):
                if node.op == "cmp" and observed.root in map(strip, node.args):
                    sides = {strip(arg) for arg in node.args}
                    if any(strip(sink.terms[0]) in sides and self._flat(sink) for sink in self.addresses):
                        return True
        return False

    def _flat(self, sink: Sink) -> bool:
        """Whether an address is made of the program id and tiles, without a stride."""
        ways = self.growth.ranges.expander.ways(sink.terms[0])
        shapes = [self.growth.shape(mono, amount) for mono, amount in ways[0].items()] if len(ways) == 1 else []
        return any(shape.indices for shape in shapes) and not any(shape.arguments for shape in shapes)
