"""A record as tables and lines; the command line draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STYLES = {
    "slower": "bold red",
    "faster": "bold green",
    "no cost": "bold green",
    "undecided": "bold yellow",
    "signs differ": "bold",
}


@dataclass
class Table:
    """The first column names the row."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)


@dataclass
class Report:
    title: str
    tables: list[Table]
    # (text, style)
    lines: list[tuple[str, str]]


def report(record: Mapping[str, Any]) -> Report:
    """Speeds, verdicts in words, the machine's ceilings, and what is missing or refused."""
    settings, gpu = record["settings"], record["machine"]["gpu"]
    where = gpu["name"] if gpu else record["machine"]["cpu"]
    versions = record["versions"]
    title = (
        f"{record['op']} {settings['dtype']} on {where}, triton {versions['triton']}, {settings['method']}, "
        f"{settings['rounds']} rounds of two runs an arm, alternated; medians"
    )
    tables = [_speeds(record)] if any(shape["speeds"] for shape in record["shapes"]) else []
    if tables and any("kv_format" in shape for shape in record["shapes"]):
        tables.append(_by_format(record))
    lines = [*_verdicts(record), *_roofline(record), *_missing(record)]
    style = "bold red" if record["refusals"] else "bold"
    return Report(title, tables, [*lines, (record["summary"], style)])


def microseconds(seconds: float) -> str:
    """`159.1`; three digits below 100."""
    value = seconds * 1e6
    return f"{value:.1f}" if value < 10_000 else f"{value:,.0f}"


def _speeds(record: Mapping[str, Any]) -> Table:
    """A row for each shape and arm, with its time over that of the cache in q's dtype where a record has ratios."""
    targets = dict.fromkeys(made["to"] for shape in record["shapes"] for made in shape.get("ratios", {}).values())
    plain = "|".join(dict.fromkeys(target.rpartition("-")[2] for target in targets))
    table = Table(("shape", "arm", "us", "TB/s", "TFLOP/s", "floor us", "of floor", *([f"of {plain}"] if plain else [])))
    for shape in record["shapes"]:
        for name in _shown_arms(record):
            if name not in shape["speeds"]:
                continue
            speed = shape["speeds"][name]
            rates = f"{speed['bytes_per_second'] / 1e12:.3g}", f"{speed['flops_per_second'] / 1e12:.3g}"
            floor = shape["floor"]
            bound = f"{microseconds(floor['seconds'])} {floor['bound']}"
            row = (shape["name"], name, microseconds(speed["seconds"]), *rates, bound, f"{speed['of_floor']:.1%}")
            table.rows.append((*row, *([_ratio(shape, name)] if plain else [])))
    return table


def _by_format(record: Mapping[str, Any]) -> Table:
    """A row for each shape and arm, a column for each format: microseconds, and the time over that of the cache in q's dtype."""
    shapes = [shape for shape in record["shapes"] if "kv_format" in shape]
    columns = list(dict.fromkeys(shape["kv_format"] for shape in shapes))
    table = Table(("shape", "arm", *(f"{name} us" for name in columns)))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for shape in shapes:
        alike = shape["name"].removesuffix(f"-{shape['kv_format']}")
        for arm in _shown_arms(record):
            if arm in shape["speeds"]:
                time = microseconds(shape["speeds"][arm]["seconds"])
                over = f" ({_ratio(shape, arm)})" if arm in shape["ratios"] else ""
                cells.setdefault((alike, arm), {})[shape["kv_format"]] = time + over
    for (alike, arm), found in cells.items():
        table.rows.append((alike, arm, *(found.get(name, "-") for name in columns)))
    return table


def _ratio(shape: Mapping[str, Any], arm: str) -> str:
    """`0.57x`"""
    return f"{shape['ratios'][arm]['ratio']:.2f}x" if arm in shape.get("ratios", {}) else "-"


def _shown_arms(record: Mapping[str, Any]) -> list[str]:
    """Without the A/A twin, which is left to the record."""
    return [arm["name"] for arm in record["arms"] if arm["same_as"] is None]


def _verdicts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = []
    for shape in record["shapes"]:
        for name, found in shape["verdicts"].items():
            lines.append((f"{shape['name']}: {name} against {record['base']}: {found['text']}", STYLES[found["word"]]))
    return lines


def _roofline(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    made = record["roofline"]
    matrix = ", ".join(f"{name} {rate / 1e12:,.3g}" for name, rate in made["matrix"].items())
    rates = f"read {made['read'] / 1e12:.3g} TB/s, copy {made['copy'] / 1e12:.3g} TB/s, matrix TFLOP/s: {matrix}"
    return [(f"this machine: {rates} ({made['how']})", "dim")]


def _missing(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = [(f"peer {peer['name']}: {peer['why']}", "dim") for peer in record["absent"]]
    kinds = {arm["name"]: "arm" if arm["package"] is None else "peer" for arm in record["arms"]}
    for shape in record["shapes"]:
        wrong = [made for made in shape["gates"] if not made["ok"] and made["arm"] not in shape["speeds"]]
        lines += [
            (f"{kinds[made['arm']]} {made['arm']} not timed on {shape['name']}: {made['text']}", "yellow") for made in wrong
        ]
        if shape["why_not_timed"]:
            lines.append((f"{shape['name']} not timed: {shape['why_not_timed']}", "yellow"))
    return [*lines, *((f"note: {note}", "dim") for note in record["notes"])]


def differing(a: Mapping[str, Any], b: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """In words, what two records do not share: `versions.triton: 3.6.0 and 3.9.0`."""
    found = []
    for key in keys:
        for name, value in a[key].items():
            other = b[key].get(name)
            if value != other:
                found.append(f"{key}.{name}: {_short(value)} and {_short(other)}")
    return found


def _short(value: Any) -> str:
    return str(value["name"]) if isinstance(value, Mapping) and "name" in value else str(value)
