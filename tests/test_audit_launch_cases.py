"""The launch front end on the development set: rules, lines and walls, and against the frontend's own overflow checks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from audit_cases._format import Kernel, kernels
from audit_cases._judge import complaints
from audit_compiled import compiled
from bigpool.audit.facts import holds
from bigpool.audit.launch.audit import audit_ttir
from bigpool.audit.launch.compile import argument_names
from bigpool.audit.launch.lift import Lift
from bigpool.audit.launch.ttir import Module
from bigpool.audit.launch.values import Given

KERNELS = list(kernels())
FAULTY = [kernel for kernel in KERNELS if kernel.expected]
CLEAN = [kernel for kernel in KERNELS if not kernel.expected]
# The frontend checks an operation, not its use. These wrap where it does not matter.
MAY_WRAP = {"4": "reaches no address", "5": "only on lanes that are masked off", "7": "cancels before it is used"}
SECONDS_PER_KERNEL = 1.5


def given(kernel: Kernel) -> Given:
    values = {
        name: value for name, value in kernel.meta["args"].items() if isinstance(value, int) and name not in kernel.constexprs
    }
    return Given(
        values,
        {name: (low, high) for name, (low, high) in kernel.meta.get("ranges", {}).items()},
        tuple(kernel.meta["grid"]),
        kernel.meta.get("backend", "cuda"),
        names=argument_names(compiled()["made"][str(kernel)]["types"]),
    )


def text_of(kernel: Kernel, kind: str = "text") -> str:
    made = compiled()["made"].get(str(kernel))
    if made is None:
        assert kernel.meta.get("triton") == "<3.9"
        pytest.skip(f"needs tl.make_block_ptr, which Triton {compiled()['triton']} does not have")
    text: str = made[kind]
    return text


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_every_fault_is_found_at_its_wall_and_nothing_else_is(kernel: Kernel) -> None:
    text = text_of(kernel)
    start = time.perf_counter()
    report = audit_ttir(text, given(kernel), name=kernel.name)
    assert time.perf_counter() - start < SECONDS_PER_KERNEL
    assert report.skipped_kernels == []
    assert complaints(kernel, report.findings) == []


def can_fail(kernel: Kernel) -> set[int]:
    """Lines of the kernel's file on which a check of the frontend can fail within the bounds of META.

    A check widens both operands, applies the operation in 64 bits and compares with the ends of int32. It looks at operations,
    not at their use, and knows no masks.
    """
    lifted = Lift(Module(text_of(kernel, "asserts")), given(kernel), lambda file: "/triton/" in file)
    lines = set()
    for condition, span in lifted.asserted:
        for fact in holds(condition):
            low, high = lifted.ranges.of(fact.left)
            if fact.right.op == "const" and not -(2**31) <= low <= high < 2**31:
                callers = lifted.callers.get(condition.uid, ())
                lines |= {at.line for at in (span, *callers) if Path(at.file).resolve() == kernel.file.resolve()}
    return lines


@pytest.mark.parametrize("kernel", FAULTY, ids=str)
def test_every_fault_is_one_that_the_frontend_would_catch(kernel: Kernel) -> None:
    if kernel.meta.get("debug_asserts") is False:
        pytest.skip("the frontend does not check casts, shifts and bytes")
    assert {expectation.line for expectation in kernel.expected} <= can_fail(kernel)


@pytest.mark.parametrize("kernel", CLEAN, ids=str)
def test_nothing_that_the_frontend_would_catch_is_called_safe(kernel: Kernel) -> None:
    if kernel.meta["klass"] in MAY_WRAP:
        pytest.skip(MAY_WRAP[kernel.meta["klass"]])
    assert can_fail(kernel) == set()
