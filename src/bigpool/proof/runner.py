"""A whole proof: find the cases, choose arms and dtypes, run, and put down what happened as a record."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bigpool.errors import BackendError, ProofError, UnsupportedPlatformError
from bigpool.proof import record
from bigpool.proof.arms import FAILS, HOLDS, Arm, ArmStore, kernel_modules
from bigpool.proof.case import WRONG_IN_INTERPRETER
from bigpool.proof.isolate import Exit, Session
from bigpool.proof.matrix import BROKEN_RUNS, FIXED_RUNS, Job, Proof, Unit, drive
from bigpool.proof.registry import check_file
from bigpool.proof.verdict import Run, Verdict, run_of, summary

# On the CPU a big case needs up to 0.5 GiB and a whole proof is to stay below 2 GiB; on a GPU a context alone takes that much
# of the card.
MAX_JOBS_CPU, MAX_JOBS_GPU = 3, 8


@dataclass(frozen=True)
class Options:
    """What `bigpool prove` was asked for. `cases` empty: all, or the fast subset without a GPU."""

    file: str | None = None
    cases: tuple[str, ...] = ()
    device: str = "auto"
    everything: bool = False
    before: str | None = None
    after: str | None = None
    jobs: int | None = None
    timeout: float = 300.0
    command: tuple[str, ...] = ()


class Listener(Protocol):
    """Is told as things happen. `on_plan` comes once, with the number of runs and a line on how they are made."""

    def on_plan(self, runs: int, text: str) -> None: ...

    def on_start(self, job: Job) -> None: ...

    def on_run(self, run: Run) -> None: ...

    def on_verdict(self, verdict: Verdict) -> None: ...


@dataclass
class Machine:
    """An open session on the chosen backend, and what the probe said."""

    session: Session
    interpreted: bool
    probe: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def device(self) -> str:
        return "cpu" if self.interpreted else "cuda"


def open_machine(stack: ExitStack, device: str) -> Machine:
    """A session on the GPU if there is one that torch can use (or `device` insists), else on Triton's interpreter."""
    notes: list[str] = []
    if sys.platform != "linux":
        raise UnsupportedPlatformError(
            f"bigpool prove: expected Linux (sparse pools and a fork server), got {sys.platform!r}; "
            "run in a Linux container or virtual machine"
        )
    if device == "cuda" or (device == "auto" and _driver_is_there()):
        machine = _probed(stack, False, notes)
        if machine.probe["gpu"] is not None:
            return machine
        if device == "cuda":
            raise BackendError(
                f"--device: expected a CUDA device for cuda, got none: {machine.probe['no_gpu']}; use --device cpu"
            )
        notes.append(f"the interpreter was used, since {machine.probe['no_gpu']}")
        machine.session.close()
    return _probed(stack, True, notes)


def _driver_is_there() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _probed(stack: ExitStack, interpreted: bool, notes: list[str]) -> Machine:
    session = stack.enter_context(Session(interpreted=interpreted))
    answer = session.run({"kind": "probe", "interpreted": interpreted}, timeout=120.0)
    return Machine(session, interpreted, _answer(answer), notes)


def _answer(ended: Exit, file: str | None = None) -> Mapping[str, Any]:
    """The result of a job that has to succeed for anything to be proven. `file`: what anybody's code came from."""
    detail = ended.result.get("detail") or ended.detail
    if ended.outcome != "done" or ended.result["outcome"] != "ok":
        ours = ended.outcome == "done" and ended.result["outcome"] == "unable"
        place = "" if ours else ended.result.get("where") or ended.where
        blame = f"FILE: expected a case file that can be imported, got {Path(file).name}: " if file and not ours else ""
        raise ProofError(f"{blame}{detail}{f' at {place}' if place else ''}")
    return ended.result


def list_cases(options: Options) -> list[dict[str, Any]]:
    """Descriptions of all cases there are, of the package or in the user's file."""
    with ExitStack() as stack:
        session = stack.enter_context(Session(interpreted=True))
        return list(discovered(session, options.file)["cases"])


def discovered(session: Session, file: str | None) -> Mapping[str, Any]:
    check_case_file(file)
    return _answer(session.run({"kind": "discover", "file": resolved(file)}, timeout=120.0), file)


def check_case_file(file: str | None) -> None:
    """Raise ProofError where a name can be known not to be a case file's."""
    if file is None:
        return
    if not Path(file).exists():
        raise ProofError(f"FILE: expected a case file, got {file}, which does not exist")
    check_file("FILE", Path(file))


