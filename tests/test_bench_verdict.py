"""What is said about a difference, word for word."""

from __future__ import annotations

import pytest

from bigpool.bench.stats import Effect
from bigpool.bench.verdict import MARGIN, Verdict, judge, noise_of, overall, rounds_needed


def effect(low: float, estimate: float, high: float, rounds: int = 20) -> Effect:
    return Effect(estimate, low, high, rounds)


@pytest.mark.parametrize(
    ("found", "noise", "word", "text"),
    [
        (effect(-0.003, 0.003, 0.009), 0.011, "no cost", "no cost: -0.3%..+0.9%, inside the noise of 1.1%"),
        (effect(0.018, 0.021, 0.024), 0.011, "slower", "slower by 2.1% (1.8..2.4)"),
        (effect(-0.024, -0.021, -0.018), 0.011, "faster", "faster by 2.1% (1.8..2.4)"),
        (
            effect(-0.004, 0.010, 0.024), 0.005, "undecided",
            "undecided: more repeats needed (about 40); -0.4%..+2.4% against a noise of 0.5%",
        ),
        (
            effect(0.002, 0.005, 0.008), 0.005, "undecided",
            "undecided: more repeats will not decide it; it lies at the edge of the noise; +0.2%..+0.8% against a noise of 0.5%",
        ),
        (
            effect(-0.02, 0.0, 0.02), 0.06, "undecided",
            "undecided: more repeats needed (about 80); -2.0%..+2.0% against a noise of 6.0%",
        ),
        (
            effect(-0.4, 0.1, 0.8), 0.9, "undecided",
            "undecided: more repeats will not decide it; the machine is too noisy; -40.0%..+80.0% against a noise of 90.0%",
        ),
    ],
)  # fmt: skip
def test_one_shape(found: Effect, noise: float, word: str, text: str) -> None:
    made = judge(found, noise)
    assert (made.word, made.text) == (word, text)


def test_an_exact_difference_below_the_noise_is_not_slower() -> None:
    assert judge(effect(0.003, 0.004, 0.0045), 0.005).word == "no cost"
    assert judge(effect(0.003, 0.004, 0.0055), 0.005).word == "undecided"


def test_a_wide_margin_that_was_asked_for_is_not_too_noisy() -> None:
    assert judge(effect(-0.02, 0.0, 0.02), 0.05, most=0.05).word == "no cost"


def test_the_noise_is_the_furthest_end_of_the_twin_or_the_margin() -> None:
    assert noise_of(effect(-0.012, -0.004, 0.004)) == 0.012
    assert noise_of(effect(-0.001, 0.0, 0.001)) == MARGIN
    assert noise_of(None, 0.02) == 0.02


def test_twice_too_wide_needs_four_times_the_rounds() -> None:
    assert rounds_needed(effect(-0.02, 0.0, 0.02), 0.01) == 80
    assert rounds_needed(effect(-0.01, 0.01, 0.03), 0.005) == 80
    assert rounds_needed(effect(-0.0001, 0.005, 0.01), 0.005) > 10_000


def shapes(*made: Verdict) -> dict[str, Verdict]:
    return {f"s{index}": verdict for index, verdict in enumerate(made)}


SLOWER = judge(effect(0.028, 0.0315, 0.034), 0.005)
FASTER = judge(effect(-0.036, -0.033, -0.031), 0.005)
NOTHING = judge(effect(-0.002, 0.001, 0.003), 0.005)


def test_one_shape_speaks_for_itself() -> None:
    assert overall(shapes(SLOWER), NOTHING) is SLOWER


def test_mixed_signs_are_codegen_noise_even_where_the_mean_is_exact() -> None:
    pooled = judge(effect(0.0055, 0.006, 0.0065), 0.005)
    assert pooled.word == "slower"
    made = overall(shapes(SLOWER, FASTER, SLOWER, NOTHING), pooled)
    assert made.word == "signs differ"
    assert made.text == "signs differ between shapes: codegen noise, not a cost (+3.1% to -3.3%, +0.5%..+0.7% over all)"


def test_no_cost_over_all_still_names_the_shape_that_is_slower() -> None:
    made = overall(shapes(NOTHING, SLOWER, NOTHING), NOTHING)
    assert made.text == ("no cost: -0.2%..+0.3%, inside the noise of 0.5%, over 3 shapes; slower on 1 of 3, most at s1: +3.1%")


def test_all_alike() -> None:
    assert overall(shapes(SLOWER, SLOWER), SLOWER).text == (
        "slower by 3.1% (2.8..3.4), over 2 shapes; slower on 2 of 2, most at s0: +3.1%"
    )
