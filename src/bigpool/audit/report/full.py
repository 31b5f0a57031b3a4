"""The format for people: the source with its spans marked."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Finding, Label, Severity
from ..run import Report
from ..words import wall_text
from . import summary


def lines(report: Report, notes: bool) -> Iterator[str]:
    for finding in report.findings:
        if notes or finding.severity is not Severity.NOTE:
            yield from one(finding, report)
            yield ""
    yield from summary.lines(report, notes)


def one(finding: Finding, report: Report) -> Iterator[str]:
    span = finding.primary.span
    yield f"{finding.severity}[{finding.rule}]: {finding.message}"
    labels = sorted({finding.primary, *finding.secondary}, key=lambda label: (label.span.file, label.span.line, label.span.col))
    width = max(len(str(label.span.line)) for label in labels)
    yield f"{' ' * width}--> {span.file}:{span.line}:{span.col}"
    for label in labels:
        yield from _marked(label, label is finding.primary, report, width, span.file)
    pad = " " * width
    if finding.wall is not None:
        yield f"{pad} = wall: {wall_text(finding.wall)}"
    if finding.fix is not None:
        yield f"{pad} = fix: {finding.fix.title}   ({'safe, --fix' if finding.fix.safe else 'unsafe, --unsafe-fixes'})"
    for note in finding.notes:
        yield f"{pad} = note: {note}"
    yield (
        f"{pad} = in: {finding.kernel}, confidence {finding.confidence}"
        if finding.kernel
        else f"{pad} = confidence {finding.confidence}"
    )


def _marked(label: Label, primary: bool, report: Report, width: int, file: str) -> Iterator[str]:
    span = label.span
    text = report.lines.get(span.file, [])
    if span.file != file:
        yield f"{' ' * width}::: {span.file}:{span.line}:{span.col}"
    if not 0 < span.line <= len(text):
        return
    line = text[span.line - 1]
    stop = span.end_col if span.end_line == span.line else len(line.rstrip()) + 1
    yield f"{span.line:>{width}} | {line.rstrip()}"
    blank = "".join("\t" if char == "\t" else " " for char in line[: span.col - 1])
    yield f"{' ' * width} | {blank}{('^' if primary else '-') * max(1, stop - span.col)} {label.text}"
