"""`bigpool audit`: find 32-bit indices in Triton kernels, with the size at which each breaks."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ArgumentError

if TYPE_CHECKING:
    from bigpool.audit.fix import Fixes
    from bigpool.audit.run import Options, Report

SIZES = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
FORMATS = ("full", "concise", "json", "sarif", "github")
PROGRESS_FROM = 200


@click.command(context_settings={"max_content_width": 110})
@click.argument("paths", nargs=-1, metavar="PATH...")
@click.option("--format", "style", metavar="FORMAT", default="full", show_default=True, help=f"One of {', '.join(FORMATS)}.")
@click.option("--notes", is_flag=True, help="Show notes too: what no card can reach, and what could not be followed.")
@click.option("--assume", "assumptions", multiple=True, metavar="BOUND|FILE.toml", help="A bound, such as 'page < 2**20'. Repeatable.")
@click.option("--at", multiple=True, metavar="NAME=N", help="The value of a name in bounds: num_pages=100_000. Repeatable.")
@click.option("--max-memory", default="288GiB", show_default=True, metavar="SIZE", help="The largest tensor that can exist.")
@click.option("--baseline", type=click.Path(path_type=Path), metavar="FILE", help="Report only what FILE does not know.")
@click.option("--write-baseline", type=click.Path(path_type=Path), metavar="FILE", help="Write a baseline of today's findings.")
@click.option("--fix", "fix_safe", is_flag=True, help="Apply the safe fixes.")
@click.option("--unsafe-fixes", "fix_all", is_flag=True, help="Apply all fixes.")
@click.option("--diff", is_flag=True, help="Print what the fixes would change and write nothing.")
def audit(paths: tuple[str, ...], style: str, notes: bool, **chosen: Any) -> int:
    """Find 32-bit indices in Triton kernels, with the size at which each breaks.

    Reads Python files and folders; imports nothing and runs nothing. For every integer operation of 32 bits or fewer that
    an address, a mask or a loop bound is made of: can it leave its range, and from which size on? A comment
    `# bigpool: ignore[BP101] reason` suppresses a finding, `# bigpool: assume page < 2**20, reason` bounds a value.

    \b
    Examples:
      bigpool audit src/
      bigpool audit src/ --assume "block_table < num_pages" --at num_pages=100_000
      bigpool audit kernels.py --fix --diff
      bigpool audit src/ --format sarif > audit.sarif

    Exit status: 0 clean, 1 findings, 2 could not run.
    """
    if style not in FORMATS:
        raise ArgumentError("bigpool audit", f"--format: expected one of {', '.join(FORMATS)}, got {style!r}; full is for people")
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


def _options(chosen: dict[str, Any]) -> Options:
    from bigpool.audit import baseline
    from bigpool.audit.run import Options

    known = baseline.read(chosen["baseline"]) if chosen["baseline"] is not None else frozenset()
    return Options(chosen["assumptions"], chosen["at"], _size(chosen["max_memory"]), known, progress=_progress())


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


def _size(text: str) -> int:
    found = re.fullmatch(r"\s*([\d_.]+)\s*([a-zA-Z]*)\s*", text)
    unit = SIZES.get(found[2].lower()) if found else None
    try:
        assert found is not None
        assert unit is not None
        return int(float(found[1].replace("_", "")) * unit)
    except (AssertionError, ValueError):
        raise ArgumentError("bigpool audit", f"--max-memory: expected bytes or a size like 288GiB, got {text!r}; pass 288GiB") from None


def _progress() -> Any:
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        if total >= PROGRESS_FROM and (done % 50 == 0 or done == total):
            click.echo(f"\r{done:,} of {total:,} kernels{'' if done < total else chr(10)}", nl=False, err=True)

    return show
