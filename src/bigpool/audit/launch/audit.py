"""From captured launches to a report."""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from .. import assume, comments, words
from ..candidate import Candidate
from ..finding import Confidence, Finding, Label, Severity, Span, Wall
from ..growth import OFFSET_SCALE
from ..run import Options, Report
from .cache import cached_ttir
from .capture import Argument, Launch
from .compile import argument_names
from .exact import candidates
from .lift import Lift
from .ttir import Module
from .values import Given

MAX_NAMED = 4
# Pointers to index tensors that another caller may pass in 32 bits.
WIDE = {"*i64": "*i32", "*ki64": "*ki32"}


def audit_launches(launches: list[Launch], options: Options) -> Report:
    """One finding for each operation, at its nearest wall over all specialisations.

    Raises:
        ArgumentError: an assumption that cannot be read.
    """
    job = _Audit(options)
    narrow = [_narrow_variant(launch) if options.variants else None for launch in launches]
    elsewhere = _elsewhere([*launches, *(variant for variant in narrow if variant is not None)], options.cache)
    for done, (launch, variant) in enumerate(zip(launches, narrow, strict=True), 1):
        job.add(launch, _text(launch, elsewhere, options.cache))
        if variant is not None:
            job.variant(launch, variant, _text(variant, elsewhere, options.cache))
        if options.progress is not None:
            options.progress(done, len(launches))
    return job.finish()


def audit_ttir(text: str, given: Given, options: Options | None = None, name: str = "") -> Report:
    """Audits the text of one module, wherever it comes from."""
    job = _Audit(options or Options())
    job.guarded(text, given, name, None)
    return job.finish()


def _elsewhere(launches: list[Launch], cache: Path | None) -> dict[int, str | Exception]:
    """TTIR of what the interpreter launched, by launch: it is compiled in a process without the interpreter."""
    interpreted = [launch for launch in launches if launch.specialisation is not None and _interpreted(launch)]
    if not interpreted:
        return {}
    from .worker import compile_elsewhere

    return dict(zip(map(id, interpreted), compile_elsewhere(interpreted, cache), strict=True))


def _interpreted(launch: Launch) -> bool:
    return hasattr(launch.function, "rewriter")


def _text(launch: Launch, elsewhere: dict[int, str | Exception], cache: Path | None) -> str | Exception:
    """TTIR of a launch, or why there is none."""
    if launch.specialisation is None:
        return RuntimeError(launch.failed)
    if id(launch) in elsewhere:
        return elsewhere[id(launch)]
    try:
        return cached_ttir(launch.function, launch.specialisation, cache)
    except Exception as error:  # a compiler error has no common class over the versions
        return error


def _narrow_variant(launch: Launch) -> Launch | None:
    """The launch with int32 where index tensors of int64 were passed; None if there are none."""
    chosen = launch.specialisation
    if chosen is None:
        return None
    narrowed = {name: WIDE[kind] for name, kind in chosen.signature.items() if isinstance(kind, str) and kind in WIDE}
    if not narrowed:
        return None
    return replace(launch, specialisation=replace(chosen, signature={**chosen.signature, **narrowed}))


