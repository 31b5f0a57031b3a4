"""The statistics keep their promises on simulated timers: identical arms are not called slower, a 3% slower arm is."""

from __future__ import annotations

import numpy as np
import pytest

from bench_sim import Noise, SimulatedTimer, over_all, simulate, words
from bigpool.bench import stats
from bigpool.bench.judgement import Judge
from bigpool.bench.pairs import measure, order_of_round

RUNS, ROUNDS = 100, 20
CALM = Noise(jitter=0, wander=0, drift=0, outliers=0, tick=0)


def test_identical_arms_are_hardly_ever_told_apart() -> None:
    found = words(0.0, ROUNDS, RUNS)
    assert found["no cost"] + found["undecided"] >= 95, found
    assert found["slower"] <= 5, found


def test_an_arm_slowed_by_three_percent_is_called_slower() -> None:
    found = words(0.03, ROUNDS, RUNS)
    assert found["slower"] >= 95, found


def test_more_rounds_decide_that_there_is_no_cost() -> None:
    found = words(0.0, 100, 20)
    assert found["no cost"] >= 15, found


def test_the_bars_would_see_an_estimator_that_ignores_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same runs, unpaired and judged by single runs: the 95 of 100 are not a property of the simulation."""

    def hasty(shapes: list[stats.Values], *, seed: int = 0) -> stats.Effect:
        first = float(shapes[0][0])
        return stats.Effect(first, first - 1e-4, first + 1e-4, len(shapes[0]))

    monkeypatch.setattr(stats, "effect_of", hasty)
    found = words(0.0, ROUNDS, RUNS)
    assert found["slower"] > 5, found


def test_a_steady_drift_cancels_within_a_round() -> None:
    drifting = Noise(jitter=0, wander=0, drift=0.5, outliers=0, tick=0)
    ratios = stats.round_ratios(simulate(0.02, 0, 40, drifting), "a", "b")
    assert np.expm1(ratios) == pytest.approx(0.02, abs=2e-3)


def test_a_coarse_tick_does_not_hide_a_small_difference() -> None:
    """A clock that ticks at 1% of the time: medians of paired differences would be multiples of half a percent."""
    ticking = Noise(wander=0, drift=0, outliers=0, tick=0.5e-6)
    effect = stats.effect_of([stats.round_ratios(simulate(0.008, 1, 200, ticking), "a", "b")])
    assert effect.low < 0.008 < effect.high
    assert effect.half < 0.003


def test_outliers_do_not_move_the_estimate() -> None:
    wild = Noise(jitter=0.001, wander=0, drift=0, outliers=0.05, outlier=20, tick=0)
    effect = stats.effect_of([stats.round_ratios(simulate(0.01, 3, 60, wild), "a", "b")])
    assert effect.estimate == pytest.approx(0.01, abs=2e-3)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(RUNS):
        effect = stats.effect_of([stats.round_ratios(simulate(0.02, seed, 40), "a", "b")], seed=seed)
        covered += effect.low <= 0.02 <= effect.high
    assert covered >= 85, covered


def test_the_same_seed_gives_the_same_interval() -> None:
    samples = simulate(0.01, 5, 20)
    assert Judge("a", "a again", seed=1).shape(samples) == Judge("a", "a again", seed=1).shape(samples)


def test_opposite_signs_between_shapes_are_no_cost() -> None:
    verdict = over_all([0.02, -0.02, 0.02, -0.02], seed=1, rounds=40)
    assert verdict.word == "signs differ"
    assert verdict.text.startswith("signs differ between shapes: codegen noise, not a cost (+2.")
    assert over_all([0.02, 0.02, 0.02, -0.005], seed=1, rounds=40).word == "slower"


def test_rounds_run_there_and_back_and_begin_with_another_arm() -> None:
    assert [order_of_round("AB", index) for index in range(3)] == [list("ABBA"), list("BAAB"), list("ABBA")]
    assert order_of_round("ABC", 1) == list("BCAACB")


def test_the_first_round_is_thrown_away_and_every_other_run_kept() -> None:
    ran = []

    class Counting(SimulatedTimer):
        def run_round(self, calls):  # type: ignore[no-untyped-def]
            ran.append(len(calls))
            return [float(len(ran))] * len(calls)

    samples = measure(Counting(0, CALM), {"a": lambda: 1.0, "b": lambda: 1.0}, 3)
    assert samples == {name: [[2.0, 2.0], [3.0, 3.0], [4.0, 4.0]] for name in ("a", "b")}
    assert ran == [4, 4, 4, 4]
