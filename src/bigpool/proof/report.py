"""A record for people: the table, why a case is not proven, what was not exercised, and the last line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

STYLES = {"proven": "green", "refuted": "bold red", "no power": "red", "skipped": "yellow", "could not run": "yellow"}
# In a pipe nothing is known of the reader's width, and a wrapped cell would be hard to search.
PIPE_WIDTH = 400
Row = dict[str, str]


def columns(record: Mapping[str, Any]) -> list[str]:
    broken = _broken_arm(record)
    failing = [f"{broken} at top (unmapped / poison)"] if broken else []
    return ["case", "pool and wall", "bottom", "top", "across", *failing, "error <= bound", "verdict"]


def rows(record: Mapping[str, Any]) -> list[Row]:
    """One row for each verdict: column -> text."""
    made = []
    fixed, broken = record["arms"][0]["name"], _broken_arm(record)
    several = len({case["dtype"] for case in record["cases"]}) > 1
    for verdict in record["verdicts"]:
        runs = {
            (run["arm"], run["placement"], run["guard"]): run
            for run in record["runs"]
            if (run["case"], run["dtype"]) == (verdict["case"], verdict["dtype"])
        }
        row = {
            "case": verdict["case"] + (f" {verdict['dtype']}" if several else ""),
            "pool and wall": pool_text(runs.get((fixed, "top", "unmapped"))),
            "bottom": _outcome(runs.get((fixed, "bottom", "unmapped")), "ok", ""),
            "top": _placed(runs, fixed, "top", ("unmapped", "poison")),
            "across": _placed(runs, fixed, "across", ("unmapped",)),
            "error <= bound": _error(verdict),
            "verdict": verdict["status"],
        }
        if broken:
            texts = verdict["broken"]
            row[f"{broken} at top (unmapped / poison)"] = " / ".join(texts.get(guard, "-") for guard in ("unmapped", "poison"))
        made.append(row)
    return made


def pool_text(run: Mapping[str, Any] | None) -> str:
    """The largest paged tensor of a run: its pages, its wall and the pages in use."""
    tensor = main_tensor(run)
    if tensor is None:
        return "-"
    size = tensor["virtual_bytes"] / 2**30
    if tensor["ids_in_use"] == tensor["shape"][0]:
        return f"{tensor['name']}: {tensor['shape'][0]:,} rows over {size:.1f} GiB, wall at row {tensor['wall']:,}"
    used = f"{tensor['first_id']:,}..{tensor['last_id']:,}"
    return f"{tensor['name']}: {tensor['shape'][0]:,} pages, {size:.1f} GiB, wall at {tensor['wall']:,}, top is {used}"


def main_tensor(run: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The tensor with the most unused address space, if the run got as far as making one."""
    tensors: Sequence[Mapping[str, Any]] = run["tensors"] if run is not None else ()
    paged = [tensor for tensor in tensors if tensor["ids_in_use"] < tensor["shape"][0]] or list(tensors)
    return max(paged, key=lambda tensor: int(tensor["virtual_bytes"]), default=None)


def show(record: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints the whole report to stdout."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    names = columns(record)
    for name in names:
        table.add_column(name, style="bold" if name == "case" else None, overflow="fold")
    for row in rows(record):
        table.add_row(*(Text(row[name], style=STYLES.get(row[name], "")) for name in names))
    console.print(table)
    for verdict in record["verdicts"]:
        if verdict["findings"]:
            console.print()
            console.print(
                f"{verdict['case']} ({verdict['dtype']}): {verdict['status']}", style=STYLES[verdict["status"]], markup=False
            )
            for finding in verdict["findings"]:
                console.print(f"  {finding}", markup=False)
    console.print()
    for arm in record["arms"]:
        console.print(arm_text(arm), markup=False, style="dim")
    for note in record["notes"]:
        console.print(f"note: {note}", markup=False)
    console.print()
    console.print("not exercised here:", style="bold")
    for line in record["not_exercised"]:
        console.print(f"  {line}", markup=False)
    console.print()
    style = "bold green" if record["status"] == 0 else "bold red" if record["status"] == 1 else "bold yellow"
    console.print(record["summary"], style=style, markup=False)


def arm_text(arm: Mapping[str, Any]) -> str:
    """`arm shipped: the installed files; verify.py 1f2e3d4c (6 widenings)`."""
    files = ", ".join(
        f"{file['file']} {file['sha256'][:8]} ({_count(file['widenings'], 'widening')})"
        for file in arm["files"]
        if file["widenings"]
    )
    others = sum(1 for file in arm["files"] if not file["widenings"])
    rest = f"{_count(others, 'file')} without a widening" if others else ""
    uncut = [place for file in arm["files"] for place in file["uncut"]]
    left = f"; 64-bit types that narrowing does not cut: {', '.join(uncut)}" if uncut else ""
    return f"arm {arm['name']}: {arm['origin']}; {', '.join(part for part in (files, rest) if part)}{left}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _broken_arm(record: Mapping[str, Any]) -> str:
    return next((str(arm["name"]) for arm in record["arms"] if arm["expect"] == "fails"), "")


def _placed(runs: Mapping[tuple[str, str, str], Mapping[str, Any]], arm: str, placement: str, guards: Sequence[str]) -> str:
    bottom = runs.get((arm, "bottom", "unmapped"))
    texts = [_outcome(runs.get((arm, placement, guard)), "same bits", "other bits", bottom) for guard in guards]
    return next((text for text in texts if text not in ("same bits", "-")), texts[0])


def _outcome(run: Mapping[str, Any] | None, same: str, other: str, bottom: Mapping[str, Any] | None = None) -> str:
    if run is None:
        return "-"
    if run["outcome"] != "ok":
        return short(run)
    return same if bottom is None or run["digests"] == bottom["digests"] else other


def short(run: Mapping[str, Any]) -> str:
    """`killed: SIGSEGV at verify.py:88`; long details are left to the findings."""
    if run["outcome"] == "canary":
        return "canary broken"
    if run["outcome"] in ("error", "unable", "skip", "timeout"):
        return str(run["outcome"])
    return f"{run['outcome']}: {run['detail']}" + (f" at {run['where']}" if run["where"] else "")


def _error(verdict: Mapping[str, Any]) -> str:
    numbers = [error for error in verdict["errors"] if error["error"] is not None]
    if not numbers:
        return "no oracle" if not verdict["oracle"] and verdict["status"] not in ("skipped", "could not run") else "-"
    worst = max(numbers, key=lambda error: error["error"] / (error["bound"] or 1.0))
    return f"{worst['output']} {worst['error']:.2g} {'<=' if worst['ok'] else '>'} {worst['bound']:.2g}"