class _Audit:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.values = assume.at(options.at)
        self.stated = [*options.bounds, *assume.read(options.assumptions, self.values)]
        self.report = Report(launched=True, fail_on=options.fail_on)
        self.best: dict[tuple[Span, str], Finding] = {}
        self.steering: dict[str, comments.Steering] = {}
        self.audited: set[tuple[str, int]] = set()

    def add(self, launch: Launch, text: str | Exception) -> None:
        where = _where(launch)
        if isinstance(text, Exception):
            self.report.skipped_kernels.append((where, _short(text)))
            return
        self.guarded(text, given_of(launch), where, launch)

    def variant(self, launch: Launch, narrow: Launch, text: str | Exception) -> None:
        """Notes of what breaks if index tensors hold int32. What it cannot compile is no fault of the launch."""
        if isinstance(text, Exception):
            return
        assert launch.specialisation is not None
        assert narrow.specialisation is not None
        before, after = launch.specialisation.signature, narrow.specialisation.signature
        changed = [name for name, kind in after.items() if kind != before[name]]
        other = _Audit(replace(self.options, variants=False))
        other.guarded(text, given_of(narrow), _where(launch), narrow)
        for finding in other.finish().faults:
            if finding.rule != "BP190":
                finding.severity = Severity.NOTE
                finding.notes.append(f"only where a caller passes int32: today {', '.join(changed)} holds int64")
                self._offer(finding)

    def guarded(self, text: str, given: Given, where: str, launch: Launch | None) -> None:
        """One kernel that defeats the reader must not end the audit of the others."""
        try:
            self.read(text, given, where, launch)
        except RecursionError:
            self.report.skipped_kernels.append((where, "nested deeper than the auditor follows"))
        except Exception as error:  # TtirError, or text that no version of Triton has written so far
            self.report.skipped_kernels.append((where, _short(error)))

    def read(self, text: str, given: Given, where: str, launch: Launch | None) -> None:
        module = Module(text)
        known = self._judge(module, given, launch, frozenset())
        counts = _counts(given, launch)
        if counts:
            # Sizes are today's as well: which of them, grown alone with all others as they are, breaks something else?
            for name in counts:
                rest = {other: value for other, value in given.values.items() if other != name}
                grown = replace(given, values=rest, grid=launch.grid or None if launch is not None else None)
                known |= self._judge(module, grown, launch, known, name)
        self.report.kernels += 1

    def _judge(
        self, module: Module, given: Given, launch: Launch | None, known: frozenset[Span], freed: str = ""
    ) -> frozenset[Span]:
        """Offers what is found, and returns where. `freed` names an argument whose growth alone is of interest."""
        lifted = Lift(module, given, in_triton, shown)
        steering = self._steer(lifted.program.span.file)
        self.audited.add((lifted.program.span.file, lifted.program.span.line))
        bounds = [*self.stated, *steering.assumptions]
        pinned = assume.apply(lifted.program, bounds, lifted.refined.values())
        found = set()
        for candidate in candidates(lifted, self.options.max_memory, pinned):
            if freed and (candidate.span in known or not _by_growth_of(freed, candidate)):
                continue
            found.add(candidate.span)
            finding = words.finding(candidate)
            callers = reversed(lifted.callers.get(candidate.product.node.uid, ()))
            finding.secondary += [Label(span, "called from here") for span in callers]
            finding.notes += _today(candidate, launch)
            finding.wall = _typed(candidate, launch, finding.wall)
            if freed:
                finding.severity = min(finding.severity, Severity.WARNING)
                finding.confidence = min(finding.confidence, Confidence.MEDIUM)
            self._offer(finding)
        for sink, reason in lifted.unknown if not freed else ():
            label = Label(sink.span, "not followed")
            text = f"address that the auditor cannot follow: {reason}"
            self._offer(Finding("BP191", Severity.NOTE, Confidence.LOW, lifted.program.name, text, label))
        return frozenset(found)

    def _steer(self, file: str) -> comments.Steering:
        if file not in self.steering:
            lines = linecache.getlines(file)
            self.steering[file] = comments.read(file, "".join(lines), _functions(file), self.values)
            self.report.lines[file] = lines
        return self.steering[file]

    def _offer(self, finding: Finding) -> None:
        key = (finding.primary.span, finding.rule)
        other = self.best.get(key)
        if other is None or _rank(finding) > _rank(other):
            self.best[key] = finding

    def finish(self) -> Report:
        report = self.report
        for finding in sorted(self.best.values(), key=lambda item: item.order):
            steering = self._steer(finding.primary.span.file)
            covering = [ignore for ignore in steering.ignores if ignore.covers(finding)]
            for ignore in covering:
                ignore.used = True
            if covering:
                report.suppressed += 1
            elif report.fingerprint(finding) in self.options.baseline:
                report.baselined += 1
            else:
                report.findings.append(finding)
        for steering in self.steering.values():
            self._unused(steering)
        report.findings.sort(key=lambda finding: finding.order)
        for item in [*self.stated, *(item for steering in self.steering.values() for item in steering.assumptions)]:
            if item.used:
                report.assumed[item.shown] = item.used
        report.files = len(self.steering)
        return report

    def _unused(self, steering: comments.Steering) -> None:
        """Comments that cannot be read, and as notes those that had nothing to do: another specialisation may need them."""
        for span, text in steering.faults:
            label = Label(span, "this comment")
            self.report.findings.append(Finding("BP190", Severity.WARNING, Confidence.HIGH, "", text, label))
        for ignore in steering.ignores:
            file, at = ignore.span.file, ignore.span.line
            around = [function for function in _functions(file) if function.line <= at <= function.end_line]
            if not ignore.used and any((file, function.line) in self.audited for function in around):
                text = f"nothing to ignore in what was launched: no {', '.join(ignore.rules)} here"
                label = Label(ignore.span, "this comment")
                self.report.findings.append(Finding("BP190", Severity.NOTE, Confidence.LOW, "", text, label))


