"""Records of `bigpool bench`: differences with their noise, times against context, and the fraction of the floor.

A record whose gate is red, or that refuses its numbers for another reason, gives none: neither times nor differences nor plots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bigpool.report import plots
from bigpool.report.chapter import BAD, GOOD, OPEN, PLAIN, Chapter, Claim
from bigpool.report.kinds import Kind
from bigpool.report.plots import Point
from bigpool.report.words import count, hashes, rate, seconds, sources

MARKS = {"slower": BAD, "faster": GOOD, "no cost": GOOD, "undecided": OPEN, "signs differ": OPEN}
FLOOR = "floor"
CLOCKS = {
    "clocks.sm": "SM {:,.0f} MHz",
    "clocks.mem": "memory {:,.0f} MHz",
    "temperature.gpu": "{:.0f} C",
    "power.draw": "{:.0f} W",
}


def chapter(record: Mapping[str, Any]) -> Chapter:
    refusals = why_no_numbers(record)
    where = record["machine"]["gpu"]["name"] if record["device"] == "cuda" and record["machine"]["gpu"] else "a CPU"
    context: dict[str, Any] = {"refusals": refusals, "gates": _wrong(record), "base": record["base"], "notes": record["notes"]}
    if not refusals:
        context |= _numbers(record)
    return Chapter(
        heading=f"Speed of {record['op'].replace('_', ' ')} on {where}: {_names(record)}",
        claim=_claim(record, refusals),
        template="bench.html",
        context=context,
        unproven=_unproven(record, refusals, where),
        facts=_facts(record, bool(refusals)),
        timed={} if refusals else _timed(record),
    )


def _timed(record: Mapping[str, Any]) -> dict[str, str]:
    arms = [arm for arm in record["arms"] if arm["same_as"] is None]
    return {file["sha256"]: f"{file['file']} of {arm['name']}" for arm in arms for file in arm["files"]}


def why_no_numbers(record: Mapping[str, Any]) -> list[str]:
    """The record's own refusals, and a red gate of one of our arms even where --no-gate let it through."""
    peers = {arm["name"] for arm in record["arms"] if _is_peer(arm)}
    red = [
        f"{gate['arm']} is wrong on {shape['name']}: {gate['text']}"
        for shape in record["shapes"]
        for gate in shape["gates"]
        if not gate["ok"] and gate["arm"] not in peers
    ]
    reasons = list(dict.fromkeys([*record["refusals"], *red]))
    return reasons or (["the record says that its numbers are refused, and not why"] if record["status"] else [])


def _is_peer(arm: Mapping[str, Any]) -> bool:
    return str(arm["spec"]).startswith("peer:")


def _claim(record: Mapping[str, Any], refusals: Sequence[str]) -> Claim:
    if refusals:
        return Claim(
            BAD, "no numbers", "; ".join(refusals[:3]) + (f"; and {len(refusals) - 3} more" if len(refusals) > 3 else "")
        )
    twins = {arm["name"] for arm in record["arms"] if arm["same_as"] is not None}
    words = [found["word"] for name, found in record["overall"].items() if name not in twins]
    if not words:
        timed = count(sum(bool(shape["speeds"]) for shape in record["shapes"]), "shape")
        return Claim(
            PLAIN, "measured", f"{timed} timed. There is nothing to compare with but the same kernel again: {record['summary']}"
        )
    if len(words) == 1:
        return Claim(MARKS.get(words[0], PLAIN), words[0], record["summary"])
    return Claim(PLAIN, "measured", record["summary"])


def _numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    twins = {arm["name"]: arm["same_as"] for arm in record["arms"] if arm["same_as"] is not None}
    shapes = [shape for shape in record["shapes"] if shape["speeds"]]
    arms = list(dict.fromkeys(name for shape in shapes for name in shape["verdicts"]))
    points = [point for shape in shapes for point in _points(shape, twins)]
    made = record["roofline"]
    matrix = ", ".join(f"{name} {rate(value, 'FLOP/s')}" for name, value in made["matrix"].items())
    ceilings = f"read {rate(made['read'], 'B/s')}, copy {rate(made['copy'], 'B/s')}, matrix {matrix} ({made['how']})"
    return {
        "differences": [_difference(record, name, shapes, name in twins) for name in arms],
        "context": plots.panels(points, tokens) if points else None,
        "speeds": [row for shape in shapes for row in _speeds(shape, twins)],
        "ceilings": ceilings,
        "rounds": record["settings"]["rounds"],
    }


