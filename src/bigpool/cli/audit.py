"""`bigpool audit`: find 32-bit indices in Triton kernels, with the size at which each breaks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ArgumentError

if TYPE_CHECKING:
    from bigpool.audit.fix import Fixes
    from bigpool.audit.launch.script import Job
    from bigpool.audit.run import Options, Report

FORMATS = ("full", "concise", "json", "sarif", "github")
PROGRESS_FROM = 200
LAUNCHES_FROM = 5


# What comes after the script of --run is the script's.
RUN = "--run"
ONLY_SOURCE = {"fix_safe": "--fix", "fix_all": "--unsafe-fixes", "diff": "--diff"}
ONLY_LAUNCH = {"target": "--target", "no_execute": "--no-execute", "confirm": "--confirm"}


class Audit(click.Command):
    """Leaves what follows --run alone: `--run SCRIPT --pages 100` passes --pages to SCRIPT."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        program: list[str] | None = None
        for place, word in enumerate(args):
            if word == "--":
                break
            if word == RUN or word.startswith(RUN + "="):
                program = [*([word[len(RUN) + 1 :]] if word != RUN else []), *args[place + 1 :]]
                args = args[:place]
                break
        rest = super().parse_args(ctx, args)
        ctx.params["program"] = program
        return rest


@click.command(cls=Audit, context_settings={"max_content_width": 110})
@click.argument("paths", nargs=-1, metavar="PATH...")
@click.option("--format", "style", metavar="FORMAT", default="full", show_default=True, help=f"One of {', '.join(FORMATS)}.")
@click.option("--notes", is_flag=True, help="Show notes too: what no card can reach, and what could not be followed.")
@click.option(
    "--assume", "assumptions", multiple=True, metavar="BOUND|FILE.toml", help="A bound, such as 'page < 2**20'. Repeatable."
)
@click.option("--at", multiple=True, metavar="NAME=N", help="The value of a name in bounds: num_pages=100_000. Repeatable.")
@click.option("--max-memory", default="288GiB", show_default=True, metavar="SIZE", help="The largest tensor that can exist.")
@click.option("--baseline", type=click.Path(path_type=Path), metavar="FILE", help="Report only what FILE does not know.")
@click.option("--write-baseline", type=click.Path(path_type=Path), metavar="FILE", help="Write a baseline of today's findings.")
@click.option("--fail-on", metavar="CONFIDENCE", default="low", show_default=True, help="What exits 1: low, medium, high, never.")
@click.option("--fix", "fix_safe", is_flag=True, help="Apply the safe fixes.")
@click.option("--unsafe-fixes", "fix_all", is_flag=True, help="Apply all fixes.")
@click.option("--diff", is_flag=True, help="Print what the fixes would change and write nothing.")
@click.option(
    "--run",
    "run_",
    is_flag=True,
    help="Run SCRIPT ARGS... (-m MODULE ARGS...), the rest of the line, and audit what it launches.",
)
@click.option("--target", metavar="BACKEND:ARCH", help="With --run: what to compile for, such as hip:gfx942.")
@click.option("--no-execute", is_flag=True, help="With --run: record launches, execute none.")
@click.option("--confirm", is_flag=True, help="With --run: put each finding to the test, by a launch at its wall.")
def audit(paths: tuple[str, ...], style: str, notes: bool, **chosen: Any) -> int:
    """Find 32-bit indices in Triton kernels, with the size at which each breaks.

    Reads Python files and folders; imports nothing and runs nothing. For every integer operation of 32 bits or fewer that
    an address, a mask or a loop bound is made of: can it leave its range, and from which size on? A comment
    `# bigpool: ignore[BP101] reason` suppresses a finding, `# bigpool: assume page < 2**20, reason` bounds a value.

    With --run it runs a script instead and audits what Triton is asked to compile. That needs Triton, but no GPU: without one
    nothing is executed. Options come before --run.

    \b
    Examples:
      bigpool audit src/
      bigpool audit src/ --assume "block_table < num_pages" --at num_pages=100_000
      bigpool audit kernels.py --fix --diff
      bigpool audit src/ --format sarif > audit.sarif
      bigpool audit --run bench.py --pages 100
      bigpool audit --confirm --run bench.py --pages 100
      bigpool audit --format json --run -m my_package.bench

    Exit status: 0 clean, 1 findings, 2 could not run. With --fail-on high, findings of less confidence are shown and exit 0.
    """
    if style not in FORMATS:
        raise ArgumentError("bigpool audit", f"--format: expected one of {', '.join(FORMATS)}, got {style!r}; full is for people")
    if chosen["program"] is not None:
        return _launched(paths, style, notes, chosen)
    if lost := [name for key, name in ONLY_LAUNCH.items() if chosen[key]]:
        raise ArgumentError("bigpool audit", f"{lost[0]}: expected --run with it, got none; add --run SCRIPT, or leave it out")
    if not paths:
        raise ArgumentError("bigpool audit", "PATH: expected a file or a folder, got nothing; such as bigpool audit src/")
    from bigpool.audit import baseline
    from bigpool.audit.run import audit as run

    files = [Path(path) for path in paths]
    options = _options(chosen)
    report = run(files, options)
    if chosen["write_baseline"] is not None:
        chosen["write_baseline"].write_text(baseline.written(report), "utf-8")
    if chosen["fix_safe"] or chosen["fix_all"] or chosen["diff"]:
        return _fix(files, options, report, chosen, style, notes)
    _show(report, style, notes)
    return 0 if chosen["write_baseline"] is not None and report.status == 1 else report.status


