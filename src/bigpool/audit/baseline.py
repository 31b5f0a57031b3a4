"""Baselines: findings that are known, by fingerprints that survive moved lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from .run import Report

SCHEMA = "bigpool-audit-baseline/1"


def read(path: Path) -> frozenset[str]:
    """The fingerprints in a baseline."""
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}")
        return frozenset(str(entry["fingerprint"]) for entry in data["findings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            "bigpool audit",
            f"--baseline: expected a file of schema {SCHEMA}, got {path}: {error}; write one with --write-baseline",
        ) from error


def written(report: Report) -> str:
    """The text of a baseline that knows every finding of `report`."""
    entries: list[dict[str, Any]] = []
    for finding in report.faults:
        span = finding.primary.span
        entries.append(
            {
                "fingerprint": report.fingerprint(finding),
                "rule": finding.rule,
                "file": span.file.replace("\\", "/"),
                "kernel": finding.kernel,
                "line": span.line,
            }
        )
    return json.dumps({"schema": SCHEMA, "findings": entries}, indent=1) + "\n"
