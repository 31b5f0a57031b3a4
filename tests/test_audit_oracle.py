"""The development set against the interpreter: each fault accesses other elements at its wall, and none below; no twin does."""

from __future__ import annotations

import re

import pytest
from triton.runtime.interpreter import InterpretedFunction

from audit_cases import a_page_ids
from audit_cases._format import Kernel, kernels
from audit_oracle import Unmodelled, program_names, trace

pytestmark = pytest.mark.skipif(
    not isinstance(a_page_ids.page_gather, InterpretedFunction), reason="needs the interpreter, which is off where there is a GPU"
)
BY_NAME = {(kernel.name, kernel.variant): kernel for kernel in kernels()}
# What META's symbols are besides program ids and arguments: loaded values.
LOADED = {"page", "slot", "state", "dst", "start", "row", "pair", "token", "base", "expert", "length"}
NOT_MODELLED = {
    "e_experts.expert_by_scan": "the expert is counted, not loaded",
    "e_experts.expert_found_by_search": "the expert is a loop variable",
    "e_experts.expert_found_by_search_fixed": "the interpreter's loop variables are Python ints",
    "c_program_ids.persistent_rows": "the row is a loop variable",
    "c_program_ids.persistent_rows_fixed": "the row is a loop variable",
    "d_flat_numel.strided_flat": "the wall is that of an intermediate value",
    "d_flat_numel.strided_flat_fixed": "the interpreter's loop variables are Python ints",
    "h_strides.column_major_fixed": "the interpreter's loop variables are Python ints",
    "f_chained.growing_offset": "the wall is a number of turns",
    "f_chained.growing_offset_fixed": "the wall is a number of turns",
    "f_chained.chunk_state": "the chunk is a loop variable",
    "h_strides.column_major": "the column is a loop variable",
    "k_pointer_type.poi_copy_generated": "the wall is that of an intermediate value",
    "n_bounded.wrapped_many_rows": "the wall is that of an intermediate value",
    "c_program_ids.swizzled_matmul": "the wall is that of an intermediate value",
    "e_experts.expert_by_scan_fixed": "the expert is counted, not loaded",
}


def first_wall(kernel: Kernel) -> tuple[str, int] | None:
    """Symbol and first bad value of a kernel, or of the kernel that it is the fix of."""
    original = kernel if kernel.expected else BY_NAME.get((re.sub(r"(_partly)?_fixed$", "", kernel.name), kernel.variant))
    if original is None or not original.expected:
        return None
    proofs = original.meta["walls"]
    pairs = [
        (proof[0], proof[3] if len(proof) > 3 else expected.wall)
        for expected, proof in zip(original.expected, proofs, strict=True)
    ]
    symbol, wall = min(pairs, key=lambda pair: pair[1] or 0)
    return (symbol, wall) if wall else None


def modelled(kernel: Kernel) -> None:
    if str(kernel) in NOT_MODELLED:
        pytest.skip(NOT_MODELLED[str(kernel)])
    if kernel.meta["klass"] in ("1", "4"):
        pytest.skip("descriptors and hashes are not modelled")
    if kernel.meta.get("backend") == "hip":
        pytest.skip("the interpreter has no byte offsets")


def same(kernel: Kernel, symbol: str, value: int) -> bool:
    try:
        return all(
            trace(kernel, symbol, value, wide=False, last=last) == trace(kernel, symbol, value, wide=True, last=last)
            for last in (True, False)
        )
    except Unmodelled as what:
        pytest.skip(f"the oracle does not model {what}")


@pytest.mark.parametrize("kernel", [kernel for kernel in kernels() if kernel.expected], ids=str)
def test_a_fault_shows_at_its_wall_and_not_below(kernel: Kernel) -> None:
    modelled(kernel)
    if kernel.meta["klass"] == "G" and kernel.meta["args"].get("slots_ptr") == "*i64":
        pytest.skip("a narrowing narrows in both runs")
    wall = first_wall(kernel)
    assert wall is not None
    symbol, value = wall
    assert symbol in LOADED or symbol in {"pid", *program_names(kernel), *kernel.params}
    assert same(kernel, symbol, value - 1)
    assert not same(kernel, symbol, value)


@pytest.mark.parametrize("kernel", [kernel for kernel in kernels() if not kernel.expected], ids=str)
def test_a_clean_kernel_accesses_what_it_would_in_64_bits(kernel: Kernel) -> None:
    modelled(kernel)
    wall = first_wall(kernel)
    if wall is None:
        assert same(kernel, "", 0)
        return
    symbol, value = wall
    for point in (value, value + 12345):
        assert same(kernel, symbol, point)
