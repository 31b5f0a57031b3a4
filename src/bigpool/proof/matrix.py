"""Which runs a case needs, and a scheduler that keeps a few of them going at a time."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bigpool.proof.arms import FAILS, Arm
from bigpool.proof.isolate import Exit, Session
from bigpool.proof.verdict import WHERE, Evidence, Run, Verdict, judge, run_of

FIXED_RUNS = (("top", "unmapped"), ("across", "unmapped"), ("top", "poison"))
BROKEN_RUNS = (("top", "unmapped"), ("top", "poison"))
GATE = ("bottom", "unmapped")

Job = dict[str, Any]
Flow = Generator[list[Job], list[Exit], None]


@dataclass(frozen=True, eq=False)
class Unit:
    """A case in one dtype. `case` is its description from the registry."""

    case: Mapping[str, Any]
    dtype: str


@dataclass
class Proof:
    """The runs of all cases, collected unit by unit, and their verdicts."""

    file: str | None
    device: str
    interpreted: bool
    fixed: Arm
    broken: Arm | None
    no_broken_arm: str
    on_verdict: Callable[[Verdict], None]
    runs: list[Run] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def flow(self, unit: Unit) -> Flow:
        """The jobs of one unit, batch by batch: the bottom first, since nothing else means anything without it."""
        runs: dict[str, Run] = {}
        folders: dict[str, Path] = {}
        first = self._job(unit, self.fixed, *GATE)
        self._collect(runs, folders, [first], (yield [first]))
        faults: list[str] = []
        unjudged: tuple[str, ...] = ()
        oracle, compared = "", {}
        if next(iter(runs.values())).outcome == "ok":
            oracle_job = first | {"kind": "oracle", "meaning": "the float64 answer"}
            batch = [self._job(unit, self.fixed, *run) for run in FIXED_RUNS if run[0] in unit.case["placements"]]
            if self.broken is not None:
                batch.append(self._job(unit, self.broken, *GATE))
            ended = yield [oracle_job, *batch]
            self._collect(runs, folders, batch, ended[1:])
            oracle = self._oracle(ended[0], faults)
            # After its bottom run: they mean nothing where that fails, and on a GPU they find their kernels compiled.
            if self.broken is not None and runs[f"{self.broken.name}/bottom/unmapped"].outcome == "ok":
                batch = [self._job(unit, self.broken, *run) for run in BROKEN_RUNS]
                self._collect(runs, folders, batch, (yield batch))
            compare = self._compare_job(unit, runs, folders, oracle)
            (answer,) = yield [compare]
            if answer.outcome == "done" and answer.result.get("outcome") == "ok":
                compared, unjudged = answer.result["runs"], tuple(answer.result["unjudged"])
            else:
                faults.append(f"comparison: {answer.result.get('detail') or answer.detail}")
            folders |= {"oracle": ended[0].folder, "compare": answer.folder}
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)
        self._conclude(unit, runs, compared, bool(oracle), unjudged, faults)

    def _job(self, unit: Unit, arm: Arm, placement: str, guard: str) -> Job:
        return make_job(unit, arm, placement, guard, file=self.file, device=self.device, interpreted=self.interpreted)

    def _collect(self, runs: dict[str, Run], folders: dict[str, Path], jobs: Sequence[Job], ended: Sequence[Exit]) -> None:
        for job, exit_ in zip(jobs, ended, strict=True):
            run = run_of(job, exit_)
            runs[run.key] = run
            folders[run.key] = exit_.folder
            self.runs.append(run)

    def _oracle(self, answer: Exit, faults: list[str]) -> str:
        """The oracle's file, or "" where the case has none or it failed."""
        if answer.outcome != "done" or answer.result["outcome"] != "ok":
            faults.append(f"oracle: {answer.result.get('detail') or answer.detail}")
            return ""
        return str(answer.folder / "oracle.pt") if answer.result["oracle"] else ""

    def _compare_job(self, unit: Unit, runs: Mapping[str, Run], folders: Mapping[str, Path], oracle: str) -> Job:
        paths = {key: str(folders[key] / "outputs.pt") for key, run in runs.items() if run.outcome in ("ok", "canary")}
        # Each run against the bottom run of its own arm: two compilations may differ in their last bits.
        references = {key: f"{runs[key].arm}/bottom/unmapped" for key in paths}
        known = {key: reference for key, reference in references.items() if reference in paths}
        paths = {key: paths[key] for key in known}
        return {"kind": "compare", "case": unit.case["name"], "runs": paths, "references": known, "oracle": oracle}

    def _conclude(
        self,
        unit: Unit,
        runs: Mapping[str, Run],
        compared: Mapping[str, Any],
        oracle: bool,
        unjudged: tuple[str, ...],
        faults: Sequence[str],
    ) -> None:
        verdict = judge(
            Evidence(
                case=unit.case["name"],
                dtype=unit.dtype,
                fixed=self.fixed.name,
                broken=self.broken.name if self.broken is not None else None,
                runs=runs,
                compared=compared,
                oracle=oracle,
                unjudged=unjudged,
                faults=tuple(faults),
                no_broken_arm=self.no_broken_arm,
            )
        )
        self.verdicts.append(verdict)
        self.on_verdict(verdict)


