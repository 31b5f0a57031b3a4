"""`bigpool audit --run SCRIPT ARGS...`: runs a script with every Triton launch recorded, then audits what was launched."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import ArgumentError
from .. import assume, baseline
from ..finding import FAIL_ON
from ..judge import DEFAULT_MAX_MEMORY
from ..report import FORMATS
from ..run import Options
from .cache import default_folder
from .capture import Capture, capture

STOPPED = 2
BROKEN_PIPE = 128 + 13
# Formats that a program reads from stdout: there, what the script prints goes to stderr.
MACHINE = ("json", "sarif")


@dataclass(frozen=True, slots=True)
class Job:
    """A script to run and how to audit it.

    Attributes:
        program: the script (or with `module` the name of a module) and its arguments.
        target: what to compile for, such as "hip:gfx942". None: the GPU that is there, else an H100.
        execute: as in `capture`.
        style: a format of the report.
        notes: whether notes are shown.
        write_baseline: a file that gets today's findings.
    """

    program: tuple[str, ...]
    module: bool = False
    target: str | None = None
    execute: bool | None = None
    style: str = "full"
    notes: bool = False
    write_baseline: Path | None = None


def run(job: Job) -> tuple[Capture, str]:
    """Runs the program as `python` would, and returns what it launched and how it failed, if it did."""
    failed = ""
    before = sys.argv, sys.path[:]
    sys.argv = list(job.program)
    with capture(job.target, job.execute) as found, redirect_stdout(sys.stderr if job.style in MACHINE else sys.stdout):
        try:
            if job.module:
                sys.path.insert(0, str(Path.cwd()))
                runpy.run_module(job.program[0], run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(job.program[0]).resolve().parent))
                runpy.run_path(job.program[0], run_name="__main__")
        except SystemExit as stop:
            failed = f"it ended with status {stop.code}" if stop.code not in (None, 0) else ""
        except Exception as error:  # the user's script: what was launched until then is still worth an audit
            where = traceback.extract_tb(error.__traceback__)[-1]
            failed = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        finally:
            sys.argv, sys.path[:] = before
    return found, failed


def audit_script(job: Job, options: Options) -> int:
    """Runs, audits and prints. Returns the exit status.

    Raises:
        ArgumentError: a script, a target or a bound that cannot be read, or nothing was launched.
    """
    if not job.program:
        raise _error("SCRIPT: expected a script to run, got nothing; such as bigpool audit --run bench.py --pages 100")
    if not job.module and not Path(job.program[0]).is_file():
        raise _error(f"SCRIPT: expected a file, got {job.program[0]!r}; pass -m to run a module")
    assume.read(options.assumptions, assume.at(options.at))  # a bound that cannot be read is not worth a run
    try:
        found, failed = run(job)
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise
        remedy = "pip install 'bigpool[kernels]', or 'bigpool[cpu]' without a GPU"
        raise _error(f"expected triton to be installed, got no such module; {remedy}") from missing
    report = found.report(replace(options, variants=job.notes, cache=default_folder()))
    for line in FORMATS[job.style](report, job.notes):
        print(line)
    if failed:
        print(f"the script stopped early: {failed}; what it launched until then was audited", file=sys.stderr)
    if not found.launches:
        remedy = "run a script that launches one, or read the source with bigpool audit PATH"
        raise _error(f"no Triton kernel was launched; {remedy}")
    if job.write_baseline is not None:
        job.write_baseline.write_text(baseline.written(report), "utf-8")
        return STOPPED if failed or report.status == STOPPED else 0
    return STOPPED if failed and not report.faults else report.status


def _error(text: str) -> ArgumentError:
    return ArgumentError("bigpool audit", text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bigpool.audit",
        description="Runs a script, records its Triton launches (without a GPU they are not executed) and audits them. "
        "The same as bigpool audit --run.",
        epilog="Exit status: 0 clean, 1 findings, 2 could not run.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    add("--target", metavar="BACKEND:ARCH", help="compile for cuda:90, hip:gfx942, ...")
    add("--no-execute", action="store_true", help="record launches, execute none")
    add("--format", dest="style", choices=sorted(FORMATS), default="full")
    add("--notes", action="store_true", help="show notes too")
    add("--assume", action="append", default=[], metavar="BOUND", help="such as 'page < 2**20', or a TOML file; repeatable")
    add("--at", action="append", default=[], metavar="NAME=N", help="the value of a name in bounds; repeatable")
    add("--max-memory", default=str(DEFAULT_MAX_MEMORY), metavar="SIZE", help="the largest tensor that can exist")
    add("--baseline", type=Path, metavar="FILE", help="report only what FILE does not know")
    add("--write-baseline", type=Path, metavar="FILE", help="write a baseline of today's findings")
    add("--fail-on", choices=sorted(FAIL_ON), default="low", help="the least confidence that makes exit status 1")
    add("program", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="the script and its arguments")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    execute = False if chosen.no_execute else None
    job = Job(tuple(chosen.program), chosen.module, chosen.target, execute, chosen.style, chosen.notes, chosen.write_baseline)
    try:
        known = baseline.read(chosen.baseline) if chosen.baseline is not None else frozenset()
        memory = assume.memory(chosen.max_memory)
        bounds, values, fail_on = tuple(chosen.assume), tuple(chosen.at), FAIL_ON[chosen.fail_on]
        status = audit_script(job, Options(bounds, values, max_memory=memory, baseline=known, fail_on=fail_on))
        sys.stdout.flush()
    except ArgumentError as error:
        print(f"error: {error}", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:
        # What is still buffered must not raise again when the interpreter shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return status
