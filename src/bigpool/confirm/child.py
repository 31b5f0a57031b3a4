"""What a child process does: plan a reproduction, make one launch of it, or time two versions of a kernel."""

from __future__ import annotations

import json
import pickle
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from bigpool.bench.stats import MIN_ROUNDS
from bigpool.confirm.build import Memory, plain
from bigpool.confirm.exact import Untraced
from bigpool.confirm.explore import Explorer
from bigpool.confirm.load import edited, forget, load_kernel
from bigpool.confirm.patch import exact, first_programs
from bigpool.confirm.plan import make_plan
from bigpool.errors import BackendError, PoolError, ProofError
from bigpool.proof.worker import CUDA_FAULTS, require_working_interpreter

# Two runs of the old kernel, its twin and the new one.
RUNS_A_ROUND = 6
PRICE_SECONDS = 30.0


def perform(job: Mapping[str, Any]) -> int:
    """Entry point of a forked child; the answer is left in the job's folder."""
    try:
        result = TASKS[job["task"]](job)
    except (ProofError, BackendError, PoolError, MemoryError, torch.OutOfMemoryError) as error:
        result = {"outcome": "unable", "detail": str(error) or type(error).__name__}
    except Exception as error:  # a user's module or kernel: whatever it raises
        traceback.print_exc()
        text = " ".join(str(error).split())
        fault = next((name for said, name in CUDA_FAULTS.items() if said in text), None)
        result = (
            {"outcome": "killed", "detail": fault}
            if fault
            else {"outcome": "error", "detail": f"{type(error).__name__}: {text[:300]}"}
        )
    target = Path(job["folder"]) / "result.json"
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.rename(target)
    return 0


def kept(path: str) -> Any:
    with Path(path).open("rb") as file:
        return pickle.load(file)


def plan(job: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves a `Plan` in the file that the job names."""
    if job["device"] == "cpu":
        require_working_interpreter(triton.__version__, np.__version__)
    snapshot = kept(job["snapshot"])
    file, line, col, end_col = job["span"]
    explorer = Explorer(load_kernel(snapshot), snapshot, (file, line, col, end_col), job["last_line"])
    made = make_plan(explorer, job["variable"])
    with Path(job["plan"]).open("wb") as file:
        pickle.dump(made, file)
    return {"outcome": "ok", "detail": ""}


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """One launch at one place of a plan; what it left behind is saved by space."""
    snapshot, whole = kept(job["snapshot"]), kept(job["plan"])
    place, alone = whole.places[job["place"]], whole.operations if job["alone"] else frozenset()
    with edited(kept(job["edits"])) if job["edits"] else nullcontext():
        kernel = load_kernel(snapshot)
        memory = Memory(snapshot, place, job["guard"], job["device"])
        try:
            with first_programs(place.setting), exact(Untraced(), alone) if alone else nullcontext():
                kernel[place.setting.launched](**memory.arguments(), **snapshot.options)
                if job["device"] != "cpu":
                    torch.cuda.synchronize()
            torch.save(memory.read(), Path(job["folder"]) / "outputs.pt")
            said = memory.canaries()
        finally:
            memory.close()
    return {"outcome": "canary" if said else "ok", "detail": said}


def price(job: Mapping[str, Any]) -> dict[str, Any]:
    """Times the kernel before and after an edit on the launch as captured."""
    from bigpool.bench.price import price as compare

    snapshot, device, files = kept(job["snapshot"]), job["device"], kept(job["edits"])
    arguments, setting = plain(snapshot, device)
    before = _call(load_kernel(snapshot), setting.launched if device == "cpu" else snapshot.grid, arguments, snapshot.options)
    with first_programs(setting) if device == "cpu" else nullcontext():
        before()
        forget(files, snapshot)
        with edited(files):
            again, _ = plain(snapshot, device)
            after = _call(load_kernel(snapshot), setting.launched if device == "cpu" else snapshot.grid, again, snapshot.options)
            after()
            rounds = _rounds(before, job["repeats"])
            _restore(snapshot, arguments, again, device)
            made = compare(before, after, same=_same, method="cpu" if device == "cpu" else "events", repeats=rounds)
    return {"outcome": "ok", "detail": "", "verdict": made.to_json()}


def _rounds(call: Callable[[], Any], wanted: int) -> int:
    """As many rounds as fit into the time that a price is worth.

    Raises:
        ProofError: not even the fewest.
    """
    began = time.monotonic()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    once = time.monotonic() - began
    rounds = min(wanted, int(PRICE_SECONDS / (RUNS_A_ROUND * once)))
    if rounds < MIN_ROUNDS:
        raise ProofError(f"one launch takes {once:.2g} s here; run the script with smaller tensors, or on a GPU")
    return rounds


def _call(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], options: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    def call() -> dict[str, Any]:
        kernel[grid](**arguments, **options)
        return arguments

    return call


def _restore(snapshot: Any, first: dict[str, Any], second: dict[str, Any], device: str) -> None:
    """Both sides start from the captured bytes: a kernel may add to what is there."""
    fresh, _ = plain(snapshot, device)
    for name, tensor in fresh.items():
        if isinstance(tensor, torch.Tensor):
            first[name].copy_(tensor)
            second[name].copy_(tensor)


def _same(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    pairs = [(tensor, after[name]) for name, tensor in before.items() if isinstance(tensor, torch.Tensor)]
    return all(torch.equal(_bits(one), _bits(other)) for one, other in pairs)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


TASKS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"plan": plan, "run": run, "price": price}
