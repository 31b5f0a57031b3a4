"""A serving record as tables and lines; the command line draws them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigpool.bench import stats
from bigpool.bench.compare import UNPAIRED, _judge, common, noise_of_record
from bigpool.bench.report import STYLES, Report, Table, differing
from bigpool.errors import ProofError

NOT_REPORTED = "not reported"


def report(record: Mapping[str, Any]) -> Report:
    """Times and rates, verdicts in words, and what is refused."""
    settings = record["settings"]
    arms = ", ".join(arm["name"] for arm in record["arms"] if arm["same_as"] is None)
    title = f"serving: {arms}; servers {settings['mode']}, {settings['rounds']} rounds of two runs an arm, alternated; medians"
    tables = [] if record["refusals"] else [_speeds(record)]
    lines = [
        (f"{made['name']}: {name} against {record['base']}: {found['text']}", STYLES[found["word"]])
        for made in record["measures"]
        for name, found in made["verdicts"].items()
    ]
    lines += [(f"note: {note}", "dim") for note in record["notes"]]
    if record["refusals"]:
        lines.append((record["summary"], "bold red"))
    return Report(title, tables, lines)


def _speeds(record: Mapping[str, Any]) -> Table:
    table = Table(("measure", "arm", "prompt", "first token", "tokens/s", "of a stream", "acceptance"))
    names = [arm["name"] for arm in record["arms"] if arm["same_as"] is None]
    for made in record["measures"]:
        for name in names:
            if name in made["speeds"]:
                table.rows.append((made["name"], name, *cells(made["kind"], made["speeds"][name])))
    return table


def cells(kind: str, speed: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    """prompt tokens, time to the first token, tokens per second, the same of a stream, acceptance."""
    prompt = f"{speed['prompt_tokens']:,}" if speed["prompt_tokens"] is not None else NOT_REPORTED
    if kind == "prefill":
        return prompt, f"{speed['seconds'] * 1e3:,.1f} ms", "-", "-", "-"
    one, accepted = speed["per_second_of_a_stream"], speed["acceptance"]
    return (
        prompt,
        "-",
        f"{speed['per_second']:,.1f}",
        f"{one:,.1f}" if one is not None else "-",
        f"{accepted:.1%}" if accepted is not None else NOT_REPORTED,
    )


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Report:
    """Two serving records side by side, a line for each measure and arm that both hold. They were not alternated."""
    for name, record in (("A", a), ("B", b)):
        if record["refusals"]:
            reasons = "; ".join(record["refusals"])
            raise ProofError(f"{name}: expected a record with numbers, got one that refuses them: {reasons}")
    first, second = ({**record, "shapes": record["measures"]} for record in (a, b))
    pairs = common(first, second)
    if not pairs:
        raise ProofError("A, B: expected a measure and an arm that both hold, got none; name the arms the same and repeat")
    table, lines = Table(("measure", "arm", "A ms", "B ms", "B against A")), []
    for (measure, arm), (before, after) in pairs.items():
        found = _judge(before, after, noise_of_record(first, measure), noise_of_record(second, measure))
        times = (f"{stats.median(rows) * 1e3:,.3g}" for rows in (before, after))
        table.rows.append((measure, arm, *times, f"{found.effect.estimate:+.1%}"))
        lines.append((f"{measure}: {arm}: {found.text}", STYLES[found.word]))
    lines += [(f"not the same: {what}", "yellow") for what in differing(a, b, ("machine", "versions", "settings"))]
    return Report(f"A {a['date']}, B {b['date']}", [table], [*lines, (UNPAIRED, "dim")])
