"""From the times of rounds to a difference with its interval. Everything is relative: +0.01 is one percent slower."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
RESAMPLES = 2_000
MIN_ROUNDS = 8
# Rounds next to each other are alike, so they are drawn in runs of this many rounds: n ** (1/3).
BLOCK_POWER = 1 / 3
# The share of the rounds that is cut off at either end: deaf to outliers as a median is, but not stuck on the clock's tick.
TRIM = 0.25

Values: TypeAlias = npt.NDArray[np.float64]
# arm -> a row for each round, the times of its two runs in it, in seconds.
Rounds: TypeAlias = Mapping[str, Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Effect:
    """How much slower an arm is than another: an estimate and the ends of its interval, as fractions."""

    estimate: float
    low: float
    high: float
    rounds: int

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2

    @property
    def furthest(self) -> float:
        """The largest difference from zero that the interval admits."""
        return max(abs(self.low), abs(self.high))


def midmean(values: Values) -> Values:
    """The mean of the middle half, along the last axis."""
    ordered = np.sort(values, axis=-1)
    cut = int(ordered.shape[-1] * TRIM)
    kept: Values = ordered[..., cut : ordered.shape[-1] - cut]
    return np.asarray(kept.mean(-1))


def round_ratios(rounds: Rounds, base: str, arm: str) -> Values:
    """log(arm / base) for each round: the two runs of an arm in a round are averaged, which takes out a steady drift."""
    times = [np.asarray(rounds[name], dtype=np.float64).mean(-1) for name in (base, arm)]
    return np.asarray(np.log(times[1] / times[0]))


def effect_of(shapes: Sequence[Values], *, seed: int = 0, confidence: float = CONFIDENCE) -> Effect:
    """The mean over shapes of the midmean of their rounds' ratios, each shape counting the same.

    The interval is a circular block bootstrap (Politis and Romano 1992). Outliers are cut off shape by shape: in a mean over
    shapes, nearly every round would hold one.
    """
    count = min(map(len, shapes))
    estimate = float(np.mean([midmean(ratios) for ratios in shapes]))
    drawn = np.mean([_resampled(ratios, seed + index) for index, ratios in enumerate(shapes)], axis=0)
    # Resampling blocks gives a variance that is too small by the share of one block.
    widen = (count / max(count - _block(count), 1)) ** 0.5
    tail = (1 - confidence) / 2
    low, high = (estimate + (float(end) - estimate) * widen for end in np.quantile(drawn, (tail, 1 - tail)))
    return _effect(estimate, low, high, count)


def unpaired_effect(base: Values, arm: Values, *, seed: int = 0, confidence: float = CONFIDENCE) -> Effect:
    """The same for runs that were not alternated: each side is drawn by itself. `base`, `arm`: log times of rounds."""
    drawn = _resampled(arm, seed) - _resampled(base, seed + 1)
    tail = (1 - confidence) / 2
    low, high = (float(value) for value in np.quantile(drawn, (tail, 1 - tail)))
    estimate = float(midmean(arm) - midmean(base))
    return _effect(estimate, low, high, min(len(base), len(arm)))


def median(values: Sequence[Sequence[float]]) -> float:
    """Of all runs of an arm, in seconds."""
    return float(np.median(np.asarray(values, dtype=np.float64)))


def _effect(estimate: float, low: float, high: float, rounds: int) -> Effect:
    """From logarithms of ratios."""
    return Effect(math.expm1(estimate), math.expm1(low), math.expm1(high), rounds)


def _block(count: int) -> int:
    return max(int(count**BLOCK_POWER + 0.5), 1)


def _resampled(values: Values, seed: int) -> Values:
    count, block = len(values), _block(len(values))
    blocks = -(-count // block)
    starts = np.random.default_rng(seed).integers(0, count, size=(RESAMPLES, blocks))
    places = (starts[:, :, None] + np.arange(block)) % count
    return midmean(values[places.reshape(RESAMPLES, -1)[:, :count]])
