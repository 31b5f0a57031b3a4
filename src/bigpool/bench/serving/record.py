"""The record of a serving bench: every sample, what was made of them, and what the servers were."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigpool import __version__
from bigpool.bench import stats, verdict
from bigpool.bench.judgement import Judge
from bigpool.errors import ProofError
from bigpool.proof.record import _cpu_model, _git, shorten_paths

if TYPE_CHECKING:
    from bigpool.bench.serving.measure import Run
    from bigpool.bench.serving.runner import Measure, Serving

SCHEMA = "bigpool-serving/1"
SCHEMA_FILE = Path(__file__).with_name("record.schema.json")
DIGITS = 9
LOCAL = ("127.0.0.1", "localhost", "[::1]")


def build(made: Serving) -> dict[str, Any]:
    """The record as JSON. Where the numbers are refused it holds samples, but no number that is made from them."""
    options, faults = made.options, refusals(made)
    measures = [_measure(made, measure, not faults) for measure in options.measures]
    return {
        "schema": SCHEMA,
        "bigpool": {"version": __version__, **_git()},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": [shorten_paths(word) for word in options.command],
        "machine": {"cpu": _cpu_model(), "cores": os.cpu_count() or 0, "system": platform.system(), "gpus": gpus()},
        "versions": {"bigpool": __version__, "python": platform.python_version(), "httpx": version("httpx")},
        "settings": {
            "mode": options.mode, "rounds": options.repeats, "prompt": options.prompt, "confidence": stats.CONFIDENCE,
            "resamples": stats.RESAMPLES, "margin": options.margin, "seed": options.seed,
        },
        "base": made.arms[0].name,
        "arms": [
            {
                **arm.to_json(), "command": shorten_paths(arm.command), "model": shorten_paths(made.models.get(arm.name, "")),
                "starts": made.starts.get(arm.name, 0),
            }
            for arm in made.arms
        ],
        "measures": measures,
        "refusals": faults,
        "notes": notes(made),
        "seconds": round(made.seconds, 1),
        "summary": _summary(faults, measures),
        "status": 1 if faults else 0,
    }  # fmt: skip


def refusals(made: Serving) -> list[str]:
    """Why nobody may go by these numbers."""
    few = f"{made.rounds} rounds are complete, and an interval needs {stats.MIN_ROUNDS}"
    faults = made.faults or ([few] if made.rounds < stats.MIN_ROUNDS else [])
    return [shorten_paths(fault) for fault in faults]


def notes(made: Serving) -> list[str]:
    """What could not be seen, or was not looked for."""
    runs = [run for by_arm in made.runs.values() for rows in by_arm.values() for row in rows for run in row]
    lines = ["clocks and other load of the servers' machine are not watched; the A/A noise shows what they did"]
    if not made.options.aa:
        lines.append("no A/A run, so the noise is the margin alone")
    if any(not run.counted for run in runs):
        lines.append("tokens were not reported: chunks were counted, which hold more than one token where speculation is on")
    if any(arm.base_url and not any(local in arm.base_url for local in LOCAL) for arm in made.arms):
        lines.append("a server is on another machine than the one named here")
    return lines


def gpus() -> list[str]:
    """What nvidia-smi names on this machine."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def _measure(made: Serving, measure: Measure, shown: bool) -> dict[str, Any]:
    by_arm = made.runs[measure.name]
    samples = {name: [[round(run.seconds, DIGITS) for run in row] for row in rows] for name, rows in by_arm.items() if rows}
    timed = samples if shown else {}
    verdicts = Judge(made.arms[0].name, _twin(made), made.options.margin, made.options.seed).shape(timed)
    return {
        "name": measure.name,
        "kind": measure.kind,
        "requests": measure.requests,
        "samples": samples,
        "speeds": {name: _speed(measure, rows, by_arm[name]) for name, rows in timed.items()},
        "verdicts": {name: found.to_json() for name, found in verdicts.items()},
    }


def _twin(made: Serving) -> str | None:
    return next((arm.name for arm in made.arms if arm.same_as is not None), None)


def _speed(measure: Measure, rows: Sequence[Sequence[float]], runs: Sequence[Sequence[Run]]) -> dict[str, Any]:
    """Medians over all runs. Rates are tokens per second; `acceptance` is over all runs, None where it is not reported."""
    every = [run for row in runs for run in row]
    seconds = stats.median(rows)
    prompts = [run.prompt_tokens for run in every if run.prompt_tokens is not None]
    streams = [[run.stream_seconds] for run in every if run.stream_seconds is not None]
    drafted = [run.drafted for run in every if run.drafted is not None]
    accepted = [run.accepted for run in every if run.accepted is not None]
    return {
        "seconds": seconds,
        "per_second": None if measure.kind == "prefill" else 1 / seconds,
        "per_second_of_a_stream": 1 / stats.median(streams) if streams else None,
        "prompt_tokens": int(stats.median([prompts])) if prompts else None,
        "acceptance": sum(accepted) / sum(drafted) if sum(drafted) > 0 else None,
    }


def _summary(faults: Sequence[str], measures: Sequence[Mapping[str, Any]]) -> str:
    if faults:
        return verdict.refusal_text(faults)
    said = [f"{made['name']}: {name}: {found['text']}" for made in measures for name, found in made["verdicts"].items()]
    return "; ".join(said) or "measured; nothing to compare it with"


def schema_of(path: Path) -> object:
    """The schema that a file names, or None."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return data.get("schema") if isinstance(data, dict) else None


def load(path: Path, name: str) -> dict[str, Any]:
    """A record from a file; one of another schema is refused. `name`: the argument that it was given by."""
    schema = schema_of(path)
    if schema != SCHEMA:
        raise ProofError(
            f"{name}: expected schema {SCHEMA}, got {schema!r} in {path}; serving records compare with serving records only"
        )
    return dict(json.loads(path.read_text()))
