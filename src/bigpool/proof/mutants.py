"""Removes the widenings of the kernels one at a time: each removal must be seen by a case, or the proof has a hole there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from bigpool.errors import ProofError
from bigpool.proof.arms import Arm, ArmStore
from bigpool.proof.matrix import Flow, Job, Unit, drive, make_job
from bigpool.proof.narrow import list_widenings
from bigpool.proof.runner import Options, base_arm, choose, default_jobs, discovered, open_machine, resolved
from bigpool.proof.verdict import Run, run_of

MODES = (("top", "unmapped"), ("top", "poison"))


@dataclass(frozen=True)
class Mutant:
    """One widening without which the kernels were run. `seen_by`: the case that failed, "" if none did; `how`: in words."""

    module: str
    line: int
    col: int
    text: str
    seen_by: str = ""
    how: str = "no case saw it"


def survey(
    options: Options,
    on_end: Callable[[Job, Run], None] = lambda job, run: None,
    modules: Collection[str] | None = None,
) -> list[Mutant]:
    """Every widening of the kernels with the case that sees its removal: a run at the top that is killed or gives other bits.

    Cases are tried from the fastest on, until one sees it. `modules`: only the widenings of these files. Raises ProofError where
    a case does not hold without a mutation.
    """
    with ExitStack() as stack:
        machine = open_machine(stack, options.device)
        found = discovered(machine.session, options.file)
        units = choose(found["cases"], options, machine.interpreted)
        store = ArmStore(machine.session.folder)
        base = base_arm(store, found["kernels"])
        maker = _Maker(resolved(options.file), machine.device, machine.interpreted)
        runs: dict[tuple[str, str, str], Run] = {}

        def keep(job: Job, run: Run) -> None:
            runs[run.case, run.dtype, run.arm] = run
            on_end(job, run)

        def go(flows: Sequence[Flow]) -> None:
            jobs, timeout = options.jobs or default_jobs(machine), options.timeout
            drive(
                machine.session, flows, jobs=jobs, timeout=timeout,
                on_start=lambda job: None, on_end=lambda job, ended: keep(job, run_of(job, ended)),
            )  # fmt: skip

        go([maker.reference(unit, base) for unit in units])
        references = {(run.case, run.dtype): run for run in runs.values()}
        units = _usable(units, references)
        results: dict[str, Mutant] = {}
        go([maker.mutant(arm, mutant, units, references, results) for arm, mutant in mutants_of(store, base, modules)])
    return sorted(results.values(), key=lambda mutant: (mutant.module, mutant.line, mutant.col))


def mutants_of(store: ArmStore, base: Arm, modules: Collection[str] | None = None) -> list[tuple[Arm, Mutant]]:
    made = []
    for module, path in base.modules.items():
        if modules is not None and module not in modules:
            continue
        for index, place in enumerate(list_widenings(path.read_text())):
            made.append((store.mutant(base, module, index), Mutant(module, *place)))
    if not made:
        raise ProofError(
            f"mutants: expected widenings to 64 bits in {', '.join(base.modules)}, got none; there is nothing to remove"
        )
    return made


def _usable(units: Sequence[Unit], references: Mapping[tuple[str, str], Run]) -> list[Unit]:
    """The units that hold unmutated, fastest first; designed skips are left out."""
    for run in references.values():
        # NaN has many bit patterns: against a result of NaN every mutant would seem to be seen.
        nan = ", ".join(name for name, count in run.nan.items() if count)
        if run.outcome not in ("ok", "skip") or nan:
            text = f"NaN in {nan}" if nan else run.text
            raise ProofError(f"mutants: expected cases that hold unmutated, got {run.case}: {run.label}: {text}")
    runs = {unit: references[unit.case["name"], unit.dtype] for unit in units}
    return sorted((unit for unit in units if runs[unit].outcome == "ok"), key=lambda unit: runs[unit].seconds)


@dataclass(frozen=True)
class _Maker:
    file: str | None
    device: str
    interpreted: bool

    def _job(self, unit: Unit, arm: Arm, placement: str, guard: str) -> Job:
        return make_job(unit, arm, placement, guard, file=self.file, device=self.device, interpreted=self.interpreted)

    def reference(self, unit: Unit, base: Arm) -> Flow:
        yield [self._job(unit, base, "bottom", "unmapped")]

    def mutant(
        self,
        arm: Arm,
        mutant: Mutant,
        units: Sequence[Unit],
        references: Mapping[tuple[str, str], Run],
        results: dict[str, Mutant],
    ) -> Flow:
        results[arm.name] = mutant
        for unit in units:
            for placement, guard in MODES:
                job = self._job(unit, arm, placement, guard)
                (ended,) = yield [job]
                run = run_of(job, ended)
                if run.outcome in ("killed", "canary"):
                    what = run.text if run.outcome == "killed" else "wrote outside its tensors"
                    results[arm.name] = replace(mutant, seen_by=run.case, how=f"{guard}: {what}")
                    return
                if run.outcome != "ok" or run.digests == references[run.case, run.dtype].digests:
                    continue
                # Another compilation may differ in its last bits, so the mutant's own bottom run decides.
                own = self._job(unit, arm, "bottom", "unmapped")
                (ended,) = yield [own]
                bottom = run_of(own, ended)
                if bottom.outcome == "ok" and run.digests != bottom.digests:
                    nan = " with NaN" if any(run.nan.values()) else ""
                    results[arm.name] = replace(mutant, seen_by=run.case, how=f"{guard}: other bits{nan}")
                    return
