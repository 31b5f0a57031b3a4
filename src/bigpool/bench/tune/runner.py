"""A whole run of the tuner: every entry's candidates held to the oracle, screened in turn, the best timed again by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from bigpool._device import device_props
from bigpool.bench.formats import FormatShape, FormatWork
from bigpool.bench.judgement import Judge
from bigpool.bench.load import OP_MODULE
from bigpool.bench.pairs import Call, Samples, Timer, measure, prepare
from bigpool.bench.runner import Listener
from bigpool.bench.shapes import Shape
from bigpool.bench.shapes import check as check_shapes
from bigpool.bench.stats import MIN_ROUNDS, median
from bigpool.bench.timer import make_timer
from bigpool.bench.tune import table
from bigpool.bench.tune.candidates import candidates, cells, rule_of
from bigpool.bench.tune.trial import Checked, Trial, check, spill_fault
from bigpool.bench.verdict import FASTER, MARGIN, SLOWER, Verdict
from bigpool.bench.watch import Watch
from bigpool.errors import ProofError
from bigpool.tuning import DeviceProps, TunedKey, VerifyConfig

RULE, AGAIN, BEST = "rule", "rule again", "best"


@dataclass(frozen=True)
class Options:
    """What `bigpool tune verify` was asked for. `kernels`: a version of bigpool.kernels.verify, None for the installed one."""

    shapes: tuple[Shape, ...]
    formats: tuple[str, ...]
    dtype: str = "bfloat16"
    device: str = "cuda"
    method: str = "graph"
    repeats: int = 60
    margin: float = MARGIN
    seed: int = 0
    command: tuple[str, ...] = ()
    kernels: ModuleType | None = None


@dataclass
class Tried:
    """A candidate: why it was not timed, or its median in seconds on each shape in the screening."""

    config: VerifyConfig
    why: str = ""
    spills: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Cell:
    """One entry: `rule` and the `best` candidate with their medians in seconds (shape -> arm -> median) and the verdict on it.

    `why`: why there is no verdict. `wrong`: what the rule's own configuration got wrong, which refuses the whole run.
    """

    key: TunedKey
    shapes: list[FormatShape]
    rule: VerifyConfig
    tried: list[Tried] = field(default_factory=list)
    best: VerifyConfig | None = None
    verdict: Verdict | None = None
    by_shape: dict[str, Verdict] = field(default_factory=dict)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    why: str = ""
    wrong: str = ""

    @property
    def is_taken(self) -> bool:
        """Whether the best candidate beats the rule: faster over the shapes, and slower on none."""
        words = [found.word for found in self.by_shape.values()]
        return self.verdict is not None and self.verdict.word == FASTER and SLOWER not in words


@dataclass
class Tuning:
    """Everything of one run that the table is made from."""

    options: Options
    props: DeviceProps
    device: torch.device
    kernels: ModuleType
    timer: Timer
    watch: Watch
    listener: Listener
    cells: list[Cell] = field(default_factory=list)
    load: Call | None = None
    seconds: float = 0.0


def tune(options: Options, listener: Listener) -> dict[str, Any]:
    """Run everything and return the table (schema bigpool-tuned/1)."""
    began = time.monotonic()
    check_shapes(options.shapes)
    if options.repeats < MIN_ROUNDS:
        raise ProofError(f"--repeats: expected at least {MIN_ROUNDS}, got {options.repeats}; an interval needs them")
    device = torch.device(options.device)
    kernels = options.kernels or import_module(OP_MODULE)
    timer, watch = make_timer(options.method), Watch(device)
    made = Tuning(options, device_props(device), device, kernels, timer, watch, listener)
    asked = cells(options.shapes, options.formats, getattr(torch, options.dtype).itemsize)
    made.cells = [Cell(key, found, rule_of(made.props, key, found[0])) for key, found in asked.items()]
    plans = [candidates(made.props, cell.key, cell.rule) for cell in made.cells]
    rounds = sum(len(cell.shapes) for cell in made.cells) * (MIN_ROUNDS + options.repeats)
    listener.on_plan(rounds, plan_text(made, plans))
    for cell, configs in zip(made.cells, plans, strict=True):
        listener.on_step(
            f"{table.key_text(cell.key)}: {len(configs)} candidates, {', '.join(shape.name for shape in cell.shapes)}"
        )
        _tune_cell(made, cell, configs)
    if made.load is not None:
        made.watch.stop(made.load)
    made.seconds = time.monotonic() - began
    return table.build(made)


def plan_text(made: Tuning, plans: Sequence[Sequence[VerifyConfig]]) -> str:
    kernels = sum(len(cell.shapes) * len(configs) for cell, configs in zip(made.cells, plans, strict=True))
    count, options = len(plans), made.options
    entries = f"{count} {'entry' if count == 1 else 'entries'}"
    return f"{entries}, {kernels} candidates to compile and run, {options.method}, {options.dtype}, on {made.props.name}"


def _tune_cell(made: Tuning, cell: Cell, configs: Sequence[VerifyConfig]) -> None:
    cell.tried = [Tried(config) for config in configs]
    try:
        dtype = getattr(torch, made.options.dtype)
        works = {shape.name: FormatWork(shape, dtype, made.device, made.options.seed) for shape in cell.shapes}
        ready = _gated(made, cell, works)
        if cell.wrong or not ready:
            return
        if made.load is None:
            made.load = ready[cell.shapes[0].name][RULE]
            made.watch.start(made.load)
        best = _screened(made, cell, ready)
        if best is not None:
            _decided(made, cell, ready, best)
    except (RuntimeError, MemoryError) as error:
        cell.why = f"could not be timed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _gated(made: Tuning, cell: Cell, works: Mapping[str, FormatWork]) -> dict[str, dict[str, Trial]]:
    """Shape -> name -> call of the rule and of every candidate that is right on all shapes; fills in why others are not."""
    trials: dict[str, dict[str, Trial]] = {name: {} for name in works}
    of_rule = 0
    for name, work in works.items():
        found = _check(made, cell, work, None)
        if found.why:
            cell.wrong = f"the configuration of today on {name}: {found.why}"
            return {}
        of_rule, trials[name][RULE] = max(of_rule, found.spills or 0), found.trial
    for index, tried in enumerate(cell.tried):
        made.listener.on_step(f"{table.key_text(cell.key)}: {table.config_text(tried.config)}")
        for name, work in works.items():
            found = _check(made, cell, work, tried.config)
            tried.spills = max((n for n in (tried.spills, found.spills) if n is not None), default=None)
            why = found.why or spill_fault(found.spills, of_rule)
            if why:
                tried.why = f"on {name}: {why}"
                break
            trials[name][str(index)] = found.trial
    return trials


def _check(made: Tuning, cell: Cell, work: FormatWork, config: VerifyConfig | None) -> Checked:
    sync: Callable[[], None] = torch.cuda.synchronize if made.device.type == "cuda" else lambda: None
    return check(work, made.kernels, cell.key, config, sync)


def _screened(made: Tuning, cell: Cell, trials: Mapping[str, Mapping[str, Trial]]) -> int | None:
    """The candidate that is fastest over the shapes, if one seems faster than the rule; its verdict comes from other rounds."""
    runs: dict[str, Samples] = {}
    for name, found in trials.items():
        right = {arm: trial for arm, trial in found.items() if arm == RULE or not cell.tried[int(arm)].why}
        ready, faults = prepare(made.timer, right)
        if RULE in faults:
            cell.why = f"the rule's configuration cannot be timed: {faults[RULE]}"
            return None
        for arm, text in faults.items():
            cell.tried[int(arm)].why = f"on {name}: cannot be timed: {text}"
        runs[name] = measure(made.timer, ready, MIN_ROUNDS, made.listener.on_round)
        for arm, rows in runs[name].items():
            if arm != RULE:
                cell.tried[int(arm)].seconds[name] = median(rows)
    whole = {
        name: {arm: rows for arm, rows in run.items() if arm == RULE or not cell.tried[int(arm)].why}
        for name, run in runs.items()
    }
    verdicts = Judge(RULE, None, made.options.margin, made.options.seed).overall(whole)
    found_best = min(verdicts, key=lambda arm: verdicts[arm].effect.estimate, default=None)
    if found_best is None or verdicts[found_best].effect.estimate >= 0:
        cell.why = "no candidate was faster in the screening" if verdicts else "no candidate could be timed"
        return None
    return int(found_best)


def _decided(made: Tuning, cell: Cell, trials: Mapping[str, Mapping[str, Trial]], index: int) -> None:
    """The verdict on one candidate, from rounds of its own: it was chosen by others."""
    cell.best = cell.tried[index].config
    runs: dict[str, Samples] = {}
    for name, found in trials.items():
        calls = {RULE: found[RULE], AGAIN: found[RULE], BEST: found[str(index)]}
        ready, faults = prepare(made.timer, calls)
        if faults:
            raise RuntimeError("; ".join(f"{arm}: {text}" for arm, text in faults.items()))
        runs[name] = measure(made.timer, ready, made.options.repeats, made.listener.on_round)
        cell.seconds[name] = {arm: median(rows) for arm, rows in runs[name].items()}
    judge = Judge(RULE, AGAIN, made.options.margin, made.options.seed)
    cell.by_shape = {name: judge.shape(run)[BEST] for name, run in runs.items()}
    cell.verdict = judge.overall(runs)[BEST]
