"""The last lines of a report: what was audited, what was not and why, what was assumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ..finding import Severity
from ..run import Report

MAX_NAMED = 8
READ = "  assumed: the 32-bit variant of every scalar; index tensors of unknown type hold non-negative int32; usual tiles"
LAUNCHED = "  assumed: grids up to their limits; loaded ids are not negative; sizes grow one at a time, strides do not"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def lines(report: Report, notes: bool) -> Iterator[str]:
    counts = Counter(finding.severity for finding in report.findings)
    parts = [
        plural(counts[Severity.ERROR], "error"),
        plural(counts[Severity.WARNING], "warning"),
        plural(counts[Severity.NOTE], "note"),
    ]
    kernels = plural(report.kernels, "specialisation" if report.launched else "kernel")
    yield f"{kernels} in {plural(report.files, 'file')} audited: {', '.join(parts)}"
    if counts[Severity.NOTE] and not notes:
        yield "  notes (out of reach, or not followed) are not shown: --notes"
    for what, why in report.skipped_kernels:
        yield f"  kernel skipped: {what}: {why}"
    for what, why in report.skipped_files:
        yield f"  file skipped: {what}: {why}"
    if report.suppressed:
        yield f"  suppressed by comments: {report.suppressed:,}"
    if report.baselined:
        yield f"  in the baseline: {report.baselined:,}"
    yield LAUNCHED if report.launched else READ
    if report.trusted:
        names = sorted(report.trusted)
        more = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
        yield f"  trusted: the host takes the narrow branch only where it fits: {', '.join(names[:MAX_NAMED])}{more}"
    for text, times in report.assumed.items():
        yield f"  assumed: {text}, for {plural(times, 'value')}"
