"""`bigpool bench`: what a change costs, measured in one process, with a verdict in words."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ArgumentError
from ._bench_serving import serving
from ._files import write_whole

if TYPE_CHECKING:
    from ..bench.report import Report

OUT = click.Path(dir_okay=False, writable=True, path_type=Path)
IN = click.Path(dir_okay=False, path_type=Path)
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
REPEATS = {"cuda": 100, "cpu": 20}


class Group(click.Group):
    """Says what there is where a name is unknown."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and not args[0].startswith("-"):
            known = ", ".join(sorted(self.commands))
            raise ArgumentError("bigpool bench", f"COMMAND: expected one of {known}, got {args[0]!r}; see bigpool bench --help")
        return super().resolve_command(ctx, args)


@click.group(cls=Group, invoke_without_command=True, context_settings={"max_content_width": 110})
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Price a change: two versions of a kernel, or our kernel and its peers, timed in turn in one process.

    \b
    Examples:
      bigpool bench verify --before git:HEAD~1
      bigpool bench verify --peers --json speed.json
      bigpool bench compare old.json new.json
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


bench.add_command(serving)


SHARED = (
    click.option("--before", metavar="SPEC", help="The version that is compared with.  [default with --after: shipped]"),
    click.option("--after", metavar="SPEC", help="The version that is priced.  [default with --before: shipped]"),
    click.option("--arm", "arms", multiple=True, metavar="NAME=SPEC", help="Any number of versions; the first is compared with."),
    click.option("--peers", is_flag=True, help="Time every installed peer that is right, too."),
    click.option("--aa/--no-aa", default=True, show_default=True, help="Run the first arm twice: the noise floor."),
    click.option("--repeats", metavar="N", type=int, help="Rounds.  [default: 100 on a GPU, 20 on a CPU]"),
    click.option(
        "--method", metavar="graph|events|cpu", help="CUDA-graph replay, events or perf_counter.  [default: graph, or cpu]"
    ),
    click.option(
        "--margin", metavar="PERCENT", type=float, default=0.5, show_default=True, help="Less is no cost, however certain."
    ),
    click.option("--dtype", metavar="bf16|fp16|fp32", help="[default: bf16 on a GPU, fp16 on a CPU]"),
    click.option("--device", metavar="cpu|cuda|auto", default="auto", show_default=True, help="cpu is Triton's interpreter."),
    click.option("--proof", "proofs", multiple=True, type=IN, metavar="FILE", help="Also require this record of bigpool prove."),
    click.option("--no-gate", is_flag=True, help="Print numbers although a gate is red. They mean nothing."),
    click.option("--json", "json_file", type=OUT, metavar="FILE", help="Write the record (schema bigpool-bench/1)."),
)


def shared(command: Callable[..., int]) -> Callable[..., int]:
    """The options that the commands for our ops have in common."""
    for option in reversed(SHARED):
        command = option(command)
    return command


@bench.command(
    short_help="Time verify attention, and say what a change of it costs.", context_settings={"max_content_width": 110}
)
@click.option(
    "--shapes", multiple=True, metavar="SHAPE", help="Such as b1-q8-kv60000-p880-h24/4-d256. Repeatable.  [default: a table]"
)
@click.option(
    "--original-geometries", "original", is_flag=True, help="The 12 shapes of the original system, pages of 432 and 880."
)
@click.option(
    "--format", "kv_formats", multiple=True, metavar="FORMAT",
    help="Cache of bf16, fp16, fp8_e4m3, int8 or int4. Repeatable.  [default: as --dtype]",
)  # fmt: skip
@shared
def verify(json_file: Path | None, **chosen: Any) -> int:
    """Time verify attention: arms alternate within each round, the L2 cache emptied between runs.

    SPEC is shipped, narrowed (without its 64-bit widenings; narrowed:MODULE without those of one file), a FILE or DIR of
    kernels, git:REV, backend:auto|triton|torch, or peer:NAME. Every arm is first held to a float64 oracle on the tensors that it
    is timed on; where one is wrong, where clocks moved or another process used the GPU, no numbers are given. A verdict is made
    from paired differences with a bootstrap interval (95%), against the difference of the first arm from itself.

    With --format every shape is timed in each of these formats, all in the same rounds, each against the floor of its own bytes,
    and with its time over that of the first of bf16 and fp16 that is named. fp8_e4m3 has a scale per head, int8 and int4 one per
    token and head. bf16 and fp16 are also the dtype of q, --dtype that of q over the others. Peers are given bf16 and fp16 only.

    \b
    Examples:
      bigpool bench verify --format bf16 --format int8 --format fp8_e4m3 --format int4 --arm ours=backend:auto
      bigpool bench verify --before narrowed:_paging --original-geometries --json int64.json
      bigpool bench verify --before git:HEAD~3 --after my_kernels/verify.py --shapes b1-q8-kv128k
      bigpool bench verify --arm a=backend:triton --arm b=peer:fa3
      bigpool bench verify --device cpu --repeats 8

    Exit status: 0 measured, 1 numbers refused, 2 could not run, 130 interrupted.
    """
    return _measure(json_file, chosen, "verify_attention")


@bench.command(
    short_help="Time prefill attention, and say what a change of it costs.", context_settings={"max_content_width": 110}
)
@click.option(
    "--shapes",
    multiple=True,
    metavar="SHAPE",
    help="Such as b1-q2048-kv24000-p880-h24/4-d256-int8. Repeatable.  [default: a table]",
)
@shared
def prefill(json_file: Path | None, **chosen: Any) -> int:
    """Time prefill attention: a chunk of q new tokens after kv - q others. As bigpool bench verify, whose help says what SPEC is.

    A shape ends in exact or int8, the products of q and K, or stands for both. int8 is timed with its passes over the keys.

    \b
    Examples:
      bigpool bench prefill --before narrowed:_paging --shapes b1-kv24000 --shapes b1-kv47000
      bigpool bench prefill --arm ours=backend:triton --arm fa3=peer:fa3 --shapes b1-kv128k-exact

    Exit status: 0 measured, 1 numbers refused, 2 could not run, 130 interrupted.
    """
    return _measure(json_file, chosen | {"original": False, "kv_formats": ()}, "prefill_attention")


