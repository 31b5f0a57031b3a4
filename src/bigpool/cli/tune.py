"""`bigpool tune`: launch configurations for a card, measured once and written down."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from ..errors import ArgumentError

OUT = click.Path(dir_okay=False, writable=True, path_type=Path)
WHERE = "bigpool tune verify"
REPEATS = {"cuda": 60, "cpu": 20}
# Format of a cache in q's dtype -> torch's name of it.
PLAIN = {"bf16": "bfloat16", "fp16": "float16"}


class Group(click.Group):
    """Says what there is where a name is unknown."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and not args[0].startswith("-"):
            known = ", ".join(sorted(self.commands))
            raise ArgumentError("bigpool tune", f"COMMAND: expected {known}, got {args[0]!r}; see bigpool tune --help")
        return super().resolve_command(ctx, args)


@click.group(cls=Group, invoke_without_command=True, context_settings={"max_content_width": 110})
@click.pass_context
def tune(ctx: click.Context) -> None:
    """Time launch configurations on this card, and write a table of the better ones.

    \b
    Example:
      bigpool tune verify --out my-card.json
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@tune.command(short_help="Tune the plain Triton kernel of verify attention.", context_settings={"max_content_width": 110})
@click.option(
    "--shapes", multiple=True, metavar="SHAPE", help="Such as b1-q8-kv32k-p16-h32/8-d128. Repeatable.  [default: eight]"
)
@click.option(
    "--format", "kv_formats", multiple=True, metavar="FORMAT",
    help="Cache of bf16, fp16, fp8_e4m3, int8 or int4. Repeatable.  [default: bf16 (fp16 on a CPU) and the last three]",
)  # fmt: skip
@click.option("--out", "out_file", type=OUT, metavar="FILE", help="Write the table (schema bigpool-tuned/1).")
@click.option("--repeats", metavar="N", type=int, help="Rounds of the best candidate.  [default: 60 on a GPU, 20 on a CPU]")
@click.option("--method", metavar="graph|events|cpu", help="CUDA-graph replay, events or perf_counter.  [default: graph, or cpu]")
@click.option("--margin", metavar="PERCENT", type=float, default=0.5, show_default=True, help="Less is no gain, however certain.")
@click.option("--device", metavar="cpu|cuda|auto", default="auto", show_default=True, help="cpu rehearses in the interpreter.")
def verify(out_file: Path | None, **chosen: Any) -> int:
    """Tune the plain Triton kernel of verify attention for this card: docs/tune.md.

    Every configuration that fits the card is compiled, held to the float64 oracle on the tensors that it is timed on, and timed
    in turn with the rule's. The best is timed again, in rounds of its own: it becomes an entry where bigpool bench would say
    "faster". Wrong answers, moved clocks and other processes on the GPU are refused as there.

    The table is used where BIGPOOL_TUNED names its file, on the same model of card.

    \b
    Examples:
      bigpool tune verify --out my-card.json
      bigpool tune verify --shapes b1-q4-kv32k-p16-h32/8-d128 --format int8 --out my-card.json
      bigpool tune verify --device cpu --shapes b1-q2-kv40-p16-h2/1-d16 --format fp16

    Exit status: 0 tuned (also where the rule stays), 1 numbers refused, 2 could not run, 130 interrupted.
    """
    options = _options(out_file, chosen)
    from ..bench.progress import listener
    from ..bench.tune import runner, table
    from .bench import show_and_save

    with listener() as shown:
        data = runner.tune(options, shown)
    show_and_save(table.report(data), data, out_file)
    return int(data["status"])


def _options(out_file: Path | None, chosen: dict[str, Any]) -> Any:
    _check(out_file, chosen)
    if chosen["device"] == "cpu" and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    from ..bench.runner import choose_device

    device = choose_device(chosen["device"])
    if device == "cpu":
        # Read by triton when it is imported, which torch alone does not do.
        os.environ["TRITON_INTERPRET"] = "1"
    from ..bench.formats import parse
    from ..bench.tune.candidates import TABLE, TINY
    from ..bench.tune.runner import Options

    plain = "bf16" if device == "cuda" else "fp16"
    names = chosen["kv_formats"] or (plain, "fp8_e4m3", "int8", "int4")
    if device == "cpu":
        _check_interpreter(names)
    shapes = tuple(parse(part) for text in chosen["shapes"] for part in text.split())
    return Options(
        shapes=shapes or (TABLE if device == "cuda" else TINY),
        formats=names,
        dtype=PLAIN[next((name for name in names if name in PLAIN), plain)],
        device=device,
        method=chosen["method"] or ("graph" if device == "cuda" else "cpu"),
        repeats=chosen["repeats"] or REPEATS[device],
        margin=chosen["margin"] / 100,
        command=("bigpool", *sys.argv[1:]),
    )


def _check_interpreter(names: tuple[str, ...]) -> None:
    import torch

    from ..ops.verify import require_interpreter

    for name in names:
        require_interpreter(getattr(torch, PLAIN.get(name, "float16")))


def _check(out_file: Path | None, chosen: dict[str, Any]) -> None:
    from ..bench.shapes import format_faults

    faults = format_faults(chosen["kv_formats"])
    if chosen["device"] not in ("cpu", "cuda", "auto"):
        faults.append(f"--device: expected cpu, cuda or auto, got {chosen['device']!r}; auto takes the GPU if there is one")
    if not chosen["margin"] >= 0:
        faults.append(f"--margin: expected 0 or more percent, got {chosen['margin']:g}; the default is 0.5")
    if out_file is not None and not out_file.absolute().parent.is_dir():
        faults.append(f"--out: expected a file in an existing folder, got {out_file}; make the folder first")
    if faults:
        raise ArgumentError(WHERE, *faults)