def _launched(paths: tuple[str, ...], style: str, notes: bool, chosen: dict[str, Any]) -> int:
    """The launch front end."""
    if paths:
        text = f"PATH: expected nothing with --run, got {paths[0]!r}; audit source and scripts one at a time"
        raise ArgumentError("bigpool audit", text)
    if lost := [name for key, name in ONLY_SOURCE.items() if chosen[key]]:
        text = f"{lost[0]}: expected no --run with it, got both; fix the source: bigpool audit PATH {lost[0]}"
        raise ArgumentError("bigpool audit", text)
    from bigpool.audit.launch.script import Job, audit_script

    program, module = chosen["program"], chosen["program"][:1] == ["-m"]
    execute = False if chosen["no_execute"] else None
    target, known = chosen["target"], chosen["write_baseline"]
    job = Job(tuple(program[module:]), module, target, execute, style, notes, known)
    if chosen["confirm"]:
        return _confirmed(job, _options(chosen))
    return audit_script(job, _options(chosen))


def _confirmed(job: Job, options: Options) -> int:
    from bigpool.confirm.command import confirm_script

    if job.write_baseline is not None:
        text = "--confirm: expected no --write-baseline with it, got both; a baseline needs no confirmation"
        raise ArgumentError("bigpool audit", text)
    return confirm_script(job, options, lambda text: click.echo(text, err=True))


def _options(chosen: dict[str, Any]) -> Options:
    from bigpool.audit import assume, baseline
    from bigpool.audit.finding import FAIL_ON
    from bigpool.audit.run import Options

    known = baseline.read(chosen["baseline"]) if chosen["baseline"] is not None else frozenset()
    memory = assume.memory(chosen["max_memory"])
    if chosen["fail_on"] not in FAIL_ON:
        text = f"--fail-on: expected one of {', '.join(FAIL_ON)}, got {chosen['fail_on']!r}; low counts every finding"
        raise ArgumentError("bigpool audit", text)
    progress, fail_on = _progress(chosen["program"] is not None), FAIL_ON[chosen["fail_on"]]
    bounds = chosen["assumptions"], chosen["at"]
    return Options(*bounds, max_memory=memory, baseline=known, progress=progress, fail_on=fail_on)


def _fix(files: list[Path], options: Options, report: Report, chosen: dict[str, Any], style: str, notes: bool) -> int:
    from bigpool.audit.fix import fixes
    from bigpool.audit.run import audit as run

    result: Fixes = fixes(files, options, report, chosen["fix_all"])
    if chosen["diff"]:
        click.echo(result.diff(), nl=False)
        return 1 if result.files or result.left else 0
    for path, (_, after) in result.files.items():
        path.write_bytes(after)
    report = run(files, options)
    _show(report, style, notes)
    click.echo(f"fixed {result.fixed:,} of {result.fixed + len(result.left):,} findings in {len(result.files):,} files", err=True)
    return report.status


def _show(report: Report, style: str, notes: bool) -> None:
    from bigpool.audit.report import FORMATS as formats

    for line in formats[style](report, notes):
        click.echo(line)


class _Progress:
    """One line on a terminal. Kernels are read in milliseconds; a specialisation is compiled, which takes half a second."""

    def __init__(self, launched: bool) -> None:
        self.least, self.step, self.what = (LAUNCHES_FROM, 1, "specialisations") if launched else (PROGRESS_FROM, 50, "kernels")
        self.open = False

    def __call__(self, done: int, total: int) -> None:
        """`total` is 0 while files are read: nobody knows how many there are. (0, 0) is the end."""
        if total == 0 and done and done % PROGRESS_FROM == 0:
            self._show(f"{done:,} files read")
        elif total >= self.least and (done % self.step == 0 or done == total):
            self._show(f"{done:,} of {total:,} {self.what}")
        if total == done:
            self.end()

    def _show(self, text: str) -> None:
        click.echo(f"\r{text:<40}", nl=False, err=True)
        self.open = True

    def end(self) -> None:
        """What follows, a report or an error, starts on a line of its own."""
        if self.open:
            click.echo("", err=True)
        self.open = False


def _progress(launched: bool) -> _Progress | None:
    if not sys.stderr.isatty():
        return None
    progress = _Progress(launched)
    click.get_current_context().call_on_close(progress.end)
    return progress
