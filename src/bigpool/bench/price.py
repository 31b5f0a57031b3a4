"""The price of a change for any two calls: what the command line does for our ops, for everybody's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bigpool.bench.judgement import Judge
from bigpool.bench.pairs import Call, measure, prepare
from bigpool.bench.timer import make_timer
from bigpool.bench.verdict import MARGIN, Verdict
from bigpool.errors import ProofError


def price(
    before: Call,
    after: Call,
    *,
    same: Callable[[Any, Any], bool],
    method: str = "graph",
    repeats: int = 100,
    margin: float = MARGIN,
) -> Verdict:
    """How much slower `after` is than `before`. Both run in turn in this process, `before` twice as often: as its own A/A twin.

    `same(before(), after())` is the gate: ProofError unless it is true, since the speed of a wrong answer is no speed.
    `method`: "graph" (calls that a CUDA graph can hold), "events" or "cpu". `margin`: a fraction below which nothing is a cost.
    Clocks and other processes are not watched.
    """
    if not same(before(), after()):
        raise ProofError("after: expected what before gives, got something else; a wrong answer has no price")
    timer = make_timer(method)
    ready, faults = prepare(timer, {"before": before, "before again": before, "after": after})
    if faults:
        said = "; ".join(f"{name}: {text}" for name, text in faults.items())
        raise ProofError(f"method: expected calls that {method} can time, got {said}; use 'events', or 'cpu'")
    return Judge("before", "before again", margin).shape(measure(timer, ready, repeats))["after"]
