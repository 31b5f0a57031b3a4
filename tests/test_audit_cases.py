"""The development set of `bigpool audit` is right by itself: no auditor takes part here."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from audit_cases._format import Kernel, kernels
from audit_compiled import compiled

INT32_MAX = 2**31 - 1
INT32_MIN = -(2**31)
CLASSES = {*"ABCDEFGHIJKLM", "gates", *"12345678"}
REPORTS = {
    "page_gather": 2384,
    "page_interleaved": 1192,
    "latent_page": 7768,
    "query_row": 262_144,
    "query_row@wide": 131_072,
    "slot_update": 3_728_271,
    "gather_hinted": 524_288,
    "token_state": 262_144,
    "norm_rows": 58_255,
    "vocabulary_loss": 42_730,
}
FAULTY = [kernel for kernel in kernels() if kernel.expected]
CLEAN = [kernel for kernel in kernels() if not kernel.expected]
NAMES = {"max": max, "min": min}


def exact(formula: str, values: dict[str, int]) -> int:
    return int(eval(formula, {"__builtins__": {}, **NAMES}, dict(values)))


def machine(formula: str, values: dict[str, int]) -> int:
    """The same with numpy's int32, which wraps as Triton's does."""
    with np.errstate(over="ignore"):
        value = eval(formula, {"__builtins__": {}, **NAMES}, {name: np.int32(value) for name, value in values.items()})
        assert np.asarray(value).dtype == np.int32, f"{formula} is not evaluated in int32"
        return int(value)


@pytest.mark.parametrize("kernel", FAULTY, ids=str)
def test_every_wall_is_the_first_value_that_wraps(kernel: Kernel) -> None:
    walls = kernel.meta["walls"]
    assert len(walls) == len(kernel.expected), "one proof for each expectation, in the order of the lines"
    for expectation, (symbol, formula, others, *given) in zip(kernel.expected, walls, strict=True):
        assert expectation.symbol in (symbol, "*"), f"line {expectation.line} names {expectation.symbol}, its proof {symbol}"
        index = given[0] if given else expectation.wall
        assert index is not None
        assert expectation.wall in (None, index), f"line {expectation.line} and its proof disagree"
        last_good, first_bad = {**others, symbol: index - 1}, {**others, symbol: index}
        assert INT32_MIN <= exact(formula, last_good) <= INT32_MAX
        assert machine(formula, last_good) == exact(formula, last_good)
        assert not INT32_MIN <= exact(formula, first_bad) <= INT32_MAX
        assert machine(formula, first_bad) != exact(formula, first_bad)


@pytest.mark.parametrize("kernel", CLEAN, ids=str)
def test_every_clean_kernel_has_largest_values_that_fit(kernel: Kernel) -> None:
    formulas = kernel.meta["safe"]
    assert formulas, "a clean kernel says which 32-bit values were checked"
    for formula in formulas:
        assert INT32_MIN <= exact(formula, {}) <= INT32_MAX
    for symbol, formula, others in (proof[:3] for proof in kernel.meta.get("walls", [])):
        # A twin: the fault is gone because the same formula is evaluated in 64 bits.
        assert exact(formula, {**others, symbol: INT32_MAX}) != 0


def test_every_class_every_report_and_enough_kernels_are_there() -> None:
    faulty = {kernel.name for kernel in FAULTY if not kernel.name.endswith("_fixed")}
    clean = {kernel.name for kernel in CLEAN}
    assert {kernel.meta["klass"] for kernel in kernels()} == CLASSES
    assert len(faulty) >= 60
    assert len(clean) >= 60
    assert sum(kernel.name.endswith("_partly_fixed") for kernel in FAULTY) >= 3
    walls = {kernel.name + (f"@{kernel.variant}" if kernel.variant else ""): kernel.expected[0].wall for kernel in FAULTY}
    assert {name: walls[name] for name in REPORTS} == REPORTS


def test_names_and_arguments_are_complete() -> None:
    twice = [str(kernel) for kernel, count in Counter(map(str, kernels())).items() if count > 1]
    assert twice == []
    for kernel in kernels():
        assert set(kernel.meta["args"]) == set(kernel.params), f"{kernel}: args name other parameters"


def test_triton_compiles_every_kernel_to_ttir() -> None:
    result = compiled()
    assert result["failed"] == {}
    older_only = sum(kernel.meta.get("triton") == "<3.9" for kernel in kernels())
    assert result["compiled"] in (len(kernels()), len(kernels()) - older_only)