def make_job(unit: Unit, arm: Arm, placement: str, guard: str, *, file: str | None, device: str, interpreted: bool) -> Job:
    """One run of one case, for `Session.submit`."""
    return {
        "kind": "run",
        "file": file,
        "case": unit.case["name"],
        "case_module": unit.case["module"],
        "dtype": unit.dtype,
        "arm": arm.name,
        "arm_modules": {module: str(path) for module, path in arm.modules.items()},
        "cache": str(arm.cache),
        "placement": placement,
        "guard": guard,
        "device": device,
        "interpreted": interpreted,
        "meaning": meaning(arm, placement),
    }


def meaning(arm: Arm, placement: str) -> str:
    """What the death of the process would mean; printed before it can happen."""
    if arm.expect == FAILS and placement != "bottom":
        return "a killed process here is the expected pre-fix outcome, not a broken test"
    if placement == "bottom":
        return "a killed process here means that the kernel is wrong at any pool size"
    return "a killed process here refutes the kernel"


def label(job: Job) -> str:
    what = f"{job['arm']} {WHERE[job['placement']]} ({job['guard']})" if job["kind"] == "run" else job["kind"]
    return f"{job['case']}: {what}"


def drive(
    session: Session,
    flows: Sequence[Flow],
    *,
    jobs: int,
    timeout: float,
    on_start: Callable[[Job], None],
    on_end: Callable[[Job, Exit], None],
) -> None:
    """Run flows to their end with at most `jobs` processes at a time; earlier flows come first, so that memory is freed early."""
    waiting: deque[tuple[Flow, list[Job]]] = deque((flow, next(flow)) for flow in flows)
    ready: deque[tuple[Flow, int, Job]] = deque()
    running: dict[str, tuple[Flow, int, Job]] = {}
    answers: dict[Flow, dict[int, Exit]] = {}
    wanted: dict[Flow, int] = {}

    def enqueue(flow: Flow, batch: list[Job], *, urgent: bool) -> None:
        answers[flow], wanted[flow] = {}, len(batch)
        entries = [(flow, index, job) for index, job in enumerate(batch)]
        if urgent:
            ready.extendleft(reversed(entries))
        else:
            ready.extend(entries)

    while waiting:
        enqueue(*waiting.popleft(), urgent=False)
    while ready or running:
        while ready and len(running) < jobs:
            flow, index, job = ready.popleft()
            on_start(job)
            env = {"TRITON_CACHE_DIR": job["cache"]} if "cache" in job else {}
            frames = list(job.get("arm_modules", {}).values())
            running[session.submit(job, timeout=timeout, env=env, frames=frames)] = (flow, index, job)
        for ended in session.wait():
            flow, index, job = running.pop(ended.id)
            on_end(job, ended)
            answers[flow][index] = ended
            if len(answers[flow]) == wanted[flow]:
                ordered = [answer for _, answer in sorted(answers[flow].items())]
                try:
                    enqueue(flow, flow.send(ordered), urgent=True)
                except StopIteration:
                    del answers[flow], wanted[flow]
