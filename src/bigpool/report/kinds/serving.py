"""Records of `bigpool bench serving`: differences with their noise, and rates. A record that refuses its numbers gives none."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from bigpool.report import plots
from bigpool.report.chapter import BAD, PLAIN, Chapter, Claim
from bigpool.report.kinds import Kind
from bigpool.report.kinds.bench import MARKS
from bigpool.report.words import count, seconds, versions

MODES = {"together": "all servers up at once", "restart": "one server at a time, started anew for each turn"}


def chapter(record: Mapping[str, Any]) -> Chapter:
    refusals = list(record["refusals"]) or (
        ["the record says that its numbers are refused, and not why"] if record["status"] else []
    )
    arms = [arm["name"] for arm in record["arms"] if arm["same_as"] is None]
    context: dict[str, Any] = {"refusals": refusals, "base": record["base"], "notes": record["notes"]}
    if not refusals:
        context |= {
            "differences": _differences(record),
            "speeds": [row for made in record["measures"] for row in _rows(made, arms)],
        }
    return Chapter(
        heading=f"Served: {', '.join(arms)}",
        claim=_claim(record, refusals),
        template="serving.html",
        context=context,
        unproven=_unproven(record, refusals),
        facts=_facts(record),
    )


def _claim(record: Mapping[str, Any], refusals: list[str]) -> Claim:
    if refusals:
        return Claim(BAD, "no numbers", "; ".join(refusals))
    twins = {arm["name"] for arm in record["arms"] if arm["same_as"] is not None}
    words = {found["word"] for made in record["measures"] for name, found in made["verdicts"].items() if name not in twins}
    if len(words) == 1:
        word = words.pop()
        return Claim(MARKS[word], word, record["summary"])
    return Claim(PLAIN, "measured", record["summary"])


def _differences(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for made in record["measures"] for name in made["verdicts"])
    twins = {arm["name"] for arm in record["arms"] if arm["same_as"] is not None}
    return [
        {
            "arm": name,
            "twin": name in twins,
            "plot": plots.differences(
                {made["name"]: made["verdicts"][name] for made in record["measures"] if name in made["verdicts"]}
            ),
        }
        for name in names
    ]


def _rows(made: Mapping[str, Any], arms: list[str]) -> list[dict[str, Any]]:
    """A row for each arm; the first says how many there are."""
    timed = [name for name in arms if name in made["speeds"]]
    rows: list[dict[str, Any]] = []
    for name in timed:
        speed = made["speeds"][name]
        one, accepted = speed["per_second_of_a_stream"], speed["acceptance"]
        rows.append(
            {
                "measure": made["name"],
                "rows": 0 if rows else len(timed),
                "arm": name,
                "prompt": f"{speed['prompt_tokens']:,}" if speed["prompt_tokens"] is not None else "not reported",
                "first": seconds(speed["seconds"]) if made["kind"] == "prefill" else "",
                "rate": f"{speed['per_second']:,.1f}" if speed["per_second"] is not None else "",
                "stream": f"{one:,.1f}" if one is not None else "",
                "acceptance": "" if made["kind"] == "prefill" else f"{accepted:.1%}" if accepted is not None else "not reported",
            }
        )
    return rows


def _unproven(record: Mapping[str, Any], refusals: list[str]) -> list[str]:
    if refusals:
        return ["any speed of these servers: " + reason for reason in refusals]
    lines = ["that the servers answer right: only their speed was asked", "other lengths, numbers of streams and load"]
    undecided = [made for made in record["measures"] for found in made["verdicts"].values() if found["word"] == "undecided"]
    if undecided:
        lines.append(f"{count(len(undecided), 'difference')} left undecided: more repeats are needed")
    return [*lines, *record["notes"]]


def _facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine, package, settings = record["machine"], record["bigpool"], record["settings"]
    sha = f"{package['git_sha'][:12]}{' and changes beside it' if package['git_dirty'] else ''}" if package["git_sha"] else "none"
    order = f"{count(settings['rounds'], 'round')} of two runs an arm, alternated"
    method = f"{MODES[settings['mode']]}; {order}; prompts as {settings['prompt']}"
    lines = [
        ("command", shlex.join(record["command"])),
        ("date", record["date"]),
        ("GPU", "; ".join(machine["gpus"]) or "none"),
        ("CPU", f"{machine['cpu']}, {count(machine['cores'], 'core')}, {machine['system']}"),
        ("versions", versions(record["versions"])),
        ("git sha", sha),
        ("took", f"{record['seconds']:,.0f} s"),
        ("method", method),
    ]
    for arm in record["arms"]:
        if arm["same_as"] is None:
            env = " ".join(f"{name}={value}" for name, value in arm["env"].items())
            started = (
                f"{arm['command']}, started {count(arm['starts'], 'time')}" if arm["command"] else f"given at {arm['base_url']}"
            )
            lines.append((f"server {arm['name']}", f"{env} {started}; model {arm['model']}".strip()))
    return lines


KIND = Kind("bigpool-serving", 1, "Served", "bigpool bench serving --json", "bench/serving/record.schema.json", chapter, order=4)
