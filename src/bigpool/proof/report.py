"""A record for people: the table, why a case is not proven, what was not exercised, and the last line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

STYLES = {"proven": "green", "refuted": "bold red", "no power": "red", "skipped": "yellow", "could not run": "yellow"}
# In a pipe nothing is known of the reader's width, and a wrapped cell would be hard to search.
PIPE_WIDTH = 400
# Below this a table would break its words.
NARROW = 110
Row = dict[str, str]
Runs = Mapping[tuple[str, str, str], Mapping[str, Any]]


def columns(record: Mapping[str, Any]) -> list[str]:
    broken = _broken_column(record)
    return ["case", "pool", "bottom", "top", "across", *([broken] if broken else []), "error", "verdict"]


def rows(record: Mapping[str, Any]) -> list[Row]:
    """One row for each verdict: column -> text, with line breaks where a terminal may break it."""
    made = []
    fixed, broken = record["arms"][0]["name"], _broken_column(record)
    several = len({case["dtype"] for case in record["cases"]}) > 1
    for verdict in record["verdicts"]:
        runs = runs_of(record, verdict)
        row = {
            "case": verdict["case"] + (f" {verdict['dtype']}" if several else ""),
            "pool": pool_text(runs.get((fixed, "top", "unmapped"))),
            "bottom": _outcome(runs.get((fixed, "bottom", "unmapped")), None),
            "top": _placed(runs, fixed, "top", ("unmapped", "poison")),
            "across": _placed(runs, fixed, "across", ("unmapped",)),
            "error": _error(verdict),
            "verdict": verdict["status"],
        }
        if broken:
            texts = verdict["broken"]
            row[broken] = " /\n".join(brief(texts[guard]) if guard in texts else "-" for guard in ("unmapped", "poison"))
        made.append(row)
    return made


def runs_of(record: Mapping[str, Any], verdict: Mapping[str, Any]) -> Runs:
    """The runs that a verdict was made from, by (arm, placement, guard)."""
    return {
        (run["arm"], run["placement"], run["guard"]): run
        for run in record["runs"]
        if (run["case"], run["dtype"]) == (verdict["case"], verdict["dtype"])
    }


def pool_text(run: Mapping[str, Any] | None) -> str:
    """The size and the wall of the largest paged tensor of a run, in pages; in rows where every row is in use."""
    tensor = main_tensor(run)
    if tensor is None:
        return "-"
    what = "rows" if tensor["ids_in_use"] == tensor["shape"][0] else "pages"
    return f"{tensor['shape'][0]:,} {what},\nwall {tensor['wall']:,}"


def brief(text: str) -> str:
    """What happened without the particulars, which the record has: `NaN`, `killed: SIGSEGV at verify.py:88`."""
    text = re.sub(r"^(NaN|killed: CUDA [a-z ]+?) in .*", r"\1", text)
    return re.sub(r"^(unequal \(|error:|timeout:).*", lambda found: found[1].rstrip(" (:"), text)


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
    if console.width < NARROW:
        _show_list(record, console)
    else:
        _show_table(record, console)
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


def _show_table(record: Mapping[str, Any], console: Console) -> None:
    names = columns(record)
    line_break, gap = ("\n", 1) if console.is_terminal else (" ", 2)
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name.replace("\n", line_break), style="bold" if name == "case" else None, overflow="fold")
    for row in rows(record):
        table.add_row(*(Text(row[name].replace("\n", line_break), style=STYLES.get(row[name], "")) for name in names))
    console.print(table)


def _show_list(record: Mapping[str, Any], console: Console) -> None:
    between = columns(record)[1:-1]
    for row in rows(record):
        console.print(f"{row['case']}: {row['verdict']}", style=STYLES[row["verdict"]], markup=False)
        text = "; ".join(f"{name}: {row[name]}" for name in between)
        console.print(Padding(Text(text.replace("\n", " ")), (0, 0, 0, 2)))


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


def _broken_column(record: Mapping[str, Any]) -> str:
    arm = next((arm["name"] for arm in record["arms"] if arm["expect"] == "fails"), "")
    return f"{arm} at top\n(unmapped / poison)" if arm else ""


def _placed(runs: Runs, arm: str, placement: str, guards: Sequence[str]) -> str:
    bottom = runs.get((arm, "bottom", "unmapped"))
    texts = [_outcome(runs.get((arm, placement, guard)), bottom) for guard in guards]
    return next((text for text in texts if text not in ("same\nbits", "-")), texts[0])


def _outcome(run: Mapping[str, Any] | None, bottom: Mapping[str, Any] | None) -> str:
    if run is None:
        return "-"
    if run["outcome"] != "ok":
        return brief(short(run))
    if bottom is None:
        return "ok"
    return "same\nbits" if run["digests"] == bottom["digests"] else "other\nbits"


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
    return f"{worst['error']:.2g}\n{'<=' if worst['ok'] else '>'} {worst['bound']:.2g}"
