"""The order in which arms run: each round there and back, every arm twice, starting with another arm each time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

Call: TypeAlias = Callable[[], object]
Samples: TypeAlias = dict[str, list[list[float]]]


class Timer(Protocol):
    """`prepare` warms a call up and returns what `run_round` takes; `run_round` gives the seconds of each, in order."""

    method: str

    def prepare(self, call: Call) -> Call: ...

    def run_round(self, calls: Sequence[Call]) -> list[float]: ...


def order_of_round(names: Sequence[str], index: int) -> list[str]:
    """Two arms: A B B A, then B A A B. More arms: there and back, so that every arm has the same mean place."""
    shift = index % len(names)
    there = [*names[shift:], *names[:shift]]
    return there + there[::-1]


def prepare(timer: Timer, calls: Mapping[str, Call]) -> tuple[dict[str, Call], dict[str, str]]:
    """Every call warmed up, and by name what those raised that cannot be timed (a CUDA graph cannot hold every call)."""
    ready, faults = {}, {}
    for name, call in calls.items():
        try:
            ready[name] = timer.prepare(call)
        except RuntimeError as error:
            faults[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ready, faults


def measure(timer: Timer, ready: Mapping[str, Call], rounds: int, on_round: Callable[[], None] = lambda: None) -> Samples:
    """Times of every prepared arm, `rounds` times two of each. One round before them is run and thrown away."""
    samples: Samples = {name: [] for name in ready}
    for index in range(-1, rounds):
        order = order_of_round(list(ready), index)
        times = timer.run_round([ready[name] for name in order])
        if index < 0:
            continue
        for name in samples:
            samples[name].append([time for ran, time in zip(order, times, strict=True) if ran == name])
        on_round()
    return samples
