"""The development set on the source front end: with what META knows of the launch, and without any fact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from audit_cases._format import Kernel, kernels
from bigpool.audit import Finding, Options, Report, audit
from bigpool.audit.assume import Assumption

CASES = [case for case in kernels() if case.meta.get("source") is not False]


def facts(case: Kernel) -> Iterator[Assumption]:
    """META as bounds."""
    for name, value in case.meta.get("args", {}).items():
        if isinstance(value, int):
            yield Assumption(name, "=", str(int(value)), kernel=case.name)
        elif value in ("*i32", "*i64"):
            yield Assumption(name, ":", value[1:], kernel=case.name)
    for name, (_, high) in case.meta.get("ranges", {}).items():
        yield Assumption(name, "<=", str(high), kernel=case.name)
    for axis, programs in enumerate(case.meta.get("grid", ())):
        yield Assumption(f"program_id({axis})", "<", str(programs), kernel=case.name)


def faults(case: Kernel, report: Report) -> list[str]:
    """How a report differs from what the case expects."""
    found = [finding for finding in report.faults if finding.kernel == case.name]
    wrong, explained = [], []
    for expected in case.expected:
        here = [finding for finding in found if expected.line in lines(case, finding)]
        explained += here
        walls = {wall for finding in here for wall in numbers(finding)}
        if not any(finding.rule in expected.rules for finding in here):
            wrong.append(f"line {expected.line}: expected {expected.rules}, got {[finding.rule for finding in here]}")
        elif expected.wall is not None and expected.wall not in walls:
            wrong.append(f"line {expected.line}: expected {expected.symbol} {expected.wall}, got {walls}")
    wrong += [f"line {finding.primary.span.line}: {finding.message}" for finding in found if finding not in explained]
    return wrong


def lines(case: Kernel, finding: Finding) -> set[int]:
    """Lines of the case that a finding marks: the operation, or the call of the helper that holds it."""
    labels = [finding.primary, *(label for label in finding.secondary if label.text == "called here")]
    spans = [label.span for label in labels if label.span.file.endswith(case.file.name)]
    return {line for span in spans for line in range(span.line, span.end_line + 1)}


def numbers(finding: Finding) -> set[int | None]:
    wall = finding.wall
    return set() if wall is None else {wall.value, wall.base[1] if wall.base is not None else None}


@pytest.mark.parametrize("case", CASES, ids=map(str, CASES))
def test_with_the_facts_of_the_launch(case: Kernel) -> None:
    wrong = faults(case, audit([case.file], Options(bounds=tuple(facts(case)))))
    assert wrong == []


def test_without_facts_the_lines_and_rules_are_the_same() -> None:
    # A line that only a fact about the launch makes a fault, or a note because nobody has the memory, may be missing.
    missing = []
    plain = [case for case in CASES if case.expected and not case.variant]
    for case in plain:
        report = audit([case.file])
        found = [finding for finding in report.faults if finding.kernel == case.name]
        missing += [
            (str(case), expected.line)
            for expected in case.expected
            if not any(expected.line in lines(case, finding) and finding.rule in expected.rules for finding in found)
        ]
    assert {name for name, _ in missing} == {
        "g_cast_order.cast_one_step_late",
        "n_block_pointers.descriptor_flat",
    }