def _difference(record: Mapping[str, Any], name: str, shapes: Sequence[Mapping[str, Any]], twin: bool) -> dict[str, Any]:
    overall = record["overall"].get(name)
    return {
        "arm": name,
        "twin": twin,
        "overall": overall,
        "mark": MARKS.get(overall["word"], PLAIN) if overall else PLAIN,
        "plot": plots.differences({shape["name"]: shape["verdicts"][name] for shape in shapes if name in shape["verdicts"]}),
    }


def _right(shape: Mapping[str, Any]) -> set[str]:
    """Arms that were held to the oracle on this shape and passed."""
    return {gate["arm"] for gate in shape["gates"] if gate["ok"]}


def _points(shape: Mapping[str, Any], twins: Mapping[str, str]) -> list[Point]:
    panel = "-".join(part for part in shape["name"].split("-") if not part.startswith("kv"))
    mine = [name for name in shape["speeds"] if name not in twins and name in _right(shape)]
    points = [Point(panel, name, shape["seq_len"], shape["speeds"][name]["seconds"]) for name in mine]
    return [*points, Point(panel, FLOOR, shape["seq_len"], shape["floor"]["seconds"])] if points else []


def _speeds(shape: Mapping[str, Any], twins: Mapping[str, str]) -> list[dict[str, Any]]:
    """A row for each arm; the first says how many there are."""
    rows: list[dict[str, Any]] = [
        {
            "shape": shape["name"],
            "arm": name,
            "time": seconds(speed["seconds"]),
            "rates": f"{rate(speed['bytes_per_second'], 'B/s')}, {rate(speed['flops_per_second'], 'FLOP/s')}",
            "floor": f"{seconds(shape['floor']['seconds'])} ({shape['floor']['bound']})",
            "of_floor": f"{speed['of_floor']:.1%}",
            "width": round(min(max(100 * speed["of_floor"], 0.0), 100.0), 2),
        }
        for name, speed in shape["speeds"].items()
        if name not in twins and name in _right(shape)
    ]
    return [{**row, "rows": len(rows) if index == 0 else 0} for index, row in enumerate(rows)]


def _names(record: Mapping[str, Any]) -> str:
    return ", ".join(arm["name"] for arm in record["arms"] if arm["same_as"] is None)


def tokens(length: int) -> str:
    """`8k` for 8,192, `25,000` otherwise."""
    return f"{length // 1024}k" if length % 1024 == 0 else f"{length:,}"


def _wrong(record: Mapping[str, Any]) -> list[str]:
    """Arms that were not timed on a shape, and why; the same words once for all shapes."""
    by_text: dict[tuple[str, str], list[str]] = {}
    for shape in record["shapes"]:
        for gate in shape["gates"]:
            if not gate["ok"]:
                by_text.setdefault((gate["arm"], gate["text"]), []).append(shape["name"])
    total = len(record["shapes"])
    return [
        f"{arm} on {'all shapes' if len(names) == total else ', '.join(names)}: {text}" for (arm, text), names in by_text.items()
    ]


def _unproven(record: Mapping[str, Any], refusals: Sequence[str], where: str) -> list[str]:
    if refusals:
        return ["any speed: " + reason for reason in refusals]
    lines = [f"speed on any card other than {where}" if record["device"] == "cuda" else "speed on any GPU: this ran on a CPU"]
    lines += [f"not timed: {text}" for text in _wrong(record)]
    lines += [f"not timed: {peer['name']}: {peer['why']}" for peer in record["absent"]]
    lines += [f"not timed: {shape['name']}: {shape['why_not_timed']}" for shape in record["shapes"] if shape["why_not_timed"]]
    if not record["settings"]["gated"]:
        lines.append("that numbers are refused when an arm is wrong: this run was made with --no-gate")
    undecided = [name for shape in record["shapes"] for name, found in shape["verdicts"].items() if found["word"] == "undecided"]
    if undecided:
        lines.append(f"{count(len(undecided), 'difference')} left undecided: more repeats are needed")
    lines.append("shapes that are not in the table")
    return lines


def _facts(record: Mapping[str, Any], red: bool) -> list[tuple[str, str]]:
    settings, clocks = record["settings"], record["clocks"]
    lines = [*sources(record)]
    lines.append(
        ("method", f"{settings['method']}, {count(settings['rounds'], 'round')} of two runs an arm, alternated; medians")
    )
    lines += [(f"clocks {when}", _clocks(clocks[when])) for when in ("before", "after") if clocks[when] and not red]
    return [*lines, *hashes(record["arms"])]


def _clocks(read: Mapping[str, float]) -> str:
    return ", ".join(CLOCKS.get(name, name + " {:g}").format(value) for name, value in read.items())


KIND = Kind("bigpool-bench", 1, "Speed", "bigpool bench verify --json", "bench/record.schema.json", chapter, order=3)
