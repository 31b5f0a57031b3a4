"""Walls against the memory of cards, to scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bigpool.report.chapter import Wall
from bigpool.report.plots import Tick, linear
from bigpool.report.words import GIB, count, gib

# (GiB, as their makers write them; cards that have it)
CARDS = (
    (24, "RTX 3090, RTX 4090, L4"),
    (32, "RTX 5090, V100"),
    (48, "L40S, RTX A6000"),
    (80, "A100, H100"),
    (96, "RTX PRO 6000, GH200"),
    (141, "H200, H200 NVL"),
    (192, "B200, MI300X"),
    (288, "B300, MI355X"),
)
MOST_ROWS = 12
MOST_NAMED = 3


def walls(found: Sequence[Wall]) -> dict[str, Any] | None:
    """What is drawn: a row for each size at which something breaks, and one for each card. None where there is no wall."""
    if not found:
        return None
    largest = CARDS[-1][0] * GIB
    scale = linear(0, largest)
    groups: dict[tuple[str, bool], list[Wall]] = {}
    for wall in sorted(found, key=lambda wall: wall.bytes):
        groups.setdefault((gib(wall.bytes), bool(wall.guarded)), []).append(wall)
    first = min(wall.bytes for wall in found)
    return {
        "first": {"at": scale(first), "text": gib(first)},
        "rows": [_row(group, scale(group[0].bytes), group[0].bytes > largest) for group in list(groups.values())[:MOST_ROWS]],
        "more": len(groups) - MOST_ROWS,
        "ticks": [Tick(scale(size * GIB), str(size)) for size in (0, 96, 192, 288)],
        "cards": [
            {
                "name": f"{size} GB",
                "like": like,
                "width": scale(size * GIB),
                "text": _share(first, size * GIB),
            }
            for size, like in CARDS
        ],
    }


def _share(first: int, size: int) -> str:
    return f"the first wall is at {first / size:.1%} of it" if first <= size else "smaller than the first wall"


def _row(walls: Sequence[Wall], at: float, beyond: bool) -> dict[str, Any]:
    labels = list(dict.fromkeys(wall.label for wall in walls))
    more = f" and {len(labels) - MOST_NAMED:,} more" if len(labels) > MOST_NAMED else ""
    return {
        "size": gib(walls[0].bytes),
        "at": at,
        "beyond": beyond,
        "guarded": bool(walls[0].guarded),
        "count": count(len(labels), "place"),
        "labels": labels[:MOST_NAMED],
        "more": more,
    }
