"""Audits files: the loop around the front end, the core, suppressions and baselines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from . import assume, comments, words
from .expr import Program
from .finding import Confidence, Finding, Label, Severity, Span
from .judge import DEFAULT_MAX_MEMORY, Judge
from .source.frame import Facts
from .source.guards import unguarded
from .source.host import Hosts
from .source.kernels import programs
from .source.modules import KERNELS, Library, Module, Unreadable, load, python_files


@dataclass(frozen=True, slots=True)
class Options:
    """What to audit and what to assume.

    `overlay` replaces the text of files (by path), to audit an edit before it is written. `fail_on`: findings of less confidence
    are reported and do not count for the exit status; None: none counts. Of launches: `cache` is a folder for what was compiled,
    `variants` asks as well what index tensors of int32 would do where int64 was passed. `progress(done, total)` hears of each
    kernel or specialisation, and before that of each file that is read, with a total of 0. (0, 0) is the end.
    """

    assumptions: tuple[str, ...] = ()
    at: tuple[str, ...] = ()
    bounds: tuple[assume.Assumption, ...] = ()
    max_memory: int = DEFAULT_MAX_MEMORY
    baseline: frozenset[str] = frozenset()
    overlay: dict[Path, bytes] = field(default_factory=dict)
    progress: Callable[[int, int], None] | None = None
    fail_on: Confidence | None = Confidence.LOW
    cache: Path | None = None
    variants: bool = False


@dataclass(slots=True)
class Report:
    """The outcome. `skipped_files` and `skipped_kernels` hold (what, why); `trusted` the gates that are left to the host.

    `kernels` were read to the end; of a report about what was `launched` they are specialisations.
    """

    findings: list[Finding] = field(default_factory=list)
    kernels: int = 0
    files: int = 0
    skipped_files: list[tuple[str, str]] = field(default_factory=list)
    skipped_kernels: list[tuple[str, str]] = field(default_factory=list)
    suppressed: int = 0
    baselined: int = 0
    trusted: set[str] = field(default_factory=set)
    assumed: dict[str, int] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)
    launched: bool = False
    fail_on: Confidence | None = Confidence.LOW

    @property
    def notes(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity is Severity.NOTE]

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity is not Severity.NOTE]

    @property
    def status(self) -> int:
        """0 clean, 1 findings of the confidence that counts, 2 nothing could be audited."""
        if self.fail_on is not None and any(finding.confidence >= self.fail_on for finding in self.faults):
            return 1
        nothing = (self.skipped_files and not self.files) or (self.skipped_kernels and not self.kernels)
        return 2 if nothing else 0

    def fingerprint(self, finding: Finding) -> str:
        return finding.fingerprint(self.lines.get(finding.primary.span.file, []))


class _Audit:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.report = Report(fail_on=options.fail_on)
        self.library = Library()
        self.hosts = Hosts(self.library)
        self.values = assume.at(options.at)
        self.stated = [*options.bounds]
        self.stated += assume.read(options.assumptions, self.values)
        self.steering: dict[str, comments.Steering] = {}
        self.inlined: set[tuple[str, str]] = set()
        self.entries: set[tuple[str, str]] = set()
        self.skipped: set[tuple[str, str]] = set()
        self.found: list[tuple[Module, str, Finding]] = []

    def read(self, paths: Iterable[Path]) -> list[Module]:
        modules = []
        for file in python_files(list(paths), self.report.skipped_files):
            shown = _shown(file)
            try:
                data = self.options.overlay.get(file.resolve())
                if data is None:
                    module = load(file, shown, KERNELS)
                else:
                    from .source.modules import parse

                    module = parse(data, file, shown)
            except Unreadable as reason:
                self.report.skipped_files.append((shown, str(reason)))
                continue
            self.report.files += 1
            if self.options.progress is not None:
                self.options.progress(self.report.files, 0)
            if module is None:
                self.library.know(file)
            else:
                self.library.add(module)
                modules.append(module)
        return modules

    def audit(self, modules: list[Module]) -> None:
        total = sum(len(module.kernels) for module in modules)
        done = 0
        for module in modules:
            self._steer(module)
        for module in modules:
            for name, function in module.kernels.items():
                self.entries.add((module.path, name))
                self._kernel(module, name, function)
                done += 1
                if self.options.progress is not None:
                    self.options.progress(done, total)

    def _steer(self, module: Module) -> comments.Steering:
        found = self.steering.get(module.path)
        if found is None:
            spans = [module.span(function) for function in module.functions.values()]
            found = comments.read(module.path, module.text, spans, self.values)
            self.steering[module.path] = found
            self.report.lines[module.path] = module.lines
        return found

    def _kernel(self, module: Module, name: str, function: object) -> None:
        from ast import FunctionDef

        assert isinstance(function, FunctionDef)
        worlds = []
        facts = Facts(*assume.facts(name, module.span(function), self._all_stated()), self.hosts.of(module, name))
        for program in programs(self.library, module, name, function, self.inlined, facts):
            if program.skipped:
                self._skip(module, program, program.skipped)
                return
            try:
                worlds.append((program, self._judge(program)))
            except RecursionError:
                self._skip(module, program, "an expression nested too deeply to judge")
                return
        open_gates = {gate for gate in worlds[0][0].gates if unguarded(module, name, gate, worlds[0][0].wide.get(gate, True))}
        for finding in _both_worlds(worlds, open_gates):
            self.found.append((module, name, finding))
        if not open_gates and len(worlds) > 1 and len({len(findings) for _, findings in worlds}) > 1:
            self.report.trusted |= {f"{name}: {gate}" for gate in worlds[0][0].gates}

    def _skip(self, module: Module, program: Program, reason: str) -> None:
        self.report.skipped_kernels.append((f"{module.path}:{program.span.line}: {program.name}", reason))
        self.skipped.add((module.path, program.name))

    def _judge(self, program: Program) -> list[Finding]:
        judge = Judge(program, self.options.max_memory, assume.apply(program, self._all_stated()))
        best: dict[Span, Finding] = {}
        for candidate in judge.candidates():
            finding = words.finding(candidate)
            other = best.get(candidate.span)
            if other is None or (finding.severity, finding.confidence) > (other.severity, other.confidence):
                best[candidate.span] = finding
        self.report.trusted |= {f"{program.name}: {name}" for name in judge.trusted}
        for sink in judge.incomplete:
            judge.unknown.append((sink, "the expression is larger than the auditor follows"))
        for sink, reason in judge.unknown:
            text = f"address that the auditor cannot follow: {reason}"
            finding = Finding("BP191", Severity.NOTE, Confidence.LOW, program.name, text, Label(sink.span, "not followed"))
            best.setdefault(sink.span, finding)
        return list(best.values())

    def _all_stated(self) -> list[assume.Assumption]:
        return [*self.stated, *(item for steering in self.steering.values() for item in steering.assumptions)]

    def finish(self) -> Report:
        report = self.report
        seen: set[tuple[Span, str]] = set()
        for module, name, finding in sorted(self.found, key=lambda item: item[2].order):
            key = (finding.primary.span, finding.rule)
            if (module.path, name) in self.inlined or key in seen:
                continue
            seen.add(key)
            self._keep(finding)
        report.kernels = len(self.entries - self.inlined - self.skipped)
        for steering in self.steering.values():
            self._unused(steering)
        for assumption in self._all_stated():
            if assumption.used:
                report.assumed[assumption.shown] = assumption.used
        report.findings.sort(key=lambda finding: finding.order)
        return report

    def _keep(self, finding: Finding) -> None:
        steering = self.steering.get(finding.primary.span.file)
        covering = [ignore for ignore in steering.ignores if ignore.covers(finding)] if steering else []
        for ignore in covering:
            ignore.used = True
        if covering:
            self.report.suppressed += 1
        elif self.report.fingerprint(finding) in self.options.baseline:
            self.report.baselined += 1
        else:
            self.report.findings.append(finding)

    def _unused(self, steering: comments.Steering) -> None:
        faults = list(steering.faults)
        faults += [
            (ignore.span, f"nothing to ignore: no {', '.join(ignore.rules)} here")
            for ignore in steering.ignores
            if not ignore.used
        ]
        faults += [
            (item.where, f"nothing to assume: no variable or tensor {item.name!r} reaches an address, mask or bound")
            for item in steering.assumptions
            if not item.used and item.where is not None
        ]
        for span, text in faults:
            self.report.findings.append(
                Finding("BP190", Severity.WARNING, Confidence.HIGH, "", text, Label(span, "this comment"))
            )


def _both_worlds(worlds: list[tuple[Program, list[Finding]]], open_gates: set[str]) -> list[Finding]:
    """Findings that hold whatever the gates are. What only a narrow branch has is left to the guard on the host.

    `open_gates`: those that no launch in sight ever opens, so that nothing guards the narrow branch.
    """
    if len(worlds) == 1:
        return worlds[0][1]
    wide = [findings for program, findings in worlds if _is_wide(program)]
    chosen = wide[0] if wide else worlds[0][1]
    kept = {finding.primary.span for finding in chosen}
    notes = []
    for _, findings in worlds:
        for finding in findings:
            if finding.primary.span not in kept:
                kept.add(finding.primary.span)
                if open_gates:
                    closed = ", ".join(sorted(open_gates))
                    finding.notes.append(f"every launch in this file takes the narrow branch of {closed} by a constant")
                else:
                    finding.severity = Severity.NOTE
                    finding.notes.append("only in the narrow branch of a constexpr gate: trusted to be guarded on the host")
                notes.append(finding)
    return [*chosen, *notes]


def _is_wide(program: Program) -> bool:
    """The run in which every gate takes the branch that names a 64-bit type."""
    return all(program.gates[name] == program.wide.get(name, True) for name in program.gates)


def _shown(file: Path) -> str:
    try:
        return os.path.relpath(file) if not os.path.relpath(file).startswith("..") else str(file)
    except ValueError:
        return str(file)


def audit(paths: Iterable[Path], options: Options | None = None) -> Report:
    """Audits every kernel in files and folders.

    Raises:
        ArgumentError: an assumption that cannot be read.
    """
    job = _Audit(options or Options())
    modules = job.read(paths)
    job.audit(modules)
    if job.options.progress is not None:
        job.options.progress(0, 0)
    return job.finish()
