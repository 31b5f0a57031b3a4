"""Where things lie in a plot, in percent of its width and height. The templates draw; nothing here knows a colour.

Places are percentages so that a plot fits a phone as well as paper, with its text at the size of the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bigpool.report.words import seconds

Scale = Callable[[float], float]
TICKS = 5


@dataclass(frozen=True)
class Tick:
    at: float
    text: str


def linear(low: float, high: float) -> Scale:
    """`low` -> 0, `high` -> 100."""
    return lambda value: _within(100 * (value - low) / (high - low or 1.0))


def logarithmic(low: float, high: float) -> Scale:
    """The same for positive values, by their logarithms; a single value lies in the middle."""
    if low >= high:
        return lambda _: 50.0
    width = math.log(high / low)
    return lambda value: _within(100 * math.log(value / low) / width)


def _within(place: float) -> float:
    return round(min(max(place, 0.0), 100.0), 2)


def steps(low: float, high: float) -> list[float]:
    """Round numbers within low..high, zero among them where it lies inside."""
    if not high > low:
        return [low]
    raw = (high - low) / TICKS
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.8)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within low..high; fewer of them where that is many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        found = [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high * 1.0001]
        if len(found) <= 2 * TICKS:
            break
    return found


def differences(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Intervals of differences on one scale, each over its band of noise. `rows`: label -> verdict of a record."""
    ends = [end for found in rows.values() for end in (found["low"], found["high"], found["noise"], -found["noise"])]
    low, high = min(ends), max(ends)
    room = (high - low) * 0.04
    low, high = low - room, high + room
    scale = linear(low, high)
    return {
        "zero": scale(0.0),
        "ticks": [Tick(scale(at), f"{at:+.{_digits(high - low)}%}" if abs(at) > 1e-12 else "0") for at in steps(low, high)],
        "rows": [
            {
                "label": label,
                "word": found["word"],
                "text": found["text"],
                "low": scale(found["low"]),
                "at": scale(found["estimate"]),
                "high": scale(found["high"]),
                "band": (scale(-found["noise"]), scale(found["noise"])),
            }
            for label, found in rows.items()
        ],
    }


def _digits(width: float) -> int:
    return 0 if width > 0.08 else 1 if width > 0.008 else 2


@dataclass(frozen=True)
class Point:
    """A time of `line` at a length, both as they are. `panel` holds what the shapes of one plot share."""

    panel: str
    line: str
    x: int
    y: float


def panels(points: Sequence[Point], x_text: Callable[[int], str]) -> dict[str, Any]:
    """Small plots side by side on the same two logarithmic scales, a line for each name."""
    xs, ys = sorted({point.x for point in points}), [point.y for point in points]
    low, high = min(ys) / 1.15, max(ys) * 1.15
    to_x, to_y = logarithmic(xs[0], xs[-1]), logarithmic(low, high)
    names = list(dict.fromkeys(point.line for point in points))
    made = []
    for panel in dict.fromkeys(point.panel for point in points):
        mine = [point for point in points if point.panel == panel]
        lines = []
        for name in dict.fromkeys(point.line for point in mine):
            places = sorted((to_x(point.x), 100 - to_y(point.y), point.x, point.y) for point in mine if point.line == name)
            dots = [{"x": x, "y": round(y, 2), "text": f"{name}, {x_text(at)}: {seconds(value)}"} for x, y, at, value in places]
            lines.append({"name": name, "style": names.index(name) % 8, "dots": dots, "pairs": list(pairwise(dots))})
        made.append({"name": panel, "lines": lines})
    return {
        "panels": made,
        "names": [{"name": name, "style": index % 8} for index, name in enumerate(names)],
        "x_ticks": _thinned([Tick(to_x(x), x_text(x)) for x in xs]),
        "y_ticks": [Tick(round(100 - to_y(y), 2), seconds(y)) for y in decades(low, high)],
    }


def _thinned(ticks: Sequence[Tick]) -> list[Tick]:
    """Without those whose text would lie on the text before, the last one kept."""
    kept: list[Tick] = []
    for tick in ticks:
        if not kept or tick.at - kept[-1].at >= 16:
            kept.append(tick)
        elif tick is ticks[-1]:
            kept[-1] = tick
    return kept