def prove(options: Options, listener: Listener) -> dict[str, Any]:
    """Run everything and return the record (schema bigpool-proof/1)."""
    began = time.time()
    with ExitStack() as stack:
        machine = open_machine(stack, options.device)
        found = discovered(machine.session, options.file)
        units = choose(found["cases"], options, machine.interpreted)
        fixed, broken, why_none = choose_arms(ArmStore(machine.session.folder), found["kernels"], options)
        jobs = options.jobs or default_jobs(machine)
        proof = Proof(resolved(options.file), machine.device, machine.interpreted, fixed, broken, why_none, listener.on_verdict)
        listener.on_plan(count_runs(units, broken), plan_text(machine, units, jobs))
        peaks: list[int] = []

        def on_end(job: Job, ended: Exit) -> None:
            peaks.append(ended.rss_mib)
            if job["kind"] == "run":
                listener.on_run(run_of(job, ended))

        drive(
            machine.session,
            [proof.flow(unit) for unit in units],
            jobs=jobs,
            timeout=options.timeout,
            on_start=listener.on_start,
            on_end=on_end,
        )
        arms = [arm.describe() for arm in (fixed, broken) if arm is not None]
        loops = fixed.loops()
    # Cases end in any order; a record is to be compared with the last one.
    order = {(unit.case["name"], unit.dtype): index for index, unit in enumerate(units)}
    proof.verdicts.sort(key=lambda verdict: order[verdict.case, verdict.dtype])
    proof.runs.sort(key=lambda run: order[run.case, run.dtype])
    line, status = summary(proof.verdicts)
    return record.build(
        options=options,
        machine=machine,
        jobs=jobs,
        seconds=time.time() - began,
        peak_rss_mib=max(peaks, default=0),
        arms=arms,
        loops=loops,
        found=found["cases"],
        units=units,
        proof=proof,
        summary=line,
        status=status,
    )


def choose(found: Sequence[Mapping[str, Any]], options: Options, interpreted: bool) -> list[Unit]:
    """The cases and dtypes that are run. A case named with --case is run whether it is fast or not."""
    known = [case["name"] for case in found]
    unknown = [name for name in options.cases if name not in known]
    if unknown:
        raise ProofError(f"--case: expected one of {', '.join(sorted(known))}, got {', '.join(unknown)}")
    units = []
    for case in found:
        wanted = case["name"] in options.cases if options.cases else case["fast"] or options.everything or not interpreted
        if wanted:
            units += [Unit(case, dtype) for dtype in dtypes_of(case, options.everything, interpreted)]
    if not units:
        raise ProofError("no case is in the fast subset; use --all, or --case NAME")
    return units


def dtypes_of(case: Mapping[str, Any], everything: bool, interpreted: bool) -> list[str]:
    """What the backend computes right; if that is nothing, the first one, whose run will say why it was skipped."""
    dtypes = list(case["dtypes"])
    usable = [dtype for dtype in dtypes if not interpreted or dtype not in WRONG_IN_INTERPRETER] or dtypes[:1]
    return usable if everything else usable[:1]


def resolved(file: str | None) -> str | None:
    return str(Path(file).resolve()) if file is not None else None


def kernel_files(kernels: Mapping[str, str]) -> dict[str, Path]:
    """The files of the user's kernels, or of this package's where the case file names none."""
    return {module: Path(path) for module, path in kernels.items()} or kernel_modules()


def base_arm(store: ArmStore, kernels: Mapping[str, str]) -> Arm:
    """The kernels as they are."""
    return store.shipped(kernel_files(kernels), "the current files" if kernels else "the installed files")


def choose_arms(store: ArmStore, kernels: Mapping[str, str], options: Options) -> tuple[Arm, Arm | None, str]:
    """(the arm that must hold, the one that must fail, why there is none of those)."""
    if options.before is not None or options.after is not None:
        modules = kernel_files(kernels)
        fixed = store.given("after", HOLDS, options.after, modules)
        return fixed, store.given("before", FAILS, options.before, modules), ""
    fixed = base_arm(store, kernels)
    broken = store.narrowed(fixed)
    files = ", ".join(path.name for path in fixed.modules.values())
    why = (
        f"{files} widens nothing to 64 bits, so there is no 32-bit arm that could fail; "
        "name one with --before FILE or --before git:REV"
    )
    return fixed, broken, "" if broken is not None else why


def default_jobs(machine: Machine) -> int:
    return max(1, min(len(os.sched_getaffinity(0)), MAX_JOBS_CPU if machine.interpreted else MAX_JOBS_GPU))


def count_runs(units: Sequence[Unit], broken: Arm | None) -> int:
    """How many runs there will be if every bottom run holds."""
    fixed = sum(1 + sum(placement in unit.case["placements"] for placement, _ in FIXED_RUNS) for unit in units)
    return fixed + (len(units) * (1 + len(BROKEN_RUNS)) if broken is not None else 0)


def plan_text(machine: Machine, units: Sequence[Unit], jobs: int) -> str:
    where = "Triton's interpreter on the CPU" if machine.interpreted else str(machine.probe["gpu"]["name"])
    versions = machine.probe["versions"]
    cases = "case" if len(units) == 1 else "cases"
    made_with = f"triton {versions['triton']}, torch {versions['torch']}"
    return f"{len(units)} {cases} on {where}, {made_with}, {jobs} at a time on {os.cpu_count()} cores"
