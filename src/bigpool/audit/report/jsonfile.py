"""JSON, schema bigpool-audit/1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..finding import Finding, Fix, Label, Severity, Span, Wall
from ..run import Report
from ..words import wall_text

SCHEMA = "bigpool-audit/1"


def lines(report: Report, notes: bool) -> Iterator[str]:
    yield json.dumps(as_dict(report, notes), indent=1)


def as_dict(report: Report, notes: bool) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "status": report.status,
        "kernels": report.kernels,
        "files": report.files,
        "skipped_files": [{"file": what, "reason": why} for what, why in report.skipped_files],
        "skipped_kernels": [{"kernel": what, "reason": why} for what, why in report.skipped_kernels],
        "suppressed": report.suppressed,
        "baselined": report.baselined,
        "assumed": [{"bound": text, "values": times} for text, times in report.assumed.items()],
        "trusted": sorted(report.trusted),
        "notes": len(report.notes),
        "findings": [_finding(item, report) for item in report.findings if notes or item.severity is not Severity.NOTE],
    }


def _finding(finding: Finding, report: Report) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "severity": str(finding.severity),
        "confidence": str(finding.confidence),
        "kernel": finding.kernel,
        "message": finding.message,
        "span": span(finding.primary.span),
        "secondary": [_label(label) for label in finding.secondary],
        "wall": _wall(finding.wall) if finding.wall is not None else None,
        "fix": _fix(finding.fix) if finding.fix is not None else None,
        "notes": finding.notes,
        "fingerprint": report.fingerprint(finding),
    }


def span(item: Span) -> dict[str, Any]:
    return {"file": item.file, "line": item.line, "col": item.col, "end_line": item.end_line, "end_col": item.end_col}


def _label(label: Label) -> dict[str, Any]:
    return {"span": span(label.span), "text": label.text}


def _wall(wall: Wall) -> dict[str, Any]:
    return {
        "text": wall_text(wall),
        "variable": wall.variable,
        "value": wall.value,
        "others": [{"name": name, "value": value} for name, value in wall.others],
        "base": {"name": wall.base[0], "value": wall.base[1]} if wall.base is not None else None,
        "formula": wall.formula,
        "limit": wall.limit,
        "tensor_bytes": wall.tensor_bytes,
        "form": wall.form,
        "item_bytes": wall.item_bytes,
        "dtype": wall.dtype,
    }


def _fix(fix: Fix) -> dict[str, Any]:
    return {"title": fix.title, "safe": fix.safe}
