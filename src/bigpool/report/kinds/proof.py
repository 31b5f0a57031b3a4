"""Records of `bigpool prove`: case by placement and arm, and the walls that the cases reach past."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigpool.proof.report import Runs, arm_text, main_tensor, runs_of, short
from bigpool.report.chapter import BAD, GOOD, OPEN, PLAIN, Chapter, Claim, Wall
from bigpool.report.kinds import Kind
from bigpool.report.words import count, gib, hashes, sources

MARKS = {"proven": GOOD, "refuted": BAD, "no power": BAD, "skipped": OPEN, "could not run": OPEN}
WORDS = {0: (GOOD, "proven"), 1: (BAD, "not proven"), 2: (OPEN, "could not run")}
PLACEMENTS = (("bottom", ("unmapped",)), ("across", ("unmapped",)), ("top", ("unmapped", "poison")))


def chapter(record: Mapping[str, Any]) -> Chapter:
    where = (
        record["machine"]["gpu"]["name"] if record["backend"] == "cuda" and record["machine"]["gpu"] else "Triton's interpreter"
    )
    broken = next((arm["name"] for arm in record["arms"] if arm["expect"] == "fails"), None)
    rows = [_row(record, verdict, broken) for verdict in record["verdicts"]]
    mark, word = WORDS.get(record["status"], (OPEN, "could not run"))
    context = {
        "rows": rows,
        "holder": record["arms"][0]["name"],
        "broken": broken,
        "arms": [arm_text(arm) for arm in record["arms"]],
        "findings": [verdict for verdict in record["verdicts"] if verdict["findings"]],
        "notes": record["notes"],
    }
    green = record["status"] == 0
    return Chapter(
        heading=f"Proof on {where}: {count(len(rows), 'case')}",
        claim=Claim(mark, word, record["summary"]),
        template="proof.html",
        context=context,
        unproven=_unproven(record),
        walls=_walls(record),
        facts=[*sources(record), *hashes(record["arms"])],
        holds=frozenset(made["sha256"] for arm in record["arms"] if arm["expect"] == "holds" for made in arm["files"])
        if green
        else frozenset(),
    )


def _row(record: Mapping[str, Any], verdict: Mapping[str, Any], broken: str | None) -> dict[str, Any]:
    runs, holder = runs_of(record, verdict), record["arms"][0]["name"]
    case = next((case for case in record["cases"] if (case["name"], case["dtype"]) == (verdict["case"], verdict["dtype"])), None)
    tensor = main_tensor(runs.get((holder, "top", "unmapped")))
    return {
        "case": verdict["case"],
        "dtype": verdict["dtype"],
        "describe": case["describe"] if case else "",
        "pool": f"{gib(tensor['virtual_bytes'])}, wall at {gib(_wall_bytes(tensor))}" if tensor else "",
        "cells": [_cell(runs, holder, placement, guards, _right(verdict)) for placement, guards in PLACEMENTS],
        "broken": [Claim(_broken_mark(text), guard, text) for guard, text in sorted(verdict["broken"].items(), reverse=True)],
        "errors": [error["text"] for error in verdict["errors"]],
        "verdict": Claim(MARKS.get(verdict["status"], OPEN), verdict["status"], ""),
    }


def _broken_mark(text: str) -> str:
    """The arm without widenings has to fail: that it does is what the case needs."""
    return BAD if text == "same bits" else GOOD


def _right(verdict: Mapping[str, Any]) -> bool:
    """Whether the oracle judged the values, and all agree."""
    return bool(verdict["errors"]) and all(error["ok"] for error in verdict["errors"])


def _cell(runs: Runs, arm: str, placement: str, guards: tuple[str, ...], right: bool) -> Claim:
    """What the arm that has to hold did at one placement: the worst of its guards."""
    claims = [_outcome(runs, arm, placement, guard, right) for guard in guards]
    return min(claims, key=lambda claim: (BAD, OPEN, GOOD, PLAIN).index(claim.mark))


def _outcome(runs: Runs, arm: str, placement: str, guard: str, right: bool) -> Claim:
    run, bottom = runs.get((arm, placement, guard)), runs.get((arm, "bottom", "unmapped"))
    if run is None:
        return Claim(PLAIN, "not run", "")
    if run["outcome"] != "ok":
        mark = OPEN if run["outcome"] in ("unable", "skip") else BAD
        return Claim(mark, short(run), "")
    if placement == "bottom":
        return Claim(GOOD, "right" if right else "ran", "")
    same = bottom is not None and run["digests"] == bottom["digests"]
    return Claim(GOOD, "same bits", "") if same else Claim(BAD, "other bits", "")


def _unproven(record: Mapping[str, Any]) -> list[str]:
    weak = [
        f"{verdict['case']} ({verdict['dtype']}): {verdict['status']}: {'; '.join(verdict['findings']) or 'no reason given'}"
        for verdict in record["verdicts"]
        if verdict["status"] != "proven"
    ]
    holder = record["arms"][0]["name"]
    across = [
        verdict["case"]
        for verdict in record["verdicts"]
        if verdict["status"] == "proven" and (holder, "across", "unmapped") not in runs_of(record, verdict)
    ]
    weak += (
        [f"the place across the wall, where a page begins below it and ends above: not run in {', '.join(across)}"]
        if across
        else []
    )
    return [*weak, *(line for line in record["not_exercised"] if not _told_already(line, record))]


def _told_already(line: str, record: Mapping[str, Any]) -> bool:
    return any(line.startswith(f"case {verdict['case']}: skipped") for verdict in record["verdicts"])


def _walls(record: Mapping[str, Any]) -> list[Wall]:
    """Of every paged tensor that a case reaches past, once for each size."""
    found = {}
    proven = {(verdict["case"], verdict["dtype"]) for verdict in record["verdicts"] if verdict["status"] == "proven"}
    for run in record["runs"]:
        if run["placement"] != "top" or run["arm"] != record["arms"][0]["name"]:
            continue
        for tensor in run["tensors"]:
            if tensor["wall"] and tensor["shape"][0] > tensor["wall"]:
                guarded = (run["case"], run["dtype"]) in proven
                label = f"{tensor['name']} of {run['case']} ({tensor['dtype']})"
                found[label, _wall_bytes(tensor)] = Wall(_wall_bytes(tensor), label, guarded)
    return list(found.values())


def _wall_bytes(tensor: Mapping[str, Any]) -> int:
    return int(tensor["virtual_bytes"]) * int(tensor["wall"]) // max(int(tensor["shape"][0]), 1)


KIND = Kind("bigpool-proof", 1, "Proof", "bigpool prove --json", "proof/record.schema.json", chapter, order=1)
