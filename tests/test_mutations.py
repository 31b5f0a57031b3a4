"""Every widening in the kernels is needed: without it, alone, the proof turns red."""

from pathlib import Path

import pytest

from bigpool.proof.arms import kernel_modules
from bigpool.proof.isolate import Session
from bigpool.proof.narrow import list_widenings, narrow

# Small cases that between them take every index of the kernels past 2^31.
CASES = ("verify-page-one", "verify-ragged", "verify-far-rows", "verify-far-heads")
MUTANTS = [(module, index, widening) for module, path in kernel_modules().items()
           for index, widening in enumerate(list_widenings(path.read_text()))]  # fmt: skip


@pytest.fixture(scope="module")
def session():
    with Session(interpreted=True) as session:
        yield session


class Runner:
    """Runs a case of one arm in a process of its own."""

    def __init__(self, session: Session, arm: str, modules: dict[str, Path]) -> None:
        self.session = session
        self.arm = arm
        self.modules = {module: str(path) for module, path in modules.items()}

    def digests(self, case: str, placement: str) -> tuple[str, dict[str, str]]:
        """(outcome, digest of every output)."""
        job = {
            "kind": "run", "file": None, "case": case, "case_module": "bigpool.proof.cases.verify", "dtype": "float16",
            "arm": self.arm, "arm_modules": self.modules, "placement": placement, "guard": "unmapped", "device": "cpu",
            "interpreted": True, "meaning": "a killed process here is what the removed widening has to cause",
        }  # fmt: skip
        ended = self.session.run(job)
        outcome = ended.result.get("outcome", "") if ended.outcome == "done" else ended.outcome
        return outcome, ended.result.get("digests", {})


@pytest.fixture(scope="module")
def shipped(session):
    runner = Runner(session, "shipped", kernel_modules())
    results = {case: runner.digests(case, "bottom") for case in CASES}
    assert all(outcome == "ok" for outcome, _ in results.values()), results
    assert {case: runner.digests(case, "top") for case in CASES} == results, "the shipped kernels are right at the top"
    return results


def test_there_are_widenings():
    assert len(MUTANTS) >= 6


@pytest.mark.parametrize(
    ("module", "index", "widening"),
    MUTANTS,
    ids=[f"{module.rpartition('.')[2]}:{widening.line}" for module, _, widening in MUTANTS],
)
def test_proof_is_red_without_one_widening(session, shipped, tmp_path, module, index, widening):
    path = kernel_modules()[module]
    mutant = tmp_path / path.name
    mutant.write_text(narrow(path.read_text(), only=index))
    assert len(list_widenings(mutant.read_text())) == len(list_widenings(path.read_text())) - 1
    runner = Runner(session, f"{path.stem}-{index}", kernel_modules() | {module: mutant})
    assert {case: runner.digests(case, "bottom") for case in CASES} == shipped, "right at the bottom: only the placement may kill"
    red = [case for case in CASES if runner.digests(case, "top") != shipped[case]]
    assert red, f"{path.name}:{widening.line}: no case sees that {widening.text} is gone"
