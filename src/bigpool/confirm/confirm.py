"""Confirms findings: plans the reproduction, makes its launches in processes of their own, and judges them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from bigpool.audit.finding import Finding, Severity
from bigpool.audit.run import Report
from bigpool.confirm.outcome import COULD_NOT, Confirmation, Run, judge, one_file
from bigpool.confirm.plan import PLACES, Plan
from bigpool.confirm.record import Recorder, Snapshot
from bigpool.proof.isolate import PRELOAD, Exit, Session

SECONDS = 300.0
MAX_ABREAST = 8
# Launches of one kernel that are tried for a finding.
MAX_LAUNCHES = 3
GUARDS = ("unmapped", "mapped")
Say = Callable[[str], None]


def quiet(text: str) -> None:
    """Says nothing."""


@dataclass
class Reproduction:
    """A plan and the launch that it is of, as files that children read."""

    snapshot: Snapshot
    plan: Plan
    snapshot_file: Path
    plan_file: Path
    reference: Path


@dataclass
class Confirmer:
    """A context manager around the processes and files of a confirmation; leaves neither behind."""

    device: str = "cpu"
    say: Say = quiet
    reproductions: dict[str, Reproduction] = field(default_factory=dict)
    _plans: dict[tuple[int, int], tuple[Path, Path, Exit]] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)
    _serial: int = 0

    def __enter__(self) -> Confirmer:
        preload = (*PRELOAD, "bigpool.confirm.child")
        try:
            self.host = self.session = self._stack.enter_context(Session(interpreted=True, preload=preload))
            if self.device != "cpu":
                self.session = self._stack.enter_context(Session(interpreted=False, preload=preload))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def confirm(self, report: Report, found: Recorder) -> list[Confirmation]:
        """One for each finding that is no note."""
        faults = [finding for finding in report.findings if finding.severity is not Severity.NOTE]
        launches = [self._launches(finding, found) for finding in faults]
        self._plan([(finding, snapshots[0]) for finding, snapshots in zip(faults, launches, strict=True) if snapshots])
        made = []
        for at, (finding, snapshots) in enumerate(zip(faults, launches, strict=True), 1):
            span = finding.primary.span
            self.say(f"confirming {at} of {len(faults)}: {finding.rule} at {Path(span.file).name}:{span.line}")
            made.append(self.one(report.fingerprint(finding), finding, snapshots))
        return made

    def _launches(self, finding: Finding, found: Recorder) -> list[Snapshot]:
        launches = [launch for launch in found.launches.values() if launch.name == finding.kernel]
        return [snapshot for launch in launches if (snapshot := found.of(launch)) is not None][:MAX_LAUNCHES]

    def one(self, id: str, finding: Finding, snapshots: Sequence[Snapshot]) -> Confirmation:
        """What becomes of a finding on the first launch on which it can be reproduced."""
        said: list[str] = []
        for snapshot in snapshots:
            made = self._of_launch(id, finding, snapshot)
            if made.outcome != COULD_NOT:
                return made
            said.append(made.text)
            last = made
        if not said:
            return self._unable(id, f"no launch of {finding.kernel or 'a kernel'} was captured")
        return last

    def _unable(self, id: str, text: str) -> Confirmation:
        return Confirmation(id, COULD_NOT, text, device=self.device_name())

    def device_name(self) -> str:
        return "interpreter" if self.device == "cpu" else torch.cuda.get_device_name()

    def _of_launch(self, id: str, finding: Finding, snapshot: Snapshot) -> Confirmation:
        if snapshot.missing:
            return self._unable(id, snapshot.missing)
        if finding.wall is None:
            return self._unable(id, "the finding has no wall: it is about a type or a comment, not about a size")
        if self._key(finding, snapshot) not in self._plans:
            self._plan([(finding, snapshot)])
        snapshot_file, plan_file, ended = self._plans[self._key(finding, snapshot)]
        if ended.outcome != "done" or ended.result["outcome"] != "ok":
            return self._unable(id, ended.result.get("detail") or f"the plan ended by {ended.detail}")
        with plan_file.open("rb") as file:
            plan: Plan = pickle.load(file)
        made = Confirmation(id, "", "", plan.knob.variable, plan.below, plan.at, plan.top, plan.along, self.device_name())
        made.runs, reference = self.runs(snapshot_file, plan_file, snapshot, PLACES)
        if any(run.place == "below" and run.outcome not in ("same bits", "unable") for run in made.runs):
            # Another fault comes first: what does this one do where every other operation has 64 bits?
            self.session, usual = self.host, self.session
            self.device, device = "cpu", self.device
            again, _ = self.runs(snapshot_file, plan_file, snapshot, PLACES, alone=True)
            self.session, self.device = usual, device
            made.shadowed = next(run.text for run in made.runs if not run.good)
            made.runs, made.device = again, "interpreter"
        if reference is not None:
            self.reproductions[id] = Reproduction(snapshot, plan, snapshot_file, plan_file, reference)
        wall = finding.wall.base or (finding.wall.variable, finding.wall.value)
        return judge(made, wall[1] if wall[0] == plan.knob.variable else None)

    @staticmethod
    def _key(finding: Finding, snapshot: Snapshot) -> tuple[int, int]:
        return id(finding), id(snapshot)

    def _plan(self, wanted: Sequence[tuple[Finding, Snapshot]]) -> None:
        """Plans reproductions side by side, those that can be planned at all."""
        jobs, files = [], []
        chosen = [(finding, snapshot) for finding, snapshot in wanted if finding.wall is not None and not snapshot.missing]
        for finding, snapshot in chosen:
            assert finding.wall is not None
            snapshot_file = self._file("snapshot", snapshot)
            plan_file = snapshot_file.with_name(f"plan-{self._serial}")
            files.append((snapshot_file, plan_file))
            span = finding.primary.span
            jobs.append(
                {
                    "task": "plan",
                    "device": self.device,
                    "snapshot": str(snapshot_file),
                    "plan": str(plan_file),
                    "span": (str(Path(span.file).resolve()), span.line, span.col, span.end_col),
                    "last_line": span.end_line,
                    "variable": finding.wall.base[0] if finding.wall.base else finding.wall.variable,
                }
            )
        if len(jobs) > 1:
            self.say(f"planning {len(jobs)} reproductions")
        for (finding, snapshot), pair, ended in zip(chosen, files, self._wait(self.host, jobs), strict=True):
            self._plans[self._key(finding, snapshot)] = (*pair, ended)

    def runs(
        self,
        snapshot_file: Path,
        plan_file: Path,
        snapshot: Snapshot,
        places: Sequence[str],
        edits: Mapping[str, bytes] | None = None,
        reference: Path | None = None,
        alone: bool = False,
    ) -> tuple[list[Run], Path | None]:
        """Launches at each place under each guard, compared with the first, or with `reference`; and the file of that."""
        edits_file = str(self._file("edits", dict(edits))) if edits else ""
        with plan_file.open("rb") as file:
            settings = {name: place.setting for name, place in pickle.load(file).places.items()}
        jobs = [
            {
                "task": "run",
                "snapshot": str(snapshot_file),
                "plan": str(plan_file),
                "place": place,
                "guard": guard,
                "device": self.device,
                "edits": edits_file,
                "alone": alone,
                # Where programs count from is compiled in, and no key of Triton's cache.
                "counted": "-".join(map(str, (*settings[place].first, *settings[place].programs))),
            }
            for place in places
            for guard in GUARDS
        ]
        exits = self._wait(self.session, jobs, (snapshot.file, *(edits or {})))
        if reference is None and exits[0].outcome == "done" and (exits[0].folder / "outputs.pt").exists():
            reference = exits[0].folder / "outputs.pt"
        made = [_run(job, one, reference, snapshot) for job, one in zip(jobs, exits, strict=True)]
        return made, reference

    def price(self, made: Reproduction, edits: Mapping[str, bytes], repeats: int) -> dict[str, Any]:
        """The result of the pricing child: "verdict", or why there is none in "detail"."""
        job = {
            "task": "price",
            "snapshot": str(made.snapshot_file),
            "edits": str(self._file("edits", dict(edits))),
            "device": self.device,
            "repeats": repeats,
        }
        ended = self._wait(self.session, [job])[0]
        return ended.result if ended.outcome == "done" else {"outcome": "unable", "detail": ended.detail}

    def _file(self, kind: str, value: Any) -> Path:
        self._serial += 1
        target = self.host.folder / f"{kind}-{self._serial}"
        with target.open("wb") as file:
            pickle.dump(value, file)
        return target

    def _wait(self, session: Session, jobs: Sequence[Mapping[str, Any]], frames: Sequence[str] = ()) -> list[Exit]:
        """Runs jobs, a few at a time, and gives their exits in order."""
        ids: dict[str, int] = {}
        ended: dict[int, Exit] = {}
        waiting = list(enumerate(jobs))
        cores = len(os.sched_getaffinity(0))
        abreast = max(2, min(cores // 2, MAX_ABREAST)) if session.interpreted else min(cores, MAX_ABREAST)
        while len(ended) < len(jobs):
            while waiting and len(ids) - len(ended) < abreast:
                at, job = waiting.pop(0)
                env = (
                    {}
                    if session.interpreted
                    else {"TRITON_CACHE_DIR": str(session.folder / f"cache-{job.get('counted', 'all')}")}
                )
                ids[session.submit({"module": "bigpool.confirm.child", **job}, timeout=SECONDS, env=env, frames=frames)] = at
            for one in session.wait():
                ended[ids[one.id]] = one
        return [ended[at] for at in range(len(jobs))]


def _run(job: Mapping[str, Any], ended: Exit, reference: Path | None, snapshot: Snapshot) -> Run:
    place, guard = job["place"], job["guard"]
    if ended.outcome == "killed":
        return Run(place, guard, "killed", one_file(ended.detail, ended.where))
    if ended.outcome != "done":
        return Run(place, guard, "unable", ended.detail)
    result = ended.result
    if result["outcome"] == "killed":
        return Run(place, guard, "killed", result["detail"])
    if result["outcome"] not in ("ok", "canary"):
        return Run(place, guard, "unable", result["detail"])
    if result["outcome"] == "canary":
        return Run(place, guard, "canary", result["detail"])
    if reference is None:
        return Run(place, guard, "unable", "there is nothing to compare it with")
    return _compared(job, ended, reference, snapshot)


def _compared(job: Mapping[str, Any], ended: Exit, reference: Path, snapshot: Snapshot) -> Run:
    wanted, found = (torch.load(path, weights_only=True) for path in (reference, ended.folder / "outputs.pt"))
    for space, (want, touched) in wanted.items():
        got, again = found[space]
        differ = (want != got) & touched & again
        if bool(differ.any()):
            return _difference(job, space, want, got, differ, snapshot)
    return Run(job["place"], job["guard"], "same bits", "")


def _difference(
    job: Mapping[str, Any], space: str, want: torch.Tensor, got: torch.Tensor, differ: torch.Tensor, snapshot: Snapshot
) -> Run:
    kind = getattr(torch, snapshot.arguments[space].dtype)
    whole = len(want) // kind.itemsize * kind.itemsize
    differ = differ[:whole].view(-1, kind.itemsize).any(1)
    new, old = got[:whole].view(kind)[differ], want[:whole].view(kind)[differ]
    nans = kind.is_floating_point and bool((new.float().isnan() & ~old.float().isnan()).any())
    text = f"{space}: {len(new):,} values differ, the first is {_shown(new[0])} in place of {_shown(old[0])}"
    return Run(job["place"], job["guard"], "nan" if nans else "unequal", text)


def _shown(value: torch.Tensor) -> str:
    return f"{value.item():.6g}" if value.dtype.is_floating_point else str(value.item())
