"""The record of a run: every sample, what was made of them, and the machine they come from."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigpool import __version__
from bigpool.bench import peers, stats, verdict
from bigpool.bench.formats import FormatShape, groups, plain_of
from bigpool.bench.judgement import Judge
from bigpool.cost import floor_of
from bigpool.errors import ProofError
from bigpool.proof import worker
from bigpool.proof.record import _cpu_model, _git, shorten_paths

if TYPE_CHECKING:
    from bigpool.bench.runner import Bench, ShapeRun

SCHEMA = "bigpool-bench/1"
SCHEMA_FILE = Path(__file__).with_name("record.schema.json")
DIGITS = 11


def build(made: Bench) -> dict[str, Any]:
    """The record as JSON. Without its gate it holds samples, but no number that is made from them."""
    options, faults = made.options, refusals(made)
    shown = not faults or not options.gated
    shapes = [_shape(made, run, shown) for run in made.runs]
    over_all = _over_all(made) if shown else {}
    probe = worker.probe({"interpreted": made.device.type != "cuda"})
    return {
        "schema": SCHEMA,
        "bigpool": {"version": __version__, **_git()},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": [shorten_paths(word) for word in options.command],
        "op": options.op,
        "device": made.device.type,
        "machine": {"cpu": _cpu_model(), "cores": os.cpu_count(), "system": platform.system(), "gpu": probe["gpu"]},
        "versions": {"bigpool": __version__, **probe["versions"], "cuda": probe["cuda"]},
        "settings": {
            "method": options.method, "dtype": options.dtype, "rounds": options.repeats, "discarded_rounds": 1,
            "confidence": stats.CONFIDENCE, "resamples": stats.RESAMPLES, "margin": options.margin, "seed": options.seed,
            "gated": options.gated,
        },
        "clocks": made.watch.to_json(),
        "roofline": made.roofline.to_json(),
        "base": made.arms[0].name,
        "arms": [_arm(made, arm.name, arm.spec, arm.facts) for arm in made.arms],
        "absent": made.absent,
        "shapes": shapes,
        "overall": over_all,
        "refusals": faults,
        "notes": notes(made),
        "seconds": round(made.seconds, 1),
        "summary": _summary(faults, shown, over_all),
        "status": 1 if faults else 0,
    }  # fmt: skip


def refusals(made: Bench) -> list[str]:
    """Why nobody may go by these numbers."""
    red = [text for run in made.runs for text in run.red]
    faults = [*made.faults, *red, *made.watch.faults]
    if not any(run.samples for run in made.runs):
        reasons = "; ".join(sorted({run.why for run in made.runs if run.why}))
        faults.append(f"nothing was timed: {reasons}")
    return [shorten_paths(fault) for fault in faults]


def notes(made: Bench) -> list[str]:
    """What could not be seen, or was not looked for."""
    blind = [] if made.options.aa else ["no A/A run, so the noise is the margin alone"]
    return [*dict.fromkeys(made.watch.notes), *blind]


def _arm(made: Bench, name: str, spec: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    kind, _, rest = spec.partition(":")
    version = peers.version_of(peers.named(rest)) if kind == "peer" else None
    origin = made.arms[0].name if name != made.arms[0].name and name.startswith(f"{made.arms[0].name} ") else None
    return {"name": name, "spec": facts["spec"], "files": facts["files"], "package": version, "same_as": origin}


def _shape(made: Bench, run: ShapeRun, shown: bool) -> dict[str, Any]:
    import torch

    dtype: torch.dtype = getattr(torch, made.options.dtype)
    if isinstance(run.shape, FormatShape):
        dtype = run.shape.dtype_of_q(dtype)
    cost = run.shape.cost(dtype.itemsize)
    floor = floor_of(cost, made.roofline.ceilings(dtype))
    timed = run.samples if shown else {}
    ratios = {"ratios": _ratios(made, run) if shown else {}} if isinstance(run.shape, FormatShape) else {}
    return {
        **run.shape.to_json(),
        "cost": asdict(cost),
        "floor": {"seconds": floor.seconds, "bound": floor.bound},
        "gates": [made_gate.to_json() for made_gate in run.gates],
        "why_not_timed": run.why,
        "samples": {name: [[round(time, DIGITS) for time in pair] for pair in rows] for name, rows in run.samples.items()},
        "speeds": {name: _speed(rows, cost.bytes_moved, cost.flops, floor.seconds) for name, rows in timed.items()},
        "verdicts": {name: found.to_json() for name, found in _judge(made).shape(timed).items()},
        **ratios,
    }


def _ratios(made: Bench, run: ShapeRun) -> dict[str, Any]:
    """By arm, its time over that on the cache in q's dtype, from the same rounds; empty where there is no such cache."""
    group = next(group for group in groups(made.options.shapes) if run.shape in group)
    plain = plain_of(group)
    base = next((done for done in made.runs if done.shape == plain), None)
    found = {}
    for arm in run.samples if base is not None and base is not run else ():
        if base is not None and arm in base.samples:
            ratios = stats.round_ratios({"base": base.samples[arm], "arm": run.samples[arm]}, "base", "arm")
            effect = stats.effect_of([ratios], seed=made.options.seed)
            ends = {"ratio": effect.estimate, "low": effect.low, "high": effect.high}
            found[arm] = {"to": base.shape.name, **{name: 1 + value for name, value in ends.items()}}
    return found


def _speed(rows: Sequence[Sequence[float]], moved: int, flops: int, floor: float) -> dict[str, float]:
    seconds = stats.median(rows)
    return {
        "seconds": seconds, "of_floor": floor / seconds, "bytes_per_second": moved / seconds, "flops_per_second": flops / seconds
    }  # fmt: skip


def _judge(made: Bench) -> Judge:
    options = made.options
    return Judge(made.arms[0].name, made.arms[1].name if options.aa else None, options.margin, options.seed)


def _over_all(made: Bench) -> dict[str, Any]:
    runs = {run.shape.name: run.samples for run in made.runs if run.samples}
    return {name: found.to_json() for name, found in _judge(made).overall(runs).items()}


def _summary(faults: Sequence[str], shown: bool, over_all: Mapping[str, Mapping[str, Any]]) -> str:
    if not shown:
        return verdict.refusal_text(faults)
    said = "; ".join(f"{name}: {found['text']}" for name, found in over_all.items()) or "timed; nothing to compare it with"
    return f"these numbers mean nothing: {'; '.join(faults)}" if faults else said


def load(path: Path, name: str) -> dict[str, Any]:
    """A record from a file; one of another schema is refused. `name`: the argument that it was given by."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ProofError(f"{name}: expected a record of bigpool bench --json, got {path}, which does not exist") from None
    except ValueError as error:
        raise ProofError(f"{name}: expected a record of bigpool bench --json, got {path}, which is no JSON: {error}") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise ProofError(f"{name}: expected schema {SCHEMA}, got {schema!r} in {path}; make the record anew with --json")
    return dict(data)
