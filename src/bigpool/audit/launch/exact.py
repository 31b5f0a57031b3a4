"""Judges a specialisation: strides and sizes are numbers here, so a wall is a number too.

The core's judge decides about what only a grid bounds; what is left is decided by arithmetic: a value is a finding if it leaves
its range within the bounds that were stated, or if a loaded id or a scalar argument that nobody bounded takes it out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

from ..candidate import Candidate
from ..expr import INT32_MAX, MAX_COUNT, RING, Node, Origin, Program, Sink, Var, walk
from ..finding import Confidence, Severity, Wall
from ..growth import OFFSET_SCALE
from ..judge import DEFAULT_MAX_MEMORY, Judge
from ..ranges import Interval, Ranges
from ..slices import COMPARED, MAX_OBSERVED, SCALED, Observed, Slice, followed
from ..walls import Product, describe, product
from .lift import Lift

_ORDER = {Origin.LOAD: 0, Origin.PROGRAM_ID: 1, Origin.LOOP: 2, Origin.SCALAR: 3, Origin.STRIDE: 4, Origin.UNKNOWN: 5}
_FREE = (Origin.LOAD, Origin.SCALAR, Origin.STRIDE)
_NAMED = frozenset({"reduce", "scan", "mod", "floordiv", "min", "max", "select", "phi"})
MAX_VARIABLES = 12


class _Shared(Ranges):
    """Intervals that share the polynomials of another, unless nodes are pinned: those cut polynomials short."""

    def __init__(
        self,
        pinned: Mapping[Node, Interval] | None = None,
        bounds: Mapping[Var, Interval] | None = None,
        like: Ranges | None = None,
    ) -> None:
        super().__init__(pinned, bounds)
        if like is None:
            return
        self.pinned = like.pinned | self.pinned
        if pinned:
            self.expander.pinned |= like.expander.pinned
        else:
            self.expander = like.expander


class _At(_Shared):
    """Intervals with chosen variables at chosen values; what nobody bounded is at its smallest."""

    def _of_var(self, var: Var, depth: int) -> Interval:
        if var in self.bounds or var.declared or var.origin in (Origin.ARANGE, Origin.LOOP, Origin.CONSTEXPR):
            return super()._of_var(var, depth)
        low = min(max(var.minimum, 0), var.maximum)
        return low, low


class _Counted(_Shared):
    """Intervals with counts that nobody bounded a few tiles below 2^31, as the core has it."""

    def _of_var(self, var: Var, depth: int) -> Interval:
        low, high = super()._of_var(var, depth)
        if not var.declared and var.width == 32 and var.origin in _FREE:
            high = min(high, MAX_COUNT)
        return low, high


def candidates(
    lifted: Lift, max_memory: int = DEFAULT_MAX_MEMORY, pinned: Mapping[Node, Interval] | None = None
) -> Iterator[Candidate]:
    """What leaves its range where neither a mask nor a branch keeps it out; each operation once, at its nearest wall."""
    judge = Judge(lifted.program, max_memory, pinned)
    best: dict[tuple[int, int, str], Candidate] = {}
    judged, last = 0, followed(lifted.program.sinks)
    for place, sink in enumerate(lifted.program.sinks):
        if place >= last or judged > MAX_OBSERVED:
            lifted.unknown.append((sink, "the kernel is larger than the auditor follows"))
            continue
        used = lifted.refined.get(place, sink)
        judge.ranges.work = max(judge.ranges.work, 2000)
        found = Slice(used)
        judged += len(found.found)
        if used.kind in ("address", "atomic", "base"):
            _not_followed(lifted, used, found)
        for candidate in _of_sink(lifted.program, found, judge, max_memory):
            span = candidate.span
            key = (span.line, span.col, (candidate.observed.context == COMPARED and "compared") or "used")
            other = best.get(key)
            if other is None or _nearer(candidate, other):
                best[key] = candidate
    yield from best.values()


def _nearer(candidate: Candidate, other: Candidate) -> bool:
    if candidate.severity != other.severity:
        return candidate.severity > other.severity
    mine, its = candidate.wall.value, other.wall.value
    return mine is not None and (its is None or mine < its)


def _not_followed(lifted: Lift, sink: Sink, found: Slice) -> None:
    reasons = [sink.unknown] if sink.unknown else []
    reasons += [node.var.reason for node in found.unknowns if node.var is not None]
    if not found.complete:
        reasons.append("the expression is larger than the auditor follows")
    lifted.unknown += [(sink, reason) for reason in dict.fromkeys(reasons)]


def _of_sink(program: Program, found: Slice, judge: Judge, max_memory: int) -> Iterator[Candidate]:
    counted = _Counted(like=judge.ranges)
    for observed in found.found:
        low, high = observed.limits
        interval = counted.of(observed.root)
        if low <= interval[0] and interval[1] <= high:
            continue
        usual = judge.candidate(observed)
        variables = _variables(observed.root)
        solved = _solve(observed, variables, judge.ranges)
        if usual is None and not _certain(observed, variables, solved, judge):
            continue
        yield _candidate(program, observed, judge, usual, solved, max_memory)


def _variables(root: Node) -> list[Node]:
    """What can grow, the likeliest cause first."""
    found = [node for node in walk(root) if node.var is not None and node.var.origin in _ORDER]
    found += [
        arg for node in walk(root) if node.op == "phi" for arg in walk(node.args[-1]) if arg.var and arg.var.origin in _ORDER
    ]
    unique = {node.uid: node for node in found if node.var is not None and node.var.minimum < node.var.maximum}
    return sorted(unique.values(), key=lambda node: (_ORDER[node.var.origin], node.uid) if node.var else (9, 0))[:MAX_VARIABLES]


def _leaves(
    observed: Observed, like: Ranges, bounds: Mapping[Var, Interval], pinned: Mapping[Node, Interval] | None = None
) -> bool:
    low, high = _At(pinned, bounds, like).of(observed.root)
    return low < observed.limits[0] or high > observed.limits[1]


def _first(observed: Observed, node: Node, most: int, like: Ranges) -> int | None:
    """The smallest value of a variable (or of a named value) at which the observed value leaves its range."""

    def bad(value: int) -> bool:
        if node.var is not None:
            return _leaves(observed, like, {node.var: (value, value)})
        return _leaves(observed, like, {}, {node: (value, value)})

    if not bad(most):
        return None
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if bad(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _solve(observed: Observed, variables: list[Node], like: Ranges) -> tuple[Node, int] | None:
    """The variable to name, and its first bad value with everything else at its stated maximum."""
    for node in variables:
        assert node.var is not None
        most = node.var.maximum if node.var.declared or node.var.origin is not Origin.LOOP else _Counted(like=like).of(node)[1]
        value = _first(observed, node, most, like)
        if value:
            return node, value
    for node in walk(observed.root):
        if node.var is None and node.op in _NAMED and (value := _first(observed, node, like.of(node)[1], like)):
            return node, value
    return None


def _certain(observed: Observed, variables: list[Node], solved: tuple[Node, int] | None, judge: Judge) -> bool:
    """Whether the value leaves its range by what was stated, or by a loaded id or an argument that nobody bounded."""
    if _leaves(observed, judge.ranges, {}):
        return True
    if solved is None or (observed.context == COMPARED and not _is_offset(observed, judge)):
        return False
    var = solved[0].var
    if var is None:
        return all(node.var is not None and node.var.declared for node in variables)
    return var.declared or var.origin in _FREE


def _is_offset(observed: Observed, judge: Judge) -> bool:
    """Whether what is compared counts elements: a handful of things for each token stays below 2^31 on any machine."""
    for poly in judge.ranges.expander.ways(observed.root):
        if abs(poly.get((), 0)) > INT32_MAX - MAX_COUNT:
            return True
        for mono, coefficient in poly.items():
            if mono and (abs(coefficient) >= OFFSET_SCALE or judge.growth.shape(mono, coefficient).offset_like):
                return True
    return False


def _culprit(observed: Observed, solved: tuple[Node, int] | None, like: Ranges) -> Node:
    """The operation that leaves the range first: the innermost one that does so at the wall."""
    node = observed.root
    low, high = observed.limits
    counted: Ranges = _Counted(like=like)
    if solved is not None:
        at = (solved[1], solved[1])
        counted = _At({}, {solved[0].var: at}, like) if solved[0].var is not None else _At({solved[0]: at})
    for _ in range(200):
        if node.op == "phi" and len(node.args) > 1:
            parts: tuple[Node, ...] = node.args[-1:]
        elif node.op in RING or node.op in ("ext", "select"):
            parts = node.args[:2]
        else:
            return node
        over = [
            part for part in parts if part.var is None and part.op not in ("const", "phi") and (part.narrow or observed.narrowing)
        ]
        over = [part for part in over if node.op == "phi" or not low <= counted.of(part)[0] <= counted.of(part)[1] <= high]
        if not over:
            return node
        node = max(over, key=lambda part: counted.of(part)[1])
    return node


def _candidate(
    program: Program,
    observed: Observed,
    judge: Judge,
    usual: Candidate | None,
    solved: tuple[Node, int] | None,
    max_memory: int,
) -> Candidate:
    found = product(_culprit(observed, solved, judge.ranges), judge.growth)
    wall = _wall(observed, found, solved, judge.ranges)
    severity = Severity.WARNING if observed.context == COMPARED else Severity.ERROR
    confidence = Confidence.MEDIUM if observed.context == COMPARED else Confidence.HIGH
    variable = solved[0] if solved is not None and solved[0].var is not None else None
    if usual is not None:
        candidate = replace(usual, product=found, wall=wall, variable=variable or usual.variable, first=None)
        severity, confidence = usual.severity, usual.confidence
    else:
        poly = judge.ranges.expander.ways(observed.root)[0]
        mono = max(poly, key=lambda mono: judge.ranges.of_mono(mono, poly[mono])[1], default=())
        shape = judge.growth.shape(mono, poly.get(mono, 1))
        main = variable or judge.growth.main_variable(observed.root)
        siblings = judge.siblings(observed, mono)
        flat = not any(judge.outer(other, shape) for other in siblings)
        candidate = Candidate(program, observed, found, shape, main, wall, severity, confidence, flat, len(siblings))
    if wall.tensor_bytes is not None and wall.tensor_bytes > max_memory:
        severity = Severity.NOTE
    elif severity is Severity.NOTE and solved is not None and observed.context != COMPARED:
        severity = Severity.WARNING
    if solved is not None and observed.context != COMPARED and severity is not Severity.NOTE:
        confidence = max(confidence, Confidence.MEDIUM)
    judged = replace(candidate, severity=severity, confidence=confidence)
    judged.trust()
    return judged


def _wall(observed: Observed, found: Product, solved: tuple[Node, int] | None, like: Ranges) -> Wall:
    limit = observed.limits[1]
    formula = describe(found.node)
    if found.factors:
        formula = " * ".join([describe(found.index), *(describe(factor) for factor in found.factors)])
    certain = _At(like=like)
    others = tuple((describe(factor), certain.of(factor)[1]) for factor in found.factors if factor.op != "const" or factor.name)
    name, value = (describe(solved[0]), solved[1]) if solved is not None else (describe(found.index), None)
    scale = (
        prod(max(1, certain.of(node)[1]) for node in observed.scale) * max(1, observed.factor)
        if observed.context == SCALED
        else 1
    )
    step = 1 if observed.sink.offset_bytes else observed.sink.item_bytes or 2
    size = None if observed.context == COMPARED else (limit + 1) * step * scale
    alone = limit // max(1, prod(certain.of(factor)[1] for factor in found.factors)) + 1
    form = "sum" if value is not None and value < alone and found.factors else "product"
    return Wall(name, value, others, formula, limit, size, element=observed.sink.pointer, form=form)
