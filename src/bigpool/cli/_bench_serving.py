"""`bigpool bench serving`: what a change costs where it is served."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ..errors import ArgumentError, BackendError

OUT = click.Path(dir_okay=False, writable=True, path_type=Path)
IN = click.Path(dir_okay=False, path_type=Path)
WHERE = "bigpool bench serving"
EXTRA = "pip install 'bigpool[serving]'"
MODES = ("together", "restart")
PROMPTS = ("text", "ids")


@click.command(short_help="Time two servers in turn: prefill, decode, acceptance.", context_settings={"max_content_width": 110})
@click.option(
    "--arm", "arms", multiple=True, type=IN, metavar="FILE", help="A server, as NAME=VALUE lines; the first is compared with."
)
@click.option("--command", default="", metavar="TEXT", help="Starts the server of every arm that does not say how; {port} in it.")
@click.option("--model", default="", metavar="NAME", help="The model to ask for.  [default: the first that the server lists]")
@click.option(
    "--prefill", multiple=True, type=int, metavar="TOKENS", help="Time fresh prompts of this length. Repeatable.  [default: 1024]"
)
@click.option(
    "--streams", multiple=True, type=int, metavar="N", help="Time decode with N requests at once. Repeatable.  [default: 1]"
)
@click.option("--decode-tokens", type=int, default=64, show_default=True, metavar="N", help="New tokens of each stream.")
@click.option("--repeats", type=int, default=10, show_default=True, metavar="N", help="Rounds, each with two runs of every arm.")
@click.option("--inner", type=int, default=3, show_default=True, metavar="N", help="Prefills of a run; their median is its time.")
@click.option("--mode", default="together", show_default=True, metavar="together|restart", help="restart: one server at a time.")
@click.option("--aa/--no-aa", default=True, show_default=True, help="Run the first arm twice: the noise floor.")
@click.option("--margin", type=float, default=1.0, show_default=True, metavar="PERCENT", help="Less is no cost, however certain.")
@click.option(
    "--prompt", default="text", show_default=True, metavar="text|ids", help="ids: prompts as token ids, of exact length."
)
@click.option("--ready-timeout", type=float, default=600.0, show_default=True, metavar="S", help="For a server to answer.")
@click.option(
    "--request-timeout", type=float, default=600.0, show_default=True, metavar="S", help="For the next bytes of an answer."
)
@click.option("--json", "json_file", type=OUT, metavar="FILE", help="Write the record (schema bigpool-serving/1).")
def serving(json_file: Path | None, arms: tuple[Path, ...], command: str, **chosen: Any) -> int:
    """Time two or more OpenAI-compatible servers in turn, with the verdicts of bigpool bench verify.

    FILE holds the environment of a server as NAME=VALUE lines. BIGPOOL_COMMAND in it starts the server ({port} is a free port);
    BIGPOOL_BASE_URL names one that runs already; BIGPOOL_MODEL and BIGPOOL_API_KEY are optional. What was started is gone
    afterwards. Every prompt is new, so that no prefix cache can answer; where one does, or where any request fails, no numbers
    are given. Two servers that do not fit the machine at once: --mode restart.

    \b
    Examples:
      bigpool bench serving --arm old.env --arm new.env --prefill 4096 --prefill 32768 --streams 8
      bigpool bench serving --arm a.env --arm b.env --mode restart --repeats 8 --json serving.json
      bigpool bench serving --arm a.env --arm b.env --command "vllm serve MODEL --port {port}"

    Exit status: 0 measured, 1 numbers refused, 2 could not run, 130 interrupted.
    """
    _check(json_file, arms, chosen)
    try:
        import httpx  # noqa: F401
        import numpy  # noqa: F401
    except ModuleNotFoundError as missing:
        raise BackendError(f"{WHERE}: expected {missing.name} to be installed, got no such module; {EXTRA}") from None
    from ..bench.progress import listener
    from ..bench.serving.report import report
    from ..bench.serving.runner import bench as run
    from .bench import show_and_save

    options = _options(arms, command, chosen)
    with listener() as shown:
        data = run(options, shown)
    show_and_save(report(data), data, json_file)
    return int(data["status"])


def _options(files: tuple[Path, ...], command: str, chosen: dict[str, Any]) -> Any:
    from ..bench.serving.arms import read
    from ..bench.serving.measure import Decode, Prefill
    from ..bench.serving.runner import RESTART, Options

    arms = tuple(read(file, command) for file in files)
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise ArgumentError(WHERE, f"--arm: expected files of different names, got {', '.join(names)}; the name is the arm's")
    given = [arm.name for arm in arms if not arm.command]
    if chosen["mode"] == RESTART and given:
        fault = f"--mode: expected servers that can be started for restart, got {', '.join(given)} without BIGPOOL_COMMAND"
        raise ArgumentError(WHERE, f"{fault}; use together")
    nothing = not chosen["prefill"] and not chosen["streams"]
    prefills = chosen["prefill"] or ((1024,) if nothing else ())
    streams = chosen["streams"] or ((1,) if nothing else ())
    measures: tuple[Prefill | Decode, ...] = (
        *(Prefill(length, chosen["inner"]) for length in dict.fromkeys(prefills)),
        *(Decode(count, chosen["decode_tokens"]) for count in dict.fromkeys(streams)),
    )
    return Options(
        arms=arms, measures=measures, mode=chosen["mode"], aa=chosen["aa"], repeats=chosen["repeats"], prompt=chosen["prompt"],
        model=chosen["model"], ready_timeout=chosen["ready_timeout"], request_timeout=chosen["request_timeout"],
        margin=chosen["margin"] / 100, command=("bigpool", *sys.argv[1:]),
    )  # fmt: skip


def _check(json_file: Path | None, arms: tuple[Path, ...], chosen: dict[str, Any]) -> None:
    from ..bench.serving import MIN_ROUNDS

    faults = []
    if not arms:
        faults.append("--arm: expected a file for each server, got nothing; such as --arm old.env --arm new.env")
    if chosen["mode"] not in MODES:
        faults.append(
            f"--mode: expected {' or '.join(MODES)}, got {chosen['mode']!r}; restart is for servers that do not fit at once"
        )
    if chosen["prompt"] not in PROMPTS:
        faults.append(f"--prompt: expected {' or '.join(PROMPTS)}, got {chosen['prompt']!r}; ids needs no tokenizer to be known")
    if chosen["repeats"] < MIN_ROUNDS:
        faults.append(f"--repeats: expected at least {MIN_ROUNDS}, got {chosen['repeats']}; an interval needs them")
    least = {"prefill": 8, "streams": 1, "decode_tokens": 2, "inner": 1, "ready_timeout": 0.1, "request_timeout": 0.1}
    for name, limit in least.items():
        values = chosen[name] if isinstance(chosen[name], tuple) else (chosen[name],)
        faults += [
            f"--{name.replace('_', '-')}: expected at least {limit:g}, got {value:g}" for value in values if not value >= limit
        ]
    if not chosen["margin"] >= 0:
        faults.append(f"--margin: expected 0 or more percent, got {chosen['margin']:g}; the default is 1")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        faults.append(f"--json: expected a file in an existing folder, got {json_file}; make the folder first")
    if faults:
        raise ArgumentError(WHERE, *faults)
