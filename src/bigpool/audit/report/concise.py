"""One line a finding."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Severity
from ..run import Report
from ..words import wall_text
from . import summary


def lines(report: Report, notes: bool) -> Iterator[str]:
    for finding in report.findings:
        if notes or finding.severity is not Severity.NOTE:
            span = finding.primary.span
            wall = f"; wall: {wall_text(finding.wall)}" if finding.wall is not None else ""
            yield f"{span.file}:{span.line}:{span.col}: {finding.severity}[{finding.rule}] {finding.message}{wall}"
    yield from summary.lines(report, notes)
