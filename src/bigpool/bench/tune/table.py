"""The table of a run (schema bigpool-tuned/1): the entries that plans look up, and everything that they were chosen from."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bigpool import __version__
from bigpool.bench.load import OP_MODULE, closure
from bigpool.bench.report import STYLES, Report, Table, microseconds
from bigpool.bench.stats import CONFIDENCE, MIN_ROUNDS
from bigpool.bench.verdict import refusal_text
from bigpool.proof import worker
from bigpool.proof.arms import kernel_modules
from bigpool.proof.record import _cpu_model, _git, shorten_paths
from bigpool.tuning import TunedKey, VerifyConfig
from bigpool.tuning_tables import TABLE_SCHEMA, TUNED_OP

if TYPE_CHECKING:
    from bigpool.bench.tune.runner import Cell, Tried, Tuning

DIGITS = 11
NO_MASKS = "calls with masks or logit options keep the rule: none was timed"
REHEARSAL = "Triton's interpreter was timed, whose configuration no table changes: a rehearsal"


def build(made: Tuning) -> dict[str, Any]:
    """The table as JSON. A run that refuses its numbers has no entries."""
    options, faults = made.options, refusals(made)
    probe = worker.probe({"interpreted": made.device.type != "cuda"})
    card = {name: value for name, value in asdict(made.props).items() if name != "interpreted"}
    taken = [] if faults else [cell for cell in made.cells if cell.is_taken]
    return {
        "schema": TABLE_SCHEMA,
        "op": TUNED_OP,
        "card": card,
        "entries": [{**cell.key._asdict(), "config": asdict(cell.best)} for cell in taken if cell.best is not None],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": [shorten_paths(word) for word in options.command],
        "bigpool": {"version": __version__, **_git()},
        "files": _files(made),
        "machine": {"cpu": _cpu_model(), "cores": os.cpu_count(), "system": platform.system(), "gpu": probe["gpu"]},
        "versions": {"bigpool": __version__, **probe["versions"], "cuda": probe["cuda"]},
        "settings": {
            "method": options.method, "dtype": options.dtype, "rounds": options.repeats, "screening_rounds": MIN_ROUNDS,
            "confidence": CONFIDENCE, "margin": options.margin, "seed": options.seed,
        },
        "clocks": made.watch.to_json(),
        "tried": [_cell(cell, bool(faults)) for cell in made.cells],
        "refusals": faults,
        "notes": _notes(made),
        "seconds": round(made.seconds, 1),
        "summary": refusal_text(faults) if faults else f"{len(taken)} of {len(made.cells)} entries beat the rule",
        "status": 1 if faults else 0,
    }  # fmt: skip


def refusals(made: Tuning) -> list[str]:
    """Why nobody may go by these numbers."""
    wrong = [f"{key_text(cell.key)}: {cell.wrong}" for cell in made.cells if cell.wrong]
    nothing = []
    if not wrong and not any(tried.seconds for cell in made.cells for tried in cell.tried):
        nothing = [f"nothing was timed: {'; '.join(sorted({cell.why for cell in made.cells}))}"]
    return [shorten_paths(fault) for fault in (*wrong, *nothing, *made.watch.faults)]


def _notes(made: Tuning) -> list[str]:
    rehearsal = [REHEARSAL] if made.props.interpreted else []
    return [*dict.fromkeys(made.watch.notes), NO_MASKS, *rehearsal]


def _files(made: Tuning) -> list[dict[str, str]]:
    """The installed kernels; those of another version are not named."""
    modules = {} if made.options.kernels is not None else closure(OP_MODULE, kernel_modules())
    return [{"module": name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()} for name, path in modules.items()]


def _cell(cell: Cell, refused: bool) -> dict[str, Any]:
    return {
        "key": cell.key._asdict(),
        "shapes": [shape.name for shape in cell.shapes],
        "rule": asdict(cell.rule),
        "candidates": [_tried(tried) for tried in cell.tried],
        "best": None if cell.best is None else asdict(cell.best),
        "seconds": {name: _rounded(found) for name, found in cell.seconds.items()},
        "verdict": None if cell.verdict is None or refused else cell.verdict.to_json(),
        "verdicts": {} if refused else {name: found.to_json() for name, found in cell.by_shape.items()},
        "taken": cell.is_taken and not refused,
        "why": shorten_paths(cell.wrong or cell.why),
    }


def _tried(tried: Tried) -> dict[str, Any]:
    return {
        "config": asdict(tried.config),
        "why_not_timed": tried.why,
        "spills": tried.spills,
        "seconds": _rounded(tried.seconds),
    }


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, DIGITS) for name, value in seconds.items()}


def key_text(key: TunedKey) -> str:
    """`rows<=16 d128 q2 kv1 pages64`: bytes of an element of q and of the cache, the largest tile that ends at page ends."""
    kv_bytes = key.itemsize if key.kv_bytes is None else key.kv_bytes
    rows = f"rows<={key.rows}" if key.rows < 256 else "rows>128"
    return f"{rows} d{key.head_dim_pad} q{key.itemsize} kv{kv_bytes:g} pages{key.page_tile}"


def config_text(config: VerifyConfig | Mapping[str, int]) -> str:
    """`16x64 w4 s3`: rows, keys, warps, stages."""
    found = asdict(config) if isinstance(config, VerifyConfig) else config
    return f"{found['block_m']}x{found['tile']} w{found['num_warps']} s{found['num_stages']}"


def report(table: Mapping[str, Any]) -> Report:
    """A row for each entry and shape, the verdicts in words, and every candidate that was refused for a wrong answer."""
    card, settings = table["card"], table["settings"]
    title = (
        f"{table['op']} {settings['dtype']} on {card['name']}, {settings['method']}, {settings['screening_rounds']} rounds of "
        f"every candidate, {settings['rounds']} of the best; medians"
    )
    sheet = Table(("entry", "shape", "rule", "best", "rule us", "best us", "taken"))
    lines = []
    for cell in table["tried"]:
        name, best = key_text(TunedKey(**cell["key"])), cell["best"]
        for shape, seconds in cell["seconds"].items() if not table["refusals"] else ():
            times = microseconds(seconds["rule"]), microseconds(seconds["best"])
            taken = "yes" if cell["taken"] else "no"
            sheet.rows.append((name, shape, config_text(cell["rule"]), config_text(best), *times, taken))
        if cell["verdict"] is not None:
            slower = [shape for shape, found in cell["verdicts"].items() if found["word"] == "slower"]
            kept = f"; slower on {', '.join(slower)}, so the rule stays" if slower else ""
            lines.append((f"{name}: {config_text(best)}: {cell['verdict']['text']}{kept}", STYLES[cell["verdict"]["word"]]))
        elif cell["why"]:
            lines.append((f"{name}: {cell['why']}", "yellow"))
        lines += [(f"{name}: {text}", "yellow") for text in _refused(cell)]
    lines += [(f"note: {note}", "dim") for note in table["notes"]]
    style = "bold red" if table["refusals"] else "bold"
    return Report(title, [sheet] if sheet.rows else [], [*lines, (table["summary"], style)])


def _refused(cell: Mapping[str, Any]) -> list[str]:
    """Wrong candidates by name, and how many of the others could not be timed."""
    whys = [(config_text(made["config"]), made["why_not_timed"]) for made in cell["candidates"] if made["why_not_timed"]]
    wrong = [f"{name} refused {why}" for name, why in whys if ": wrong: " in why]
    others = len(whys) - len(wrong)
    first = next((f"{name} {why}" for name, why in whys if ": wrong: " not in why), "")
    return [*wrong, *([f"{others} of {len(cell['candidates'])} not timed, such as {first}"] if others else [])]
