"""Helpers for the tests of `bigpool audit`: kernels from text."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

from bigpool.audit import Finding, Options, Report, audit

HEADER = "import triton\nimport triton.language as tl\n\n\n"


def write(folder: Path, body: str, name: str = "kernels.py") -> Path:
    """A file with `body`, which holds `@triton.jit` functions, below the imports. The body starts in line 5."""
    path = folder / name
    path.write_text(HEADER + dedent(body).lstrip("\n"), "utf-8")
    return path


def audited(folder: Path, body: str, *bounds: str, at: tuple[str, ...] = (), max_memory: int = 288 * 2**30) -> Report:
    return audit([write(folder, body)], Options(bounds, at, max_memory=max_memory))


def only(report: Report) -> Finding:
    """The one finding of a report."""
    assert len(report.faults) == 1, [(finding.rule, finding.primary.span) for finding in report.faults]
    return report.faults[0]


def text_of(finding: Finding, folder: Path, name: str = "kernels.py") -> str:
    span = finding.primary.span
    line = (folder / name).read_text("utf-8").splitlines()[span.line - 1]
    assert span.line == span.end_line
    return line[span.col - 1 : span.end_col - 1]
