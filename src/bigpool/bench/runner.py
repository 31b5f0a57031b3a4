"""A whole run: load the arms, measure the machine, gate and time every shape, and put down what happened as a record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from bigpool.bench import gate, peers, record, roofline
from bigpool.bench.formats import FormatShape, FormatWork, groups
from bigpool.bench.gate import Gate
from bigpool.bench.load import BenchArm, Loader
from bigpool.bench.pairs import Call, Samples, Timer, measure, prepare
from bigpool.bench.prefill import PrefillWork
from bigpool.bench.roofline import Roofline
from bigpool.bench.shapes import Shape
from bigpool.bench.shapes import check as check_shapes
from bigpool.bench.stats import MIN_ROUNDS
from bigpool.bench.timer import make_timer
from bigpool.bench.verdict import MARGIN
from bigpool.bench.watch import Watch
from bigpool.bench.work import Work
from bigpool.errors import BackendError, ProofError
from bigpool.proof.worker import require_working_interpreter

AGAIN = " again"


@dataclass(frozen=True)
class Options:
    """What `bigpool bench verify` or `prefill` was asked for. `arms`: (name, spec); the others are compared with the first."""

    shapes: tuple[Shape, ...]
    arms: tuple[tuple[str, str], ...] = (("shipped", "shipped"),)
    aa: bool = True
    peers: bool = False
    repeats: int = 60
    method: str = "graph"
    device: str = "cuda"
    dtype: str = "bfloat16"
    gated: bool = True
    margin: float = MARGIN
    proofs: tuple[Path, ...] = ()
    seed: int = 0
    command: tuple[str, ...] = ()
    op: str = "verify_attention"


class Listener(Protocol):
    """Is told as things happen."""

    def on_plan(self, rounds: int, text: str) -> None: ...

    def on_step(self, text: str) -> None: ...

    def on_round(self) -> None: ...


@dataclass
class ShapeRun:
    """What happened on one shape. `samples` is empty where nothing was timed, and `why` says why."""

    shape: Shape
    gates: list[Gate] = field(default_factory=list)
    samples: Samples = field(default_factory=dict)
    why: str = ""

    @property
    def red(self) -> list[str]:
        """Arms (not peers) whose gate is red, with what it says."""
        return [f"{made.arm} is wrong on {self.shape.name}: {made.text}" for made in self.gates if not made.ok and not made.peer]


@dataclass
class Bench:
    """Everything of one run that the record is made from. `load`: a call that keeps the device at work."""

    options: Options
    arms: list[BenchArm]
    absent: list[dict[str, Any]]
    device: torch.device
    roofline: Roofline
    watch: Watch
    runs: list[ShapeRun] = field(default_factory=list)
    load: Call | None = None
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


def bench(options: Options, listener: Listener) -> dict[str, Any]:
    """Run everything and return the record (schema bigpool-bench/1)."""
    began = time.monotonic()
    check_shapes(options.shapes)
    if options.repeats < MIN_ROUNDS:
        raise ProofError(f"--repeats: expected at least {MIN_ROUNDS}, got {options.repeats}; an interval needs them")
    timer = make_timer(options.method)
    device = torch.device(options.device)
    _check_interpreter(options, device)
    with ExitStack() as stack:
        loader = stack.enter_context(Loader(op_module=f"bigpool.kernels.{options.op.removesuffix('_attention')}"))
        arms, absent = _arms(loader, options)
        watch = Watch(device)
        together = groups(options.shapes)
        listener.on_plan(len(together) * options.repeats, plan_text(options, arms))
        listener.on_step("measuring what the machine reaches")
        made = Bench(options, arms, absent, device, roofline.measure(device), watch)
        made.faults += gate.proof_faults(options.proofs, arms)
        for group in together:
            listener.on_step(", ".join(shape.name for shape in group))
            made.runs += _run_group(made, group, timer, listener.on_round)
        if made.load is not None and any(run.samples for run in made.runs):
            watch.stop(made.load)
        made.seconds = time.monotonic() - began
        return record.build(made)


def plan_text(options: Options, arms: Sequence[BenchArm]) -> str:
    names = ", ".join(arm.name for arm in arms)
    where = torch.cuda.get_device_name() if options.device == "cuda" else "the CPU"
    count = len(groups(options.shapes))
    found = dict.fromkeys(shape.kv_format for shape in options.shapes if isinstance(shape, FormatShape))
    formats = f" in {', '.join(found)}" if found else ""
    shapes = f"{count} shape{'s' * (count > 1)}{formats}"
    return f"{names}: {shapes}, {options.repeats} rounds each, {options.method}, {options.dtype}, on {where}"


def _check_interpreter(options: Options, device: torch.device) -> None:
    """Kernels on CPU tensors need Triton's interpreter, and one that works."""
    if device.type == "cuda" or all(spec == "backend:torch" or spec.startswith("peer:") for _, spec in options.arms):
        return
    import numpy
    import triton

    from bigpool.ops.verify import require_interpreter

    asked = getattr(torch, options.dtype)
    for dtype in {shape.dtype_of_q(asked) if isinstance(shape, FormatShape) else asked for shape in options.shapes}:
        require_interpreter(dtype)
    require_working_interpreter(triton.__version__, numpy.__version__)


