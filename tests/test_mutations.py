"""Every widening in the kernels is needed: without it, alone, the proof turns red. BIGPOOL_MUTANTS=all: also in prefill."""

import os

import pytest

from bigpool.errors import ProofError
from bigpool.proof.arms import kernel_modules
from bigpool.proof.mutants import _usable, survey
from bigpool.proof.narrow import list_widenings
from bigpool.proof.runner import Options
from bigpool.proof.verdict import Run

# Files -> small cases that between them take every index of these files past 2^31.
CASES = {
    ("_paging", "verify"): ("verify-page-one", "verify-ragged", "verify-far-rows", "verify-far-heads"),
    ("prefill", "_ragged"): ("prefill-ragged", "prefill-far-rows", "prefill-far-heads", "prefill-far-context"),
    ("prefill_keys", "prefill_values"): ("prefill-kept", "prefill-far-rows", "prefill-far-heads", "prefill-far-context"),
    ("cache",): ("write-kv-plain", "write-kv-far-heads"),
    ("merge",): ("merge-far-tokens", "merge-far-heads"),
}
# What Triton's interpreter does not run; tests/test_sm90_far.py has those of Hopper.
ELSEWHERE = {"rotate"}


def widenings():
    return {module: list_widenings(path.read_text()) for module, path in kernel_modules().items()}


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(
            files,
            marks=pytest.mark.skipif(
                "prefill" in files[0] and os.environ.get("BIGPOOL_MUTANTS") != "all", reason="takes a minute: make nightly"
            ),
        )
        for files in CASES
    ],
    ids="-".join,
)
def test_proof_is_red_without_any_one_widening(files):
    modules = [f"bigpool.kernels.{file}" for file in files]
    mutants = survey(Options(cases=CASES[files], device="cpu"), modules=modules)
    found = [(module, *place) for module in sorted(modules) for place in widenings()[module]]
    assert [(mutant.module, mutant.line, mutant.col, mutant.text) for mutant in mutants] == found
    assert mutants
    unseen = [f"{mutant.module}:{mutant.line} {mutant.text}" for mutant in mutants if not mutant.seen_by]
    assert not unseen, f"no case sees that these are gone: {unseen}"


def test_no_file_with_widenings_is_left_out():
    files = {module.rpartition(".")[2] for module, places in widenings().items() if places and not module.endswith("sm90")}
    assert files == {file for group in CASES for file in group} | ELSEWHERE


@pytest.mark.parametrize("found", [{"outcome": "killed"}, {"outcome": "ok", "nan": {"out": 3, "lse": 0}}], ids=["killed", "nan"])
def test_a_case_that_does_not_hold_unmutated_is_refused(found):
    run = Run("far", "float16", "shipped", "bottom", "unmapped", **found)
    said = "killed" if found["outcome"] == "killed" else "NaN in out"
    with pytest.raises(
        ProofError, match=f"expected cases that hold unmutated, got far: shipped at the bottom .unmapped.: {said}"
    ):
        _usable([], {("far", "float16"): run})
