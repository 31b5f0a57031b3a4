"""The record of a proof: everything that the table and the figure are made from, with the machine it comes from."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigpool import __version__
from bigpool.errors import ProofError
from bigpool.proof.case import WRONG_IN_INTERPRETER
from bigpool.proof.verdict import SKIPPED, Run, listed

if TYPE_CHECKING:
    from bigpool.proof.matrix import Proof, Unit
    from bigpool.proof.runner import Machine, Options

SCHEMA = "bigpool-proof/1"
SCHEMA_FILE = Path(__file__).with_name("record.schema.json")
LOG_LINES = 40


def build(
    *,
    options: Options,
    machine: Machine,
    jobs: int,
    seconds: float,
    peak_rss_mib: int,
    arms: Sequence[Mapping[str, Any]],
    loops: Sequence[str],
    found: Sequence[Mapping[str, Any]],
    units: Sequence[Unit],
    proof: Proof,
    summary: str,
    status: int,
) -> dict[str, Any]:
    probe = machine.probe
    return {
        "schema": SCHEMA,
        "bigpool": {"version": __version__, **_git()},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": [shorten_paths(word) for word in options.command],
        "backend": "interpreter" if machine.interpreted else "cuda",
        "machine": {"cpu": _cpu_model(), "cores": os.cpu_count(), "system": platform.system(), "gpu": probe["gpu"]},
        "versions": {"bigpool": __version__, **probe["versions"], "cuda": probe["cuda"]},
        "jobs": jobs,
        "seconds": round(seconds, 2),
        "peak_rss_mib_of_one_run": peak_rss_mib,
        "arms": list(arms),
        "cases": [
            {"name": unit.case["name"], "op": unit.case["op"], "describe": unit.case["describe"], "dtype": unit.dtype}
            for unit in units
        ],
        "runs": [_run(run) for run in proof.runs],
        "verdicts": [verdict.to_json() for verdict in proof.verdicts],
        "notes": list(machine.notes),
        "not_exercised": not_exercised(found, units, proof, machine, loops),
        "summary": summary,
        "status": status,
    }


def not_exercised(
    found: Sequence[Mapping[str, Any]], units: Sequence[Unit], proof: Proof, machine: Machine, loops: Sequence[str]
) -> list[str]:
    """What nobody may take for proven. It is printed with every result."""
    lines = []
    verdicts = proof.verdicts
    if machine.interpreted:
        triton = machine.probe["versions"]["triton"]
        wrong = "/".join(dict.fromkeys(WRONG_IN_INTERPRETER.values()))
        lines.append("compiled kernels on any card: this was Triton's interpreter")
        lines.append(f"{wrong} arithmetic: the interpreter of triton {triton} computes it wrongly without an error")
    else:
        gpu = machine.probe["gpu"]
        lines.append(f"cards other than {gpu['name']} (sm{gpu['sm']})")
    lines.append("CUDA graph capture and replay, several streams, several devices")
    if machine.interpreted and loops:
        lines.append(
            "32-bit wraps of loop variables: the interpreter counts `for i in range(...)` with Python ints, "
            "whose products with constants do not wrap "
            f"({listed(loops, most=8)})"
        )
    lines += list(dict.fromkeys(line for unit in units for line in unit.case.get("not_exercised", ())))
    near = _below_unsigned(proof)
    if near:
        lines.append(f"indices that wrap at 2^32 elements (uint32): nothing lies that far in {', '.join(near)}")
    lines += [f"case {verdict.case}: skipped: {verdict.findings[0]}" for verdict in verdicts if verdict.status == SKIPPED]
    names = {unit.case["name"] for unit in units}
    left_out = [case["name"] for case in found if case["name"] not in names]
    if left_out:
        lines.append(f"cases that were not asked for: {', '.join(left_out)}")
    lines += _left_out_dtypes(found, units)
    no_oracle = sorted({verdict.case for verdict in verdicts if not verdict.oracle and verdict.status != SKIPPED})
    if no_oracle:
        lines.append(f"the values themselves, without an oracle only the placements are compared: {', '.join(no_oracle)}")
    unjudged = sorted({(verdict.case, name) for verdict in verdicts for name in verdict.unjudged})
    if unjudged:
        texts = ", ".join(f"{name} of {case}" for case, name in unjudged)
        lines.append(f"the values of outputs that the oracle leaves out, of which only the placements are compared: {texts}")
    return lines


def _below_unsigned(proof: Proof) -> list[str]:
    """Cases in whose run at the top no tensor that is read passes 2^32 elements."""
    reached: dict[str, int] = {}
    for run in proof.runs:
        if run.placement == "top" and run.arm == proof.fixed.name and run.tensors:
            read = [tensor for tensor in run.tensors if tensor["role"] == "read"]
            largest = max(tensor["max_offset"] for tensor in read or run.tensors)
            reached[run.case] = max(largest, reached.get(run.case, 0))
    return [case for case, offset in reached.items() if offset < 2**32]


def _left_out_dtypes(found: Sequence[Mapping[str, Any]], units: Sequence[Unit]) -> list[str]:
    by_dtype: dict[str, list[str]] = {}
    run = {(unit.case["name"], unit.dtype) for unit in units}
    names = {unit.case["name"] for unit in units}
    for case in found:
        for dtype in case["dtypes"]:
            if case["name"] in names and (case["name"], dtype) not in run:
                by_dtype.setdefault(dtype, []).append(case["name"])
    return [f"{dtype}: {'all cases' if len(cases) == len(names) else ', '.join(cases)}" for dtype, cases in by_dtype.items()]


def load(path: Path) -> dict[str, Any]:
    """A record from a file; one of another schema is refused."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ProofError(f"--from-json: expected a record of bigpool prove --json, got {path}, which does not exist") from None
    except OSError as error:
        raise ProofError(f"--from-json: expected a record of bigpool prove --json, got {path}: {error.strerror}") from None
    except ValueError as error:
        raise ProofError(
            f"--from-json: expected a record of bigpool prove --json, got {path}, which is no JSON: {error}"
        ) from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise ProofError(f"--from-json: expected schema {SCHEMA}, got {schema!r} in {path}; make the record anew with --json")
    fault = _schema_fault(data)
    if fault:
        raise ProofError(f"--from-json: expected a record that follows {SCHEMA}, got {path}: {fault}; make it anew with --json")
    return dict(data)