def _counts(given: Given, launch: Launch | None) -> list[str]:
    """Arguments of a launch that may grow: 32-bit numbers that are no stride of any tensor and no flag."""
    if launch is None:
        return []
    named = [name for name, value in given.values.items() if 1 < value < 2**31 and "stride" not in name.lower()]
    return [name for name in named if name not in given.strides]


def _by_growth_of(name: str, candidate: Candidate) -> bool:
    """Whether a size is the cause, and counts elements: a handful of things that grows to millions is no news."""
    if candidate.var is None or candidate.var.name != name:
        return False
    return candidate.compared or candidate.shape.constant >= OFFSET_SCALE


def _rank(finding: Finding) -> tuple[int, int, int]:
    wall = finding.wall.value if finding.wall is not None and finding.wall.value is not None else 2**63
    return finding.severity, -wall, finding.confidence


def given_of(launch: Launch) -> Given:
    """Strides and sizes of a launch are facts; its grid and the values in its tables are today's, and grow."""
    specialisation = launch.specialisation
    assert specialisation is not None
    strides = {stride for argument in launch.arguments.values() for stride in argument.strides}
    integers = {name: argument.value for name, argument in launch.arguments.items() if argument.value is not None}
    names = argument_names(specialisation.signature)
    values = {name: value for name, value in integers.items() if name in names}
    return Given(
        values,
        backend=specialisation.target.backend,
        strides=frozenset(name for name, value in values.items() if value in strides and value > 1),
        names=names,
    )


def _today(candidate: Candidate, launch: Launch | None) -> list[str]:
    """How far today's launch is from the wall."""
    if launch is None:
        return []
    notes = []
    tensor = launch.arguments.get(candidate.observed.sink.pointer)
    if tensor is not None and tensor.shape:
        notes.append(f"today: {candidate.observed.sink.pointer} is {described(tensor)}")
    var = candidate.var
    passed = launch.arguments.get(var.name) if var is not None else None
    if passed is not None and passed.value is not None:
        notes.append(f"today: {passed.name} is {passed.value:,}")
    if var is not None and 0 <= var.axis < len(launch.grid):
        notes.append(f"today: {launch.grid[var.axis]:,} programs on axis {var.axis}")
    return notes


def _typed(candidate: Candidate, launch: Launch | None, wall: Wall | None) -> Wall | None:
    """The wall with the element type that was passed."""
    tensor = launch.arguments.get(candidate.observed.sink.pointer) if launch is not None else None
    if wall is None or tensor is None or not tensor.type.startswith("*"):
        return wall
    return replace(wall, dtype=tensor.type.removeprefix("*").removeprefix("k"))


def described(tensor: Argument) -> str:
    shape = ", ".join(f"{size:,}" for size in tensor.shape)
    strides = ", ".join(f"{stride:,}" for stride in tensor.strides)
    return f"{tensor.dtype} [{shape}]" + (f" with strides [{strides}]" if strides else "")


def _where(launch: Launch) -> str:
    code = getattr(getattr(launch.function, "fn", None), "__code__", None)
    place = f"{shown(code.co_filename)}:{code.co_firstlineno}: " if code is not None else ""
    return f"{place}{launch.name}"


def _short(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip()[:300]}" if lines else type(error).__name__


@lru_cache(maxsize=1024)
def shown(file: str) -> str:
    """A path as a user would write it."""
    try:
        near = os.path.relpath(file)
    except ValueError:
        return file
    return file if near.startswith("..") else near


@lru_cache(maxsize=1024)
def in_triton(file: str) -> bool:
    """Whether a file is part of Triton's own library of device functions."""
    import triton

    return Path(triton.__file__).resolve().parent in Path(file).resolve().parents


def _functions(file: str) -> list[Span]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found: Iterable[Any] = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return [Span(file, node.lineno, node.col_offset + 1, node.end_lineno, node.end_col_offset + 1) for node in found]


__all__ = ["audit_launches", "audit_ttir", "described", "given_of", "in_triton", "shown"]
