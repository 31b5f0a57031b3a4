"""Decides which observed values are findings. `docs/audit-internals.md` says by which principles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from .candidate import Candidate, Weight
from .doubt import Doubts
from .expr import Node, Origin, Program, Sink, walk
from .facts import Copies, Fact, holds, narrowed
from .finding import Confidence, Severity
from .growth import OFFSET_SCALE, USUAL_CONSTEXPR, USUAL_ROW, Growth, Shape, counts
from .poly import Mono, Poly, strip
from .ranges import Ranges
from .relations import Relations
from .slices import COMPARED, DIRECT, DIVIDED, MAX_OBSERVED, SCALED, Observed, Slice, followed
from .totals import Totals
from .walls import Effort, Product, culprit, earliest, product, solve, total

# 288 GiB: the largest card that is sold.
DEFAULT_MAX_MEMORY = 288 * 2**30
UNKNOWN_ITEM_BYTES = 2
# Fewer elements for each value of an index than this are columns of a small table.
SMALL_STEP = 32
HASH_FACTOR = 2**28
INTEGERS = (Origin.PROGRAM_ID, Origin.ARANGE, Origin.LOOP, Origin.NUM_PROGRAMS)
# Of a sum that does not fit, so many terms are weighed, the largest first, and for so many a wall is looked for.
MAX_WEIGHED, MAX_SOLVED = 6, 2


class Judge:
    """Judges one program."""

    def __init__(
        self, program: Program, max_memory: int = DEFAULT_MAX_MEMORY, pinned: Mapping[Node, tuple[int, int]] | None = None
    ) -> None:
        last = followed(program.sinks)
        self.incomplete: list[Sink] = program.sinks[last:]
        self.program = program = replace(program, sinks=program.sinks[:last])
        self.max_memory = max_memory
        self.ranges = Ranges(pinned)
        self.growth = Growth(self.ranges)
        self.rows = self._rows()
        # Constexprs that are the length of an `arange`.
        nodes = (node for sink in program.sinks for term in sink.terms for node in walk(term))
        highs = [node.var.high for node in nodes if node.var is not None and node.var.origin is Origin.ARANGE and node.var.high]
        self.tiles = {part for high in highs for part in walk(high) if part.var is not None}
        self.doubts = Doubts(program, self.ranges, self.growth, max_memory)
        self.relations = Relations(program, self.ranges, self.tiles, self._usual_reach)
        self.effort = Effort()
        self.unknown: list[tuple[Sink, str]] = []
        self.trusted: set[str] = set()
        self._sure: dict[int, bool] = {}
        self.totals = Totals(program, self.growth)
        self._copies: dict[tuple[int, bool], Copies] = {}

    def candidates(self) -> Iterator[Candidate]:
        judged = 0
        for sink in self.program.sinks:
            if judged > MAX_OBSERVED:
                self.incomplete.append(sink)
                continue
            if sink.unknown:
                self.unknown.append((sink, sink.unknown))
            self.ranges.work = max(self.ranges.work, 2000)
            found = Slice(sink)
            self.trusted |= found.trusted
            if not found.complete:
                self.incomplete.append(sink)
            for node in found.unknowns:
                if node.var is not None and sink.kind in ("address", "atomic", "base"):
                    self.unknown.append((sink, node.var.reason))
            judged += len(found.found)
            for observed in found.found:
                candidate = self.candidate(observed)
                if candidate is not None:
                    yield candidate

    def candidate(self, observed: Observed) -> Candidate | None:
        """The finding that an observed value is, None if it is none."""
        low, high = observed.limits
        terms: list[tuple[int, Mono, int]] = []
        for poly in self._ways(observed.root):
            interval = self.ranges.of_poly(poly)
            if low <= interval[0] and interval[1] <= high:
                continue
            reached = [(self._usual_reach(mono, coefficient), mono, coefficient) for mono, coefficient in poly.items()]
            terms += [term for term in reached if term[0] > high]
            if not terms and self._all_declared(poly) and interval[1] > high:
                mono = max(poly, key=lambda mono: self.ranges.of_mono(mono, poly[mono])[1])
                terms.append((interval[1], mono, poly[mono]))
        if not terms:
            return self._sum_of_counts(observed)
        if self._masked_off(observed, True) or self.relations.keep(observed):
            return None
        weighed = [
            weight
            for _, mono, coefficient in sorted(terms, key=lambda term: -term[0])[:MAX_WEIGHED]
            if (weight := self._weigh(observed, mono, coefficient)) is not None
        ]
        best: Candidate | None = None
        for weight in sorted(weighed, key=lambda weight: weight.severity is Severity.NOTE)[:MAX_SOLVED]:
            found = self._build(observed, weight)
            if found is not None and (best is None or found.severity > best.severity):
                best = found
            if best is not None and best.severity is not Severity.NOTE:
                break
        return best

    def _sum_of_counts(self, observed: Observed) -> Candidate | None:
        counts = self.totals.of(observed)
        if not counts:
            return None
        found, shape = Product(observed.root, observed.root, ()), self.growth.shape((counts[-1],), 1)
        wall = total(observed, counts, self.effort)
        return Candidate(self.program, observed, found, shape, counts[-1], wall, Severity.WARNING, Confidence.LOW, True, 0)

    def _unmasked(self, sink: Sink, stated: bool) -> Copies:
        """Values as the lanes have them that the mask leaves. `stated`: of the mask only what compares with stated bounds."""
        key = (id(sink), stated)
        if key not in self._copies:
            facts = holds(sink.guard) if sink.guard is not None else []
            self._copies[key] = narrowed([fact for fact in facts if not stated or self._numbers(fact)], self.ranges)
        return self._copies[key]

    def _numbers(self, fact: Fact) -> bool:
        """Whether one side of a comparison is stated."""
        return any(all(self._bounded(part) for part in walk(side) if part.var is not None) for side in (fact.left, fact.right))

    def _masked_off(self, observed: Observed, stated: bool) -> bool:
        """Whether the mask cuts off every lane on which a value leaves its range."""
        if observed.context == COMPARED or observed.sink.guard is None:
            return False
        copies = self._unmasked(observed.sink, stated)
        low, high = self.ranges.of(copies.of(observed.root))
        return not copies.exhausted and observed.limits[0] <= low and high <= observed.limits[1]

    def _ways(self, root: Node) -> list[Poly]:
        if root.op == "phi":
            return self.ranges.phi_ends(root) or [{(root,): 1}]
        ways = []
        for poly in self.ranges.expander.ways(root):
            ways.append(poly)
            for mono, coefficient in poly.items():
                if len(mono) == 1 and mono[0].op == "phi" and coefficient == 1 and mono[0] is not root:
                    rest = {other: factor for other, factor in poly.items() if other != mono}
                    for end in self.ranges.phi_ends(mono[0]) or []:
                        ways.append({**rest, **end})
        return ways[:16]

    def _usual_reach(self, mono: Mono, coefficient: int) -> int:
        if abs(coefficient) > HASH_FACTOR and coefficient & (abs(coefficient) - 1):
            # A multiplier of a hash: it is meant to wrap, and no stride is as large.
            return 0
        return self._grown_reach(mono, coefficient)

    def _grown_reach(self, mono: Mono, coefficient: int) -> int:
        """How far a term can go when constexprs of unknown value are of a usual size; 0 if it does not grow with the data."""
        shape = self.growth.shape(mono, coefficient)
        if not shape.grows or (not shape.indices and not shape.offset_like):
            return 0
        exact = self.ranges.of_mono(mono, coefficient)
        reduced, factor = self.growth.reduced(mono, coefficient)
        growing = tuple(node for node in reduced if node not in shape.constexprs)
        usual = max(map(abs, self.ranges.of_mono(growing, factor))) * USUAL_CONSTEXPR ** len(shape.constexprs)
        return int(min(max(abs(exact[0]), exact[1]), usual))

    def _stated(self, mono: Mono) -> bool:
        """Whether somebody stated a bound for everything in a term: then it is reached, whatever it means."""
        leaves = [base for factor in mono for base in self.growth.bases(factor) | {strip(factor)}]
        return bool(leaves) and all(self._bounded(base) for base in leaves)

    def _bounded(self, node: Node) -> bool:
        var = node.var
        if var is None:
            return not counts(node)
        if var.declared or var.origin is Origin.ARANGE:
            return True
        if var.origin is not Origin.LOOP or var.high is None:
            return False
        return all(part.var is None or part.var.declared for part in walk(var.high))

    def _all_declared(self, poly: Poly) -> bool:
        return all(node.var is None or node.var.declared for mono in poly for node in mono)

    def _weigh(self, observed: Observed, mono: Mono, coefficient: int) -> Weight | None:
        shape = self.growth.shape(mono, coefficient)
        main = self.growth.main_variable(*(shape.indices or (observed.root,)))
        siblings = self.siblings(observed, mono)
        flat = not any(self.outer(other, shape) for other in siblings)
        severity = self._severity(observed, shape, flat, main)
        if severity in (None, Severity.NOTE) and self._stated(mono):
            severity = Severity.ERROR
        return None if severity is None else Weight(mono, coefficient, shape, main, siblings, flat, severity)

    def _build(self, observed: Observed, weight: Weight) -> Candidate | None:
        shape, severity = weight.shape, weight.severity
        way = culprit(observed.root, observed, self.ranges, self.growth, weight.mono)
        found = product(way[-1], self.growth)
        if observed.context == COMPARED and not found.factors:
            return None
        wall = solve(observed, found, self.growth, weight.main, self.effort, self._unmasked(observed.sink, True))
        rows = [other for other in weight.siblings if other.indices and (other.grows > 1 or other.constant >= OFFSET_SCALE)]
        candidate = Candidate(
            self.program, observed, found, shape, weight.main, wall, severity, Confidence.HIGH, weight.flat, len(rows)
        )
        if observed.sink.kind != "bound":
            candidate.first = earliest(way, weight.mono, weight.coefficient, self.growth)
        candidate.confidence = self._confidence(candidate)
        doubt = self.doubts.of(weight.mono, weight.coefficient, observed.sink.terms)
        if not doubt and self._masked_off(observed, False):
            doubt = "a mask bounds the index by a constexpr of unknown value"
        if candidate.confidence is Confidence.HIGH and doubt:
            candidate.confidence = Confidence.MEDIUM
            candidate.reasons.append(doubt)
        if severity is Severity.ERROR and candidate.confidence is Confidence.LOW:
            candidate.severity = Severity.WARNING
        self._launched(candidate)
        if wall.tensor_bytes is not None and wall.tensor_bytes > self.max_memory:
            candidate.severity = Severity.NOTE
        return candidate

    def _launched(self, found: Candidate) -> None:
        """What the launches of the kernel say against a finding."""
        found.trust()
        doubt = self.doubts.launched(found.product.index, found.product.factors, found.observed.sink.pointer)
        if doubt and found.confidence is Confidence.HIGH:
            found.confidence = Confidence.MEDIUM
            found.reasons.append(doubt)

    def _severity(self, observed: Observed, shape: Shape, flat: bool, main: Node | None) -> Severity | None:
        """ERROR for a finding, NOTE for what no card can reach, None for what is right by the limits of its axis."""
        context = observed.context
        if context == COMPARED:
            counted = shape.grows > 1 and not self._divided(shape) and (observed.sink.kind == "bound" or self._integral(observed))
            if not counted:
                return None
            return Severity.NOTE if self._scaled_elsewhere(observed) else Severity.WARNING
        if observed.sink.kind == "coordinate":
            return Severity.NOTE if shape.grows > 1 else None
        if context == SCALED and any(self.growth.kind(node) != "tile" for node in observed.scale):
            return Severity.NOTE
        if context == SCALED:
            unknown = sum(node.var is not None and node.var.origin is Origin.CONSTEXPR for node in map(strip, observed.scale))
            item = observed.sink.item_bytes or UNKNOWN_ITEM_BYTES
            reach = observed.limits[1] * observed.factor * USUAL_CONSTEXPR**unknown * item
            if reach > self.max_memory:
                return Severity.NOTE
        if shape.offset_like and (not shape.indices or shape.grows > 1):
            return Severity.NOTE if self.growth.tiles(shape) else Severity.ERROR
        counter = main is not None and main.var is not None and main.var.origin is Origin.LOOP
        if not flat or (shape.constant < SMALL_STEP and not shape.offset_like and not counter):
            return None
        if observed.narrowing and not shape.offset_like:
            return None
        if counter and observed.context == DIVIDED and not shape.offset_like:
            # A position that a loop counts, before it becomes a page: its axis has an int32 length.
            return Severity.NOTE
        if main is not None and main in self.rows and shape.constant < OFFSET_SCALE and not shape.offset_like:
            return None
        return Severity.ERROR if shape.offset_like or main is None or self._loads(main) else Severity.WARNING

    def _integral(self, observed: Observed) -> bool:
        """Whether a comparison is surely one of integers: a load or an argument of unknown type may be a float."""
        known = self._sure.get(id(observed.sink))
        if known is None:
            nodes = (node.var for term in observed.sink.terms for node in walk(term) if node.var is not None)
            known = self._sure[id(observed.sink)] = any(var.origin in INTEGERS and var.width > 1 for var in nodes)
        return known

    def _loads(self, main: Node) -> bool:
        return main.var is not None and main.var.origin is Origin.LOAD

    def _confidence(self, found: Candidate) -> Confidence:
        if found.compared or not found.shape.indices or found.observed.context == DIVIDED:
            return Confidence.LOW
        if found.var is None and found.variable is not None:
            return Confidence.MEDIUM
        if found.var is None or found.var.reason:
            return Confidence.LOW
        medium = (
            found.severity is Severity.WARNING
            or found.siblings > 0
            or found.origin is Origin.LOOP
            or not found.var.typed
            or found.observed.root.op == "phi"
        )
        if found.origin is Origin.PROGRAM_ID and found.var.axis > 0 and found.siblings:
            return Confidence.LOW
        return Confidence.MEDIUM if medium else Confidence.HIGH

    def siblings(self, observed: Observed, own: Mono) -> list[Shape]:
        """The other terms of the same sink."""
        shapes = []
        for term in observed.sink.terms:
            for poly in self.ranges.expander.ways(term):
                shapes += [self.growth.shape(mono, coefficient) for mono, coefficient in poly.items() if mono != own]
        return shapes

    def outer(self, other: Shape, shape: Shape) -> bool:
        """Whether `other` is the outer axis of the same address, whose 32-bit stride bounds the inner one."""
        if not other.indices or self._step(other) <= self._step(shape):
            return False
        # A stride that is one 32-bit value bounds what is inside it. One that is computed does where its sizes are constexprs.
        computed = len(other.arguments) + len(other.constexprs) + len(other.indices) > 2
        lengths = [node for node in other.arguments if node not in shape.arguments]
        return not shape.offset_like or not computed or not lengths

    def _step(self, shape: Shape) -> int:
        """`Shape.scale` without the tiles: `pid * BLOCK` counts lanes of an axis, `row * COLUMNS` goes along another one."""
        tiles = sum(node in self.tiles for node in shape.constexprs)
        return int(shape.scale // USUAL_CONSTEXPR**tiles)

    def _divided(self, shape: Shape) -> bool:
        """Counts of tiles: what is divided by a tile stays small."""
        return any(
            node.op == "floordiv" and self.growth.kind(node.args[1]) == "tile" for node in (*shape.indices, *shape.arguments)
        )

    def _scaled_elsewhere(self, observed: Observed) -> bool:
        return any(base in self.rows for base in self.growth.bases(observed.root))

    def _rows(self) -> set[Node]:
        """Variables that some address multiplies by a row: they cannot come near 2^31 themselves."""
        rows: set[Node] = set()
        for sink in self.program.sinks:
            if sink.kind not in ("address", "atomic", "base"):
                continue
            for term in sink.terms:
                for poly in self.ranges.expander.ways(term):
                    for mono, coefficient in poly.items():
                        shape = self.growth.shape(mono, coefficient)
                        if shape.indices and shape.scale >= USUAL_ROW:
                            for node in shape.indices:
                                rows |= self.growth.bases(node)
        return rows


__all__ = ["COMPARED", "DIRECT", "Judge"]
