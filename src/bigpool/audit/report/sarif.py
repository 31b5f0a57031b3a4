"""SARIF 2.1.0."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from ..finding import Finding, Label, Severity
from ..rules import RULES
from ..run import Report
from ..words import wall_text

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}


def lines(report: Report, notes: bool) -> Iterator[str]:
    yield json.dumps(as_dict(report, notes), indent=1)


def as_dict(report: Report, notes: bool) -> dict[str, Any]:
    ids = list(RULES)
    rules = [
        {
            "id": rule.id,
            "name": rule.title.title().replace(" ", "").replace("-", ""),
            "shortDescription": {"text": rule.title},
            "help": {"text": rule.text.strip(), "markdown": rule.page},
        }
        for rule in RULES.values()
    ]
    skipped = [*report.skipped_files, *report.skipped_kernels]
    notices = [{"level": "warning", "message": {"text": f"skipped: {what}: {why}"}} for what, why in skipped]
    shown = [item for item in report.findings if notes or item.severity is not Severity.NOTE]
    run = {
        "tool": {"driver": {"name": "bigpool audit", "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": report.status != 2, "toolExecutionNotifications": notices}],
        "results": [_result(item, ids, report) for item in shown],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(finding: Finding, ids: list[str], report: Report) -> dict[str, Any]:
    text = finding.message + (f"; wall: {wall_text(finding.wall)}" if finding.wall is not None else "")
    return {
        "ruleId": finding.rule,
        "ruleIndex": ids.index(finding.rule),
        "level": LEVELS[finding.severity],
        "message": {"text": text},
        "locations": [_location(finding.primary)],
        "relatedLocations": [{**_location(label), "message": {"text": label.text}} for label in finding.secondary],
        "partialFingerprints": {"bigpool/1": report.fingerprint(finding)},
        "properties": {"confidence": str(finding.confidence), "kernel": finding.kernel},
    }


def _location(label: Label) -> dict[str, Any]:
    span = label.span
    region = {"startLine": span.line, "startColumn": span.col, "endLine": span.end_line, "endColumn": span.end_col}
    path = PurePath(span.file)
    uri = path.as_uri() if path.is_absolute() else quote(path.as_posix())
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}
