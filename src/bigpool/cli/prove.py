"""`bigpool prove`: run the cases of this package, or of anybody's kernel, and say what is proven."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from ..errors import ArgumentError

OUT = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command(context_settings={"max_content_width": 110})
@click.argument("file", required=False, metavar="[MY_KERNEL.py]")
@click.option("--case", "cases", multiple=True, metavar="NAME", help="Run this case only. Repeatable.")
@click.option("--list", "list_only", is_flag=True, help="List the cases and run nothing.")
@click.option("--all", "everything", is_flag=True, help="Every case in every dtype, not the fast subset in one dtype.")
@click.option("--mutants", is_flag=True, help="Remove the widenings one at a time: each removal must be seen by a case.")
@click.option("--before", metavar="FILE|DIR|git:REV", help="The version with the bug: it must fail at the top.")
@click.option("--after", metavar="FILE|DIR|git:REV", help="The fixed version: it must hold everywhere.")
@click.option("--device", metavar="cpu|cuda|auto", default="auto", show_default=True, help="cpu is Triton's interpreter.")
@click.option("--jobs", metavar="N", type=click.IntRange(1), help="Runs at a time.  [default: one a core, at most 3; on a GPU 8]")
@click.option("--timeout", metavar="SECONDS", type=float, default=300.0, show_default=True, help="Limit of one run.")
@click.option("--json", "json_file", type=OUT, metavar="FILE", help="Write the record (schema bigpool-proof/1).")
@click.option("--from-json", "from_json", type=OUT, metavar="FILE", help="Show a record again and run nothing.")
@click.option("--figure", type=OUT, metavar="FILE.svg|png", help="Draw the main result from the record.")
def prove(
    file: str | None,
    list_only: bool,
    mutants: bool,
    json_file: Path | None,
    from_json: Path | None,
    figure: Path | None,
    **chosen: Any,
) -> int:
    """Prove that kernels are right at any pool size, and that the proof would have seen the bug.

    Every case runs with the same bytes at the bottom, across the wall and at the top of a huge pool whose unused pages are
    traps. The bits must be the same, agree with a float64 oracle, and leave what lies around the pool untouched. The same
    kernels without their 64-bit widening must fail, each run in a process of its own. Without a GPU, Triton's interpreter
    runs a fast subset. With MY_KERNEL.py the cases are yours: see docs/prove-your-kernel.md.

    \b
    Examples:
      bigpool prove
      bigpool prove --case ragged --json proof.json
      bigpool prove my_kernel.py --before git:HEAD~1
      bigpool prove my_kernel.py --before old_kernel.py --after new_kernel.py
      bigpool prove --from-json proof.json --figure proof.svg

    Exit status: 0 proven, 1 refuted or without power, 2 could not run, 130 interrupted.
    """
    _check(file, list_only, mutants, json_file, from_json, figure, chosen)
    if list_only:
        return _list(file)
    if mutants:
        return _mutants(file, chosen)
    if from_json is not None:
        from bigpool.proof import record

        data = record.load(from_json)
    else:
        data = _run(file, chosen)
    from bigpool.proof import report

    report.show(data)
    if json_file is not None:
        json_file.write_text(json.dumps(data, indent=1) + "\n")
    if figure is not None:
        from bigpool.proof.figure import draw

        draw(data, figure)
    return int(data["status"])


def _check(
    file: str | None,
    list_only: bool,
    mutants: bool,
    json_file: Path | None,
    from_json: Path | None,
    figure: Path | None,
    chosen: dict[str, Any],
) -> None:
    """What can be known to be wrong before minutes are spent on it."""
    faults = []
    if chosen["device"] not in ("cpu", "cuda", "auto"):
        faults.append(f"--device: expected cpu, cuda or auto, got {chosen['device']!r}; auto takes the GPU if there is one")
    if not chosen["timeout"] > 0:
        faults.append(f"--timeout: expected more than 0 seconds, got {chosen['timeout']:g}; the default is 300")
    if from_json is not None and file is not None:
        faults.append(f"--from-json: expected no case file beside it, got {file}; a record holds its own cases")
    faults += _ignored()
    if figure is not None and not (list_only or mutants):
        from bigpool.proof.figure import check_target

        check_target(figure)
    for option, target in (("--json", json_file), ("--figure", figure)):
        if target is not None and not target.absolute().parent.is_dir():
            faults.append(f"{option}: expected a file in an existing folder, got {target}; make the folder first")
        elif target is not None and (why := _unwritable(target)):
            faults.append(f"{option}: expected a file that can be written, got {target}: {why}; name another one")
    if faults:
        raise ArgumentError("bigpool prove", *faults)


# What each of these would pass over in silence.
ALONE = {
    "list_only": ("--list", ()),
    "from_json": ("--from-json", ("json_file", "figure")),
    "mutants": ("--mutants", ("cases", "everything", "device", "jobs", "timeout")),
}


def _ignored() -> list[str]:
    """Options that were given beside one that has no use for them."""
    context = click.get_current_context()
    flags = {param.name: param.opts[0] for param in context.command.params if isinstance(param, click.Option)}
    given = [name for name in flags if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    first = next((name for name in ALONE if name in given), None)
    if first is None:
        return []
    option, useful = ALONE[first]
    others = [flags[name] for name in given if name != first and name not in useful]
    return [f"{option}: expected no {other} beside it, got both; leave it out, it would be ignored" for other in others]


def _unwritable(target: Path) -> str:
    """Why a file cannot be written, or ""; leaves no file behind."""
    existed = target.exists()
    try:
        target.open("ab").close()
    except OSError as error:
        return str(error.strerror or error)
    if not existed:
        target.unlink()
    return ""


def _run(file: str | None, chosen: dict[str, Any]) -> dict[str, Any]:
    from bigpool.proof.progress import listener
    from bigpool.proof.runner import Options, prove

    options = Options(file=file, command=("bigpool", *sys.argv[1:]), **chosen)
    with listener() as shown:
        return prove(options, shown)


def _list(file: str | None) -> int:
    from bigpool.proof.runner import Options, list_cases

    cases = list_cases(Options(file=file))
    width = max(len(case["name"]) for case in cases)
    for case in cases:
        fast = "" if case["fast"] else "  [not in the fast subset]"
        click.echo(f"{case['name']:<{width}}  {case['describe']} ({', '.join(case['dtypes'])}){fast}")
    return 0


def _mutants(file: str | None, chosen: dict[str, Any]) -> int:
    from bigpool.proof.mutants import survey
    from bigpool.proof.runner import Options

    found = survey(Options(file=file, **chosen))
    for mutant in found:
        place = f"{mutant.module}:{mutant.line}:{mutant.col}"
        seen = f"seen by {mutant.seen_by}, {mutant.how}" if mutant.seen_by else "NOT SEEN by any case"
        click.echo(f"{place}  without {mutant.text}  {seen}")
    missed = sum(not mutant.seen_by for mutant in found)
    verdict = "not proven" if missed else "proven"
    click.echo(f"\n{verdict}: {len(found) - missed} of {len(found)} widenings are needed, and a case sees it when one is missing")
    return 1 if missed else 0
