"""A timer without a machine: arms that differ by a known factor, in noise like a GPU's. Run it for the table of docs/bench.md."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bigpool.bench.judgement import Judge
from bigpool.bench.pairs import Samples, measure
from bigpool.bench.verdict import Verdict

BASE = 50e-6


@dataclass(frozen=True)
class Noise:
    """Of each run: lognormal jitter; an AR(1) wander; a drift over the whole run; outliers, always slower; a clock's tick."""

    jitter: float = 0.01
    wander: float = 0.006
    memory: float = 0.7
    drift: float = 0.03
    outliers: float = 0.02
    outlier: float = 0.5
    tick: float = 0.5e-6


class SimulatedTimer:
    """A call is a function that returns its true time; what is measured of it is that and the noise."""

    method = "cpu"

    def __init__(self, seed: int, noise: Noise = Noise(), runs: int = 600) -> None:
        self.rng = np.random.default_rng(seed)
        self.noise = noise
        self.runs = runs
        self.wandered = 0.0
        self.done = 0

    def prepare(self, call: Callable[[], object]) -> Callable[[], object]:
        return call

    def run_round(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        return [self._measured(float(call())) for call in calls]  # type: ignore[arg-type]

    def _measured(self, seconds: float) -> float:
        noise, rng = self.noise, self.rng
        self.wandered = noise.memory * self.wandered + rng.normal() * noise.wander
        place = self.done / self.runs
        self.done += 1
        drift = noise.drift * (place + 0.5 * np.sin(7 * place))
        seconds *= np.exp(noise.jitter * rng.normal() + self.wandered + drift)
        if rng.random() < noise.outliers:
            seconds *= 1 + rng.exponential(noise.outlier)
        return float(np.round(seconds / noise.tick) * noise.tick if noise.tick else seconds)


def simulate(cost: float, seed: int, rounds: int, noise: Noise = Noise(), base: float = BASE) -> Samples:
    """Samples of arms a, b (slower by `cost`) and an A/A twin of a."""
    calls = {"a": lambda: base, "a again": lambda: base, "b": lambda: base * (1 + cost)}
    return measure(SimulatedTimer(seed, noise, 6 * (rounds + 1)), calls, rounds)


def verdict_of(cost: float, seed: int, rounds: int, noise: Noise = Noise()) -> Verdict:
    return Judge("a", "a again", seed=seed).shape(simulate(cost, seed, rounds, noise))["b"]


def words(cost: float, rounds: int, runs: int, noise: Noise = Noise()) -> Counter[str]:
    """How often each verdict came."""
    return Counter(verdict_of(cost, seed, rounds, noise).word for seed in range(runs))


def over_all(costs: Sequence[float], seed: int, rounds: int) -> Verdict:
    """The verdict over several shapes, each with its own cost, length and noise."""
    runs = {
        f"shape {index}": simulate(cost, 1_000 * seed + index, rounds, base=BASE * (1 + index))
        for index, cost in enumerate(costs)
    }
    return Judge("a", "a again", seed=seed).overall(runs)["b"]


def main(runs: int = 100) -> None:
    print("| true cost | rounds | no cost | undecided | slower | faster |\n|---|---|---|---|---|---|")
    for rounds in (20, 40, 100):
        for cost in (0.0, 0.005, 0.01, 0.02, 0.03):
            found = words(cost, rounds, runs)
            cells = " | ".join(str(found[word]) for word in ("no cost", "undecided", "slower", "faster"))
            print(f"| {cost:.1%} | {rounds} | {cells} |", flush=True)
    print("\nover 12 shapes, 40 rounds, 50 runs:")
    for cost in (0.0, 0.01):
        print(f"true cost {cost:.1%}:", dict(Counter(over_all([cost] * 12, seed, 40).word for seed in range(50))), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
