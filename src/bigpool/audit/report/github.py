"""Annotations of GitHub Actions."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Severity
from ..run import Report
from ..words import wall_text
from . import summary

COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


def lines(report: Report, notes: bool) -> Iterator[str]:
    for finding in report.findings:
        if not notes and finding.severity is Severity.NOTE:
            continue
        span = finding.primary.span
        place = f"file={_property(span.file)},line={span.line},endLine={span.end_line},col={span.col},endColumn={span.end_col}"
        text = finding.message + (f"; wall: {wall_text(finding.wall)}" if finding.wall is not None else "")
        yield f"::{COMMANDS[finding.severity]} {place},title={finding.rule}::{_data(text)}"
    yield from summary.lines(report, notes)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