def _measure(json_file: Path | None, chosen: dict[str, Any], op: str) -> int:
    options = _options(json_file, chosen, op)
    from ..bench.progress import listener
    from ..bench.report import report
    from ..bench.runner import bench as run

    with listener() as shown:
        data = run(options, shown)
    show_and_save(report(data), data, json_file)
    return int(data["status"])


def show_and_save(report: Any, data: Mapping[str, Any], file: Path | None) -> None:
    """Numbers that took long are shown before anything can go wrong with a file, and written though nobody reads on."""
    try:
        _show(report)
    finally:
        if file is not None:
            write_whole(json.dumps(data, indent=1) + "\n", file)


@bench.command()
@click.argument("a", type=IN, metavar="A.json")
@click.argument("b", type=IN, metavar="B.json")
def compare(a: Path, b: Path) -> int:
    """Compare two records of `bigpool bench verify --json`, or of `bigpool bench serving --json`, arm by arm.

    \b
    Example:
      bigpool bench compare old.json new.json
    """
    from ..bench.serving import record as served

    if served.SCHEMA in (served.schema_of(a), served.schema_of(b)):
        from ..bench.serving.report import compare as of_servers

        _show(of_servers(served.load(a, "A"), served.load(b, "B")))
        return 0
    from ..bench import record
    from ..bench.compare import compare as side_by_side

    _show(side_by_side(record.load(a, "A"), record.load(b, "B")))
    return 0


def _options(json_file: Path | None, chosen: dict[str, Any], op: str) -> Any:
    """What was asked for, with its defaults; what can be known to be wrong is said before minutes are spent on it."""
    _check(json_file, chosen, f"bigpool bench {op.removesuffix('_attention')}")
    if chosen["device"] == "cpu" and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    from ..bench.runner import Options, choose_device

    device = choose_device(chosen["device"])
    if device == "cpu":
        # Read by triton when it is imported, which torch alone does not do.
        os.environ["TRITON_INTERPRET"] = "1"
    return Options(
        shapes=_shapes(chosen["shapes"], chosen["original"], device, op, chosen["kv_formats"]),
        arms=_arms(chosen["before"], chosen["after"], chosen["arms"]),
        aa=chosen["aa"],
        peers=chosen["peers"],
        repeats=chosen["repeats"] or REPEATS[device],
        method=chosen["method"] or ("graph" if device == "cuda" else "cpu"),
        device=device,
        dtype=DTYPES[chosen["dtype"] or ("bf16" if device == "cuda" else "fp16")],
        gated=not chosen["no_gate"],
        margin=chosen["margin"] / 100,
        proofs=chosen["proofs"],
        command=("bigpool", *sys.argv[1:]),
        op=op,
    )


def _check(json_file: Path | None, chosen: dict[str, Any], command: str) -> None:
    from ..bench.shapes import format_faults

    faults = format_faults(chosen["kv_formats"])
    if chosen["device"] not in ("cpu", "cuda", "auto"):
        faults.append(f"--device: expected cpu, cuda or auto, got {chosen['device']!r}; auto takes the GPU if there is one")
    if chosen["dtype"] not in (None, *DTYPES):
        faults.append(f"--dtype: expected {', '.join(DTYPES)}, got {chosen['dtype']!r}; bf16 is what servers use")
    if not chosen["margin"] >= 0:
        faults.append(f"--margin: expected 0 or more percent, got {chosen['margin']:g}; the default is 0.5")
    if chosen["arms"] and (chosen["before"] or chosen["after"]):
        faults.append("--arm: expected either --arm or --before and --after, got both; name every version with --arm")
    for text in chosen["arms"]:
        name, equals, spec = text.partition("=")
        if not (name and equals and spec):
            faults.append(f"--arm: expected NAME=SPEC, got {text!r}; write --arm new=git:HEAD or the like")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        faults.append(f"--json: expected a file in an existing folder, got {json_file}; make the folder first")
    if faults:
        raise ArgumentError(command, *faults)


def _shapes(asked: tuple[str, ...], original: bool, device: str, op: str, kv_formats: tuple[str, ...]) -> tuple[Any, ...]:
    from ..bench import formats, prefill, shapes

    if op == "prefill_attention":
        named = tuple(shape for text in asked for part in text.split() for shape in prefill.parse(part))
        return named or (prefill.TABLE if device == "cuda" else prefill.TINY)
    chosen = tuple(formats.parse(part) for text in asked for part in text.split())
    if original:
        chosen += shapes.ORIGINAL
    return formats.with_formats(chosen or (shapes.TABLE if device == "cuda" else shapes.TINY), kv_formats)


def _arms(before: str | None, after: str | None, arms: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    if arms:
        pairs = (text.partition("=") for text in arms)
        return tuple((name, spec) for name, _, spec in pairs)
    if before is None and after is None:
        return (("shipped", "shipped"),)
    return ("before", before or "shipped"), ("after", after or "shipped")


def _show(made: Report) -> None:
    from ._tables import Sheet, show

    sheets = []
    for table in made.tables:
        sheet = Sheet(table.header)
        for row in table.rows:
            sheet.add(*row)
        sheets.append(sheet)
    show(made.title, sheets, made.lines)