def _schema_fault(data: Mapping[str, Any]) -> str:
    """What breaks the schema, or ""; without jsonschema only missing keys are seen."""
    schema = json.loads(SCHEMA_FILE.read_text())
    try:
        import jsonschema
    except ModuleNotFoundError:
        missing = [key for key in schema["required"] if key not in data]
        return f"{', '.join(missing)} missing" if missing else ""
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(data))
    if error is None:
        return ""
    text = " ".join(error.message.split())
    return f"{error.json_path}: {text if len(text) <= 200 else text[:197] + '...'}"


def _run(run: Run) -> dict[str, Any]:
    data = run.to_json()
    data["log"] = "" if run.outcome == "ok" else shorten_paths("\n".join(run.log.splitlines()[:LOG_LINES]))
    data["detail"] = shorten_paths(run.detail)
    return data


def shorten_paths(text: str) -> str:
    """Cuts absolute paths down to what follows a folder of sys.path, else to the file name: a record is to be shown around."""
    roots = sorted((path.rstrip("/") + "/" for path in sys.path if path.startswith("/")), key=len, reverse=True)

    def short(found: re.Match[str]) -> str:
        path = found[0]
        root = next((root for root in roots if path.startswith(root)), None)
        return path[len(root) :] if root is not None else path.rpartition("/")[2]

    return re.sub(r"(?<![\w.])/[\w.+~-]+(?:/[\w.+~-]+)+", short, text)


def _git() -> dict[str, Any]:
    """Sha and dirty flag of the checkout that this package is run from; None for an installed one."""
    root = Path(__file__).resolve().parents[3]
    nothing = {"git_sha": None, "git_dirty": None}
    if not (root / ".git").exists() or not (root / "src" / "bigpool").is_dir():
        return nothing
    try:
        sha = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        dirt = subprocess.run(["git", "-C", str(root), "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return nothing
    return {"git_sha": sha.stdout.strip(), "git_dirty": bool(dirt.stdout.strip())}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or "unknown"
    )
