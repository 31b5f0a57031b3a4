"""Numbers and places as text."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

GIB = 2**30


def gib(size: int) -> str:
    """`4 GiB`, `0.5 GiB`, `1,024 GiB`."""
    return f"{size / GIB:,.3g} GiB" if size < 1000 * GIB else f"{size / GIB:,.0f} GiB"


def seconds(value: float) -> str:
    """With the unit that needs the fewest digits: `27.3 us`, `1.53 s`."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if value < limit:
            return f"{value * factor:,.3g} {unit}"
    return f"{value:,.3g} s" if value < 100 else f"{value:,.0f} s"


def rate(value: float, unit: str) -> str:
    """`4.54 TB/s`, `828 kFLOP/s`."""
    factor, prefix = next((pair for pair in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= pair[0]), (1.0, ""))
    scaled = value / factor
    return f"{scaled:,.0f} {prefix}{unit}" if scaled >= 100 else f"{scaled:.3g} {prefix}{unit}"


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 finding`, `2,000 findings`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def sources(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of what every record of a run says about where it comes from."""
    machine, package = record["machine"], record["bigpool"]
    gpu = machine["gpu"]
    card = "none" if gpu is None else f"{gpu['name']}, {gib(gpu['memory_bytes'])}, sm {gpu['sm']}, driver {gpu['driver']}"
    sha = f"{package['git_sha'][:12]}{' and changes beside it' if package['git_dirty'] else ''}" if package["git_sha"] else "none"
    return [
        ("command", shlex.join(record["command"])),
        ("date", record["date"]),
        ("GPU", card),
        ("CPU", f"{machine['cpu']}, {count(machine['cores'], 'core')}, {machine['system']}"),
        ("versions", versions(record["versions"])),
        ("git sha", sha),
        ("took", f"{record['seconds']:,.0f} s"),
    ]


def versions(named: Mapping[str, Any]) -> str:
    """`torch 2.11.0, triton 3.6.0`; what there is none of is left out."""
    return ", ".join(f"{name} {value}" for name, value in named.items() if value)


def hashes(arms: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """A line for each arm that has files."""
    lines = []
    for arm in arms:
        files = ", ".join(f"{made['file']} {made['sha256'][:12]}" for made in arm["files"])
        if files:
            lines.append((f"files of {arm['name']}", files))
    return lines
