"""What a measured difference means, in words, for one shape and over all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import stdev
from typing import Any

from bigpool.bench.stats import Effect

SLOWER, FASTER, NO_COST, UNDECIDED, SIGNS_DIFFER = "slower", "faster", "no cost", "undecided", "signs differ"
# A difference below this is nobody's cost, however exactly it was measured.
MARGIN = 0.005
# A machine that tells identical arms apart by more than this hides costs, and cannot say that there is none.
MOST_NOISE = 0.03
# A mean over shapes stands out of their spread when it is this many standard errors from zero.
SPREADS = 2.0
# Where more than this many rounds would be needed, the difference lies at the edge of the noise.
MOST_ROUNDS = 10_000


@dataclass(frozen=True)
class Verdict:
    """`word` is one of the five above; `noise` is what two identical arms may differ by, as a fraction."""

    word: str
    text: str
    effect: Effect
    noise: float

    def to_json(self) -> dict[str, Any]:
        return {"word": self.word, "text": self.text, "noise": self.noise, **asdict(self.effect)}


def noise_of(same: Effect | None, margin: float = MARGIN) -> float:
    """The noise floor: the furthest end of the A/A interval, at least `margin`."""
    return max(margin, same.furthest if same is not None else 0.0)


def judge(effect: Effect, noise: float, most: float = MOST_NOISE) -> Verdict:
    """Slower or faster: zero is outside the interval and the estimate outside the noise. No cost: all of it is inside,
    and the noise is not above `most`.
    """
    if effect.furthest <= noise <= most:
        word, text = NO_COST, f"no cost: {span(effect)}, inside the noise of {noise:.1%}"
    elif effect.low > 0 and effect.estimate > noise:
        word, text = SLOWER, f"slower by {effect.estimate:.1%} ({effect.low * 100:.1f}..{effect.high * 100:.1f})"
    elif effect.high < 0 and -effect.estimate > noise:
        word, text = FASTER, f"faster by {-effect.estimate:.1%} ({-effect.high * 100:.1f}..{-effect.low * 100:.1f})"
    else:
        word, text = UNDECIDED, f"undecided: {_remedy(effect, noise, most)}; {span(effect)} against a noise of {noise:.1%}"
    return Verdict(word, text, effect, noise)


def rounds_needed(effect: Effect, noise: float, most: float = MOST_NOISE) -> int:
    """How many rounds would shrink the interval until it leaves zero or fits into the noise, if the estimate stays."""
    if noise > most:
        return math.ceil(min(effect.rounds * (noise / most) ** 2, MOST_ROUNDS + 1))
    room = abs(abs(effect.estimate) - noise) if abs(effect.estimate) <= noise else abs(effect.estimate)
    if room <= 0:
        return MOST_ROUNDS + 1
    needed = effect.rounds * (effect.half / room) ** 2
    return max(math.ceil(min(needed, MOST_ROUNDS + 1)), effect.rounds + 1)


def overall(verdicts: Mapping[str, Verdict], pooled: Verdict) -> Verdict:
    """Over all shapes: `pooled` is the judgement of the mean over shapes, `verdicts` those of the shapes.

    Where some shapes are slower and others faster, the mean counts only if it stands out of the spread between shapes.
    """
    if len(verdicts) == 1:
        return next(iter(verdicts.values()))
    estimates = {shape: verdict.effect.estimate for shape, verdict in verdicts.items()}
    slower, faster = (
        {shape: estimates[shape] for shape in verdicts if verdicts[shape].word == word} for word in (SLOWER, FASTER)
    )
    spread = stdev(estimates.values()) / len(estimates) ** 0.5
    if slower and faster and abs(pooled.effect.estimate) <= SPREADS * spread:
        extremes = f"{max(slower.values()):+.1%} to {min(faster.values()):+.1%}, {span(pooled.effect)} over all"
        text = f"signs differ between shapes: codegen noise, not a cost ({extremes})"
        return Verdict(SIGNS_DIFFER, text, pooled.effect, pooled.noise)
    text = f"{pooled.text}, over {len(verdicts)} shapes"
    singled = [_named(what, found, len(verdicts)) for what, found in (("slower", slower), ("faster", faster)) if found]
    return Verdict(pooled.word, "; ".join([text, *singled]), pooled.effect, pooled.noise)


def span(effect: Effect) -> str:
    """`-0.3%..+0.9%`"""
    return f"{effect.low:+.1%}..{effect.high:+.1%}"


def _remedy(effect: Effect, noise: float, most: float) -> str:
    needed = rounds_needed(effect, noise, most)
    if needed > MOST_ROUNDS:
        return "more repeats will not decide it; " + (
            "the machine is too noisy" if noise > most else "it lies at the edge of the noise"
        )
    digits = max(len(str(needed)) - 2, 0)
    return f"more repeats needed (about {math.ceil(needed / 10**digits) * 10**digits})"


def _named(what: str, found: Mapping[str, float], total: int) -> str:
    worst = max(found, key=lambda shape: abs(found[shape]))
    return f"{what} on {len(found)} of {total}, most at {worst}: {found[worst]:+.1%}"


def refusal_text(reasons: Sequence[str]) -> str:
    """The line that stands where numbers would be."""
    return "no numbers: " + "; ".join(reasons)
