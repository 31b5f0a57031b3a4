"""Reports of `bigpool audit --format json`: findings with the size at which each breaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from bigpool.report.chapter import BAD, GOOD, OPEN, Chapter, Claim, Wall
from bigpool.report.kinds import Kind
from bigpool.report.words import count, gib

SEVERITIES = ("error", "warning", "note")
CONFIDENCES = ("high", "medium", "low")
MARKS = {"error": BAD, "warning": OPEN, "note": "plain"}
# Those that are seen at once, and those that are on the page: with more rows it is not read, and slow on a phone.
FIRST_FINDINGS, MOST_FINDINGS = 25, 200
MOST_SKIPPED = 8


def chapter(report: Mapping[str, Any]) -> Chapter:
    findings = sorted(report["findings"], key=_rank)
    searched = f"{count(report['kernels'], 'kernel')} in {count(report['files'], 'file')}"
    by_severity = Counter(found["severity"] for found in findings)
    found_text = ", ".join(count(by_severity[name], name) for name in SEVERITIES if by_severity[name]) or "no finding"
    found_word = count(len(findings), "finding")
    mark, word = {0: (GOOD, "clean"), 1: (BAD, found_word)}.get(report["status"], (OPEN, "could not run"))
    context = {
        "rows": [_row(found) for found in findings[:FIRST_FINDINGS]],
        "folded": [_row(found) for found in findings[FIRST_FINDINGS:MOST_FINDINGS]],
        "left_out": max(len(findings) - MOST_FINDINGS, 0),
        "rules": Counter(found["rule"] for found in findings).most_common(),
    }
    return Chapter(
        heading=f"Audit of {searched}",
        claim=Claim(mark, word, f"{found_text} in {searched}"),
        template="audit.html",
        context=context,
        unproven=_unproven(report, by_severity),
        walls=[
            Wall(found["wall"]["tensor_bytes"], f"{found['kernel']}: {found['wall']['formula']}")
            for found in findings
            if found["wall"] and found["wall"]["tensor_bytes"] and found["severity"] != "note"
        ],
        facts=[("searched", searched), ("note", "reports of bigpool audit name no machine and no date: they read source")],
    )


def _rank(found: Mapping[str, Any]) -> tuple[Any, ...]:
    size = found["wall"]["tensor_bytes"] if found["wall"] else None
    return (
        SEVERITIES.index(found["severity"]),
        CONFIDENCES.index(found["confidence"]),
        size or float("inf"),
        found["span"]["file"],
        found["span"]["line"],
    )


def _row(found: Mapping[str, Any]) -> dict[str, Any]:
    wall, fix = found["wall"], found["fix"]
    return {
        "claim": Claim(MARKS[found["severity"]], found["severity"], f"{found['confidence']} confidence"),
        "rule": found["rule"],
        "kernel": found["kernel"],
        "place": f"{found['span']['file']}:{found['span']['line']}",
        "message": found["message"],
        "wall": wall["text"] if wall else "",
        "size": gib(wall["tensor_bytes"]) if wall and wall["tensor_bytes"] else "size not known",
        "fix": f"{fix['title']}{'' if fix['safe'] else ' (not safe)'}" if fix else "",
        "notes": found["notes"],
    }


def _unproven(report: Mapping[str, Any], by_severity: Mapping[str, int]) -> list[str]:
    lines = []
    if report["findings"]:
        lines.append("that a finding breaks on a card: it is an argument about the source; bigpool prove shows it")
    lines += _listed("file not read", [f"{item['file']}: {item['reason']}" for item in report["skipped_files"]])
    lines += _listed("kernel not judged", [f"{item['kernel']}: {item['reason']}" for item in report["skipped_kernels"]])
    lines += [f"taken for granted, not checked: {item['bound']}" for item in report["assumed"]]
    lines += [f"left to the host to check: {text}" for text in report["trusted"]]
    if report["suppressed"]:
        lines.append(f"{count(report['suppressed'], 'finding')} suppressed by comments in the source")
    if report["baselined"]:
        lines.append(f"{count(report['baselined'], 'finding')} in the baseline, not shown")
    if hidden := report["notes"] - by_severity.get("note", 0):
        lines.append(f"{count(hidden, 'note')} not in the file; --notes writes them")
    return lines


def _listed(what: str, items: list[str]) -> list[str]:
    more = [f"{count(len(items) - MOST_SKIPPED, 'more ' + what, 'more: ' + what)}"] if len(items) > MOST_SKIPPED else []
    return [*(f"{what}: {item}" for item in items[:MOST_SKIPPED]), *more]


KIND = Kind("bigpool-audit", 1, "Audit", "bigpool audit --format json", "audit/report/audit.schema.json", chapter, order=2)
