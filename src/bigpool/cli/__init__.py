"""The command line. A subcommand lives in the module of its name and is imported only when it is run."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

import click

from .. import EXTRAS_REMEDY, __version__
from ..errors import ArgumentError, BigpoolError

EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + 2
EXIT_BROKEN_PIPE = 128 + 13

# name -> the line of `bigpool --help`. `bigpool.cli.NAME` holds the click command NAME.
SUBCOMMANDS = {
    "bench": "Price a change: arms timed in turn, verdicts in words.",
    "audit": "Find 32-bit indices in Triton kernels, with the size at which each breaks.",
    "prove": "Prove that kernels are right at any pool size.",
    "report": "Make one HTML page from records.",
    "rule": "Print what a rule of bigpool audit means.",
    "sweep": "Find, confirm, fix, prove and price 32-bit faults in what a script launches.",
    "tune": "Time launch configurations on this card, and write a table of the better ones.",
    "wall": "Print where 32-bit offsets into a paged KV cache wrap.",
}
# What an installation without extras lacks.
OPTIONAL_MODULES = ("torch", "triton", "numpy", "cuda", "matplotlib")


class LazyGroup(click.Group):
    """A group that knows its subcommands by name only."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        command = getattr(import_module(f"bigpool.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in SUBCOMMANDS and not args[0].startswith("-"):
            known = ", ".join(sorted(SUBCOMMANDS))
            raise ArgumentError("bigpool", f"COMMAND: expected one of {known}, got {args[0]!r}; see bigpool --help")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(SUBCOMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 done or proven, 1 refuted, 2 could not run (wrong arguments, missing platform).",
)
@click.version_option(__version__, prog_name="bigpool", message="%(prog)s %(version)s")
def cli() -> None:
    """Attention over paged KV caches that is right at any pool size, and the tools that prove it.

    \b
    Example:
      bigpool wall --page-size 880 --kv-heads 4 --head-dim 256 --dtype bf16
    """


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status. A subcommand may return its own as an int."""
    try:
        status = _run(sys.argv[1:] if args is None else list(args))
        if sys.stdout:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _complain("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # What is still buffered must not raise again when the interpreter shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        return _complain(f"bigpool: {what}{error.strerror or error}", EXIT_USAGE)
    except Exception as error:
        # Exit status 1 means refuted, so that a bug of ours must not end with it.
        if os.environ.get("BIGPOOL_DEBUG") == "1":
            traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return _complain(f"bigpool: internal error, please report it: {text}; BIGPOOL_DEBUG=1 shows where", EXIT_USAGE)
    return status


def _run(args: list[str]) -> int:
    try:
        with cli.make_context("bigpool", args or ["--help"]) as ctx:
            status = cli.invoke(ctx)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.UsageError as error:
        return _complain(_usage_text(error, args), EXIT_USAGE)
    except click.ClickException as error:
        return _complain(error.format_message(), EXIT_USAGE)
    except click.Abort:
        return _complain("interrupted", EXIT_INTERRUPTED)
    except BigpoolError as error:
        return _complain(str(error), EXIT_USAGE)
    except ModuleNotFoundError as missing:
        name = (missing.name or "").partition(".")[0]
        if name not in OPTIONAL_MODULES:
            raise
        text = f"bigpool: expected {name} to be installed, got no such module; {EXTRAS_REMEDY}"
        return _complain(text, EXIT_USAGE)
    return status if isinstance(status, int) else 0


def _usage_text(error: click.UsageError, args: Sequence[str]) -> str:
    """click's own complaints in the house's error grammar."""
    command = "bigpool"
    if error.ctx:
        command = error.ctx.command_path
    elif args and args[0] in SUBCOMMANDS:
        command = f"bigpool {args[0]}"
    see = f"see {command} --help"
    if isinstance(error, click.NoSuchOption):
        near = list(error.possibilities or ())
        hint = f"did you mean {near[0]}?" if near else see
        return f"{command}: {error.option_name}: expected an option of {command}, got an unknown one; {hint}"
    if isinstance(error, click.BadOptionUsage):
        contract = "no value, got one" if "does not take" in error.message else "a value, got nothing"
        return f"{command}: {error.option_name}: expected {contract}; {see}"
    if extra := re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", error.message):
        return f"{command}: arguments: expected no more, got {extra[1]}; {see}"
    return f"{command}: {error.format_message().rstrip('.')}; {see}"


def _complain(text: str, status: int) -> int:
    click.echo(click.style("error: ", fg="red", bold=True) + text, err=True, color=_stderr_colour())
    return status


def _stderr_colour() -> bool | None:
    """False where NO_COLOR asks for it; None leaves it to click, which strips colours from pipes."""
    return False if os.environ.get("NO_COLOR") else None
