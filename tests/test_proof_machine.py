"""Which backend is used, what is refused, and what a run on each leaves unproven."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'bigpool[cpu]'")

from bigpool.errors import BackendError, ProofError, UnsupportedPlatformError  # noqa: E402
from bigpool.proof import runner, worker  # noqa: E402
from bigpool.proof.case import DesignedSkip  # noqa: E402
from bigpool.proof.matrix import Unit, meaning  # noqa: E402
from bigpool.proof.record import not_exercised  # noqa: E402
from bigpool.proof.verdict import Run, Verdict  # noqa: E402
from bigpool.proof.worker import require_working_interpreter  # noqa: E402

HERE = "test_proof_machine.py"
GPU = {"name": "NVIDIA H200", "sm": 90, "memory_bytes": 1, "driver": "575.1"}
VERSIONS = {"triton": "3.9.0", "torch": "2.13.0+cpu"}


class FakeSession:
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[runner.Machine]:
    """The machines that were opened; torch sees no GPU, though its driver is there."""
    machines: list[runner.Machine] = []

    def probed(stack: ExitStack, interpreted: bool, notes: list[str]) -> runner.Machine:
        probe = {"gpu": None, "no_gpu": "torch 2.13.0+cpu sees no CUDA device", "versions": VERSIONS}
        machines.append(runner.Machine(FakeSession(), interpreted, probe, notes))  # type: ignore[arg-type]
        return machines[-1]

    monkeypatch.setattr(runner, "_probed", probed)
    monkeypatch.setattr(runner, "_driver_is_there", lambda: True)
    return machines


def test_auto_falls_back_to_the_interpreter_and_says_why(opened: list[runner.Machine]) -> None:
    with ExitStack() as stack:
        machine = runner.open_machine(stack, "auto")
    assert [(one.interpreted, one.session.closed) for one in opened] == [(False, True), (True, False)]  # type: ignore[attr-defined]
    assert (machine.device, machine.notes) == ("cpu", ["the interpreter was used, since torch 2.13.0+cpu sees no CUDA device"])


def test_without_a_driver_no_gpu_is_looked_for(opened: list[runner.Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_driver_is_there", lambda: False)
    with ExitStack() as stack:
        assert runner.open_machine(stack, "auto").interpreted
    assert len(opened) == 1


def test_another_platform_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.sys, "platform", "darwin")
    with ExitStack() as stack, pytest.raises(UnsupportedPlatformError) as caught:
        runner.open_machine(stack, "auto")
    assert str(caught.value) == (
        "bigpool prove: expected Linux (sparse pools and a fork server), got 'darwin'; "
        "run in a Linux container or virtual machine"
    )


@pytest.mark.usefixtures("opened")
def test_cuda_without_a_device_is_an_error() -> None:
    with ExitStack() as stack, pytest.raises(BackendError) as caught:
        runner.open_machine(stack, "cuda")
    assert str(caught.value) == (
        "--device: expected a CUDA device for cuda, got none: torch 2.13.0+cpu sees no CUDA device; use --device cpu"
    )


def test_the_interpreter_that_numpy_breaks_is_refused() -> None:
    for fine in (("3.6.0", "2.3.5"), ("3.7.0", "2.4.0"), ("3.10.0", "2.5.1"), ("3.6.0+git1", "1.26.4")):
        require_working_interpreter(*fine)
    with pytest.raises(BackendError) as caught:
        require_working_interpreter("3.6.0", "2.4.1")
    assert str(caught.value) == (
        "backend: expected numpy < 2.4 for the interpreter of triton 3.6.0, got numpy 2.4.1; "
        "pip install 'numpy<2.4', or 'triton>=3.7'"
    )


KERNEL = (lambda: None).__code__
WILD = "Triton Error [CUDA]: an illegal memory access was encountered"


@pytest.mark.parametrize(
    ("error", "last", "answer"),
    [
        (RuntimeError(WILD), KERNEL, ("killed", "CUDA illegal access in <lambda>", f"{HERE}:{KERNEL.co_firstlineno}")),
        (RuntimeError("CUDA error: misaligned address"), None, ("killed", "CUDA misaligned address", f"{HERE}:RAISED")),
        (RuntimeError("out of resources"), KERNEL, ("error", "RuntimeError: out of resources", f"{HERE}:RAISED")),
        (ProofError("no"), None, ("unable", "no", f"{HERE}:RAISED")),
        (MemoryError(), None, ("unable", "MemoryError: ", f"{HERE}:RAISED")),
        (DesignedSkip("no fp8"), None, ("skip", "no fp8", None)),
    ],
)
def test_how_a_child_answers_an_exception(
    error: Exception, last: Any, answer: tuple[str, str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.LAUNCHED, "last", last)

    def work(job: Any) -> dict[str, Any]:
        raise error

    given = worker._guarded(work, {"file": __file__})
    raised = str(work.__code__.co_firstlineno + 1)
    assert (given["outcome"], given["detail"]) == answer[:2]
    assert given.get("where") == (None if answer[2] is None else answer[2].replace("RAISED", raised))


def described(name: str, *dtypes: str) -> dict[str, Any]:
    return {"name": name, "dtypes": list(dtypes), "fast": True, "placements": ["bottom", "top"]}


def test_what_was_not_exercised_on_a_gpu() -> None:
    big, small, other = described("big", "bfloat16", "float16"), described("small", "bfloat16"), described("other", "bfloat16")
    machine = runner.Machine(FakeSession(), False, {"gpu": GPU, "versions": VERSIONS})  # type: ignore[arg-type]
    units = [Unit(big, "bfloat16"), Unit(small, "bfloat16")]
    verdicts = [
        Verdict("big", "bfloat16", "proven", oracle=False),
        Verdict("small", "bfloat16", "skipped", ("fp8 conversion needs sm89+, this is sm86",)),
    ]
    near = Run("big", "bfloat16", "shipped", "top", "unmapped", "ok", tensors=[{"role": "read", "max_offset": 2**32 - 1}])
    proof: Any = SimpleNamespace(verdicts=verdicts, runs=[near], fixed=SimpleNamespace(name="shipped"))
    big["not_exercised"] = ["far lengths"]
    assert not_exercised([big, small, other], units, proof, machine, ["k.py:3"]) == [
        "cards other than NVIDIA H200 (sm90)",
        "CUDA graph capture and replay, several streams, several devices",
        "far lengths",
        "indices that wrap at 2^32 elements (uint32): nothing lies that far in big",
        "case small: skipped: fp8 conversion needs sm89+, this is sm86",
        "cases that were not asked for: other",
        "float16: big",
        "the values themselves, without an oracle only the placements are compared: big",
    ]


def test_what_a_death_would_mean_depends_on_the_arm_and_the_placement() -> None:
    fixed, broken = (runner.Arm("arm", expect, "", {}, None) for expect in ("holds", "fails"))  # type: ignore[arg-type]
    assert meaning(broken, "top") == "a killed process here is the expected pre-fix outcome, not a broken test"
    assert meaning(fixed, "top") == meaning(fixed, "across") == "a killed process here refutes the kernel"
    assert (
        meaning(broken, "bottom")
        == meaning(fixed, "bottom")
        == "a killed process here means that the kernel is wrong at any pool size"
    )