def _arms(loader: Loader, options: Options) -> tuple[list[BenchArm], list[dict[str, Any]]]:
    """The arms, the A/A arm second, the installed peers last; and the peers that are not installed."""
    names = [name for name, _ in options.arms]
    if len(set(names)) < len(names):
        raise ProofError(f"--arm: expected a name for each arm, got {', '.join(names)}; write NAME=SPEC with different names")
    arms = [loader.load(name, spec) for name, spec in options.arms]
    if options.aa:
        arms.insert(1, loader.again(arms[0], arms[0].name + AGAIN))
    absent = []
    for peer in peers.every().values() if options.peers else ():
        if peers.version_of(peer) is None:
            absent.append({"name": peer.name, "why": f"not installed: {' or '.join(peer.packages)}"})
        elif peer.name not in names:
            arms.append(loader.load(peer.name, f"peer:{peer.name}"))
    return arms, absent


def _run_group(made: Bench, group: Sequence[Shape], timer: Timer, on_round: Callable[[], None]) -> list[ShapeRun]:
    """Shapes that differ in their format alone, timed in the same rounds."""
    runs = [_gated(made, shape) for shape in group]
    red = [text for run in (*made.runs, *runs) for text in run.red]
    base = made.arms[0].name
    ready: dict[str, dict[str, Call]] = {}
    for run in runs:
        calls = {done.arm: done.call for done in run.gates if done.call is not None and (done.ok or not made.options.gated)}
        if run.why:
            continue
        if red and made.options.gated:
            run.why = "an arm is wrong"
        elif base not in calls:
            run.why = f"{base} does not run"
        else:
            if made.load is None:
                made.watch.start(calls[base])
            made.load = calls[base]
            ready[run.shape.name] = _prepared(run, calls, timer)
    _time(runs, ready, timer, made.options.repeats, on_round)
    for run in runs:
        # A call holds the tensors of its shape.
        run.gates = [replace(done, call=None) for done in run.gates]
    return runs


def _gated(made: Bench, shape: Shape) -> ShapeRun:
    """The shape set up, and every arm held to the oracle on it."""
    run, options = ShapeRun(shape), made.options
    try:
        work = _work_of(options, shape, made.device)
        run.gates = [gate.check(arm, work, _sync(made.device)) for arm in made.arms]
    except (RuntimeError, MemoryError) as error:
        # No memory, or a device that an arm before has brought down.
        run.why = f"{shape.name} could not be set up: {type(error).__name__}"
    return run


def _work_of(options: Options, shape: Shape, device: torch.device) -> Work:
    dtype = getattr(torch, options.dtype)
    if isinstance(shape, FormatShape):
        return FormatWork(shape, dtype, device, options.seed)
    make = PrefillWork if options.op == "prefill_attention" else Work
    return make(shape, dtype, device, options.seed)


def _prepared(run: ShapeRun, calls: Mapping[str, Call], timer: Timer) -> dict[str, Call]:
    """What can be timed. A peer that cannot be is put down as such; one of our arms ends the shape."""
    ready, faults = prepare(timer, calls)
    run.gates = [
        replace(done, ok=False, text=f"cannot be timed: {faults[done.arm]}") if done.arm in faults else done for done in run.gates
    ]
    ours = [f"{done.arm} {done.text}" for done in run.gates if done.arm in faults and not done.peer]
    run.why = "; ".join(ours)
    return {} if ours else ready


def _time(
    runs: Sequence[ShapeRun], ready: Mapping[str, Mapping[str, Call]], timer: Timer, rounds: int, on_round: Callable[[], None]
) -> None:
    """Times what is ready, shape -> arm -> call, all in the same rounds."""
    calls = {f"{shape} {arm}": call for shape, arms in ready.items() for arm, call in arms.items()}
    if not calls:
        return
    try:
        samples = measure(timer, calls, rounds, on_round)
    except RuntimeError as error:
        why = f"timing failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        for run in runs:
            run.why = run.why or why
        return
    for run in runs:
        arms = ready.get(run.shape.name, {})
        run.samples = {arm: samples[f"{run.shape.name} {arm}"] for arm in arms}


def _sync(device: torch.device) -> Callable[[], None]:
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def choose_device(asked: str) -> str:
    """`auto`: the GPU if torch can use one."""
    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise BackendError(f"--device: expected a CUDA device for cuda, got none: torch {torch.__version__} sees no GPU; use cpu")
    return asked if asked != "auto" else "cuda" if there else "cpu"
