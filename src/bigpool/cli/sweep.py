"""`bigpool sweep`: find, confirm, fix, prove and price, in one go and on a copy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from ..errors import ArgumentError

STYLES = {"head": "bold", "plain": "", "good": "green", "bad": "red", "dim": "dim"}


class Sweep(click.Command):
    """Leaves what follows the script alone: `sweep SCRIPT --pages 100` passes --pages to SCRIPT."""

    allow_interspersed_args = False


@click.command(cls=Sweep, context_settings={"max_content_width": 110})
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the record (bigpool-sweep/1).")
@click.option("--markdown", type=click.Path(path_type=Path), metavar="FILE", help="Write the report as Markdown.")
@click.option("--write", is_flag=True, help="Put the fix into your files, once it is proven. Without it they are left alone.")
@click.option("--repeats", default=100, show_default=True, metavar="N", help="Rounds of timing.")
@click.option("--assume", "assumptions", multiple=True, metavar="BOUND|FILE.toml", help="As of bigpool audit. Repeatable.")
@click.option("--at", multiple=True, metavar="NAME=N", help="As of bigpool audit. Repeatable.")
@click.option("--max-memory", default="288GiB", show_default=True, metavar="SIZE", help="The largest tensor that can exist.")
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def sweep(script: str, arguments: tuple[str, ...], **chosen: Any) -> int:
    """Find 32-bit faults in what SCRIPT launches, confirm, fix, prove and price them.

    Runs SCRIPT ARGS... once and keeps what it launched. Every fault that the audit finds is put to the test: the same launch
    with its page ids, rows or programs moved just below the wall, to it, and far above it, in processes of their own. What is
    confirmed is fixed on a copy; the fixed kernel must give the bits of the captured launch in all these places; and it is
    timed against the old one. With a GPU it runs there; without one in Triton's interpreter, whose times mean nothing for a GPU.

    \b
    Examples:
      bigpool sweep bench.py --pages 100
      bigpool sweep --json sweep.json --markdown sweep.md bench.py
      bigpool sweep --write bench.py
      bigpool sweep -m my_package.bench

    Exit status: 0 no fault, 1 confirmed faults, 2 could not run, or no fault could be judged.
    """
    _warn_of_options_behind(script, arguments)
    if chosen["repeats"] < 8:
        raise ArgumentError("bigpool sweep", f"--repeats: expected at least 8, got {chosen['repeats']}; 100 is the default")
    from bigpool.audit import assume
    from bigpool.audit.launch.script import Job
    from bigpool.audit.run import Options
    from bigpool.confirm.command import prepared, recorded
    from bigpool.sweep import report as words
    from bigpool.sweep import sweep as steps

    options = Options(chosen["assumptions"], chosen["at"], max_memory=assume.memory(chosen["max_memory"]))
    job = Job((script, *arguments), chosen["module"])
    device = prepared(job, options, "bigpool sweep")
    found, report, failed = recorded(job, options, "bigpool sweep", say)
    made = steps.sweep(found, report, Path(script).name, device, options, chosen["repeats"], say)
    made.failed = failed
    if chosen["write"] and made.proven:
        steps.write(made)
    _show(made)
    if chosen["json_file"] is not None:
        chosen["json_file"].write_text(json.dumps(words.as_record(made), indent=1) + "\n", "utf-8")
    if chosen["markdown"] is not None:
        chosen["markdown"].write_text(words.as_markdown(made), "utf-8")
    return 0 if made.written else made.status


def _warn_of_options_behind(script: str, arguments: tuple[str, ...]) -> None:
    """An option of sweep after SCRIPT is the script's: right for --pages, hardly ever meant for --json."""
    ours = {name for option in sweep.params for name in option.opts if name.startswith("--")}
    behind = [argument for argument in arguments if argument.split("=")[0] in ours]
    if behind:
        say(f"note: {', '.join(behind)} after {script} went to the script; options of bigpool sweep come before it")


def say(text: str) -> None:
    """Progress, on stderr."""
    click.echo(text, err=True)


def _show(made: Any) -> None:
    from rich.console import Console
    from rich.text import Text

    from bigpool.sweep.report import lines

    console = Console(soft_wrap=True, highlight=False, file=sys.stdout)
    for kind, text in lines(made):
        style = STYLES.get(kind, "")
        if kind == "diff":
            style = "green" if text.startswith("+") else "red" if text.startswith("-") else ""
        console.print(Text(text, style=style))
