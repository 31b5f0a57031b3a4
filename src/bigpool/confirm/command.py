"""`bigpool audit --confirm --run SCRIPT`: the audit of what a script launches, each finding put to the test."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigpool.errors import ArgumentError

if TYPE_CHECKING:
    from bigpool.audit.launch.script import Job
    from bigpool.audit.run import Options, Report
    from bigpool.confirm.outcome import Confirmation
    from bigpool.confirm.record import Recorder

STOPPED = 2


def prepared(job: Job, options: Options, command: str) -> str:
    """The device to run on: "cuda", or "cpu", and then kernels run in Triton's interpreter. To be called before triton is loaded.

    Raises:
        ArgumentError: there is no such script, or a bound cannot be read. Then nothing is changed.
    """
    from bigpool.audit import assume

    if not job.program:
        raise ArgumentError(command, f"SCRIPT: expected a script to run, got nothing; such as {command} bench.py --pages 100")
    if not job.module and not Path(job.program[0]).is_file():
        raise ArgumentError(command, f"SCRIPT: expected a file, got {job.program[0]!r}; pass -m to run a module")
    assume.read(options.assumptions, assume.at(options.at))
    try:
        import torch
    except ModuleNotFoundError as missing:
        raise _not_installed(command, "torch") from missing
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "cuda"
    if job.execute is not False:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    return "cpu"


def _not_installed(command: str, name: str) -> ArgumentError:
    remedy = "pip install 'bigpool[kernels]', or 'bigpool[cpu]' without a GPU"
    return ArgumentError(command, f"expected {name} to be installed, got no such module; {remedy}")


def recorded(job: Job, options: Options, command: str, say: Callable[[str], None]) -> tuple[Recorder, Report, str]:
    """Runs the script and audits what it launched; the third value is how the script failed, if it did.

    Raises:
        ArgumentError: it launched nothing.
    """
    try:
        from bigpool.confirm.record import run_recorded

        say(f"running {Path(job.program[0]).name}")
        found, failed = run_recorded(job)
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise
        raise _not_installed(command, "triton") from missing
    if not found.launches:
        why = f" (the script stopped early: {failed})" if failed else ""
        raise ArgumentError(command, f"no Triton kernel was launched{why}; run a script that launches one")
    say(f"auditing {len(found.launches):,} kinds of launches")
    with found.importable():
        return found, found.report(options), failed


def confirm_script(job: Job, options: Options, say: Callable[[str], None]) -> int:
    """Runs, audits, confirms and prints. Returns 1 if a finding is left that was not refuted, 0 if none is, 2 if nothing ran."""
    from bigpool.audit.report import FORMATS
    from bigpool.confirm.confirm import Confirmer

    device = prepared(job, options, "bigpool audit")
    found, report, failed = recorded(job, options, "bigpool audit", say)
    with found.importable(), Confirmer(device, say) as confirmer:
        made = confirmer.confirm(report, found)
    told(report, made)
    text = list(FORMATS[job.style](report, job.notes))
    print("\n".join(text if job.style != "json" else [with_confirmations("\n".join(text), made)]))
    if failed:
        print(f"the script stopped early: {failed}; what it launched until then was audited", file=sys.stderr)
    if report.status != 1:
        return STOPPED if failed else report.status
    return 0 if made and all(one.outcome == "refuted" for one in made) else 1


def told(report: Report, made: list[Confirmation]) -> None:
    """Adds what became of each finding to its notes."""
    known = {one.id: one for one in made}
    for finding in report.findings:
        one = known.get(report.fingerprint(finding))
        if one is not None:
            finding.notes.append(f"{one.outcome} ({one.id}, {one.device}): {one.text}")


def with_confirmations(text: str, made: list[Confirmation]) -> str:
    """The JSON report with a "confirmation" in each finding that has one."""
    data: dict[str, Any] = json.loads(text)
    known = {one.id: one for one in made}
    for finding in data["findings"]:
        one = known.get(finding["fingerprint"])
        finding["confirmation"] = one.to_json() if one is not None else None
    return json.dumps(data, indent=1)
