"""Two records side by side. They were not alternated, so that everything that changed between them is in the difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bigpool.bench import stats, verdict
from bigpool.bench.report import STYLES, Report, Table, differing, microseconds
from bigpool.bench.verdict import Verdict
from bigpool.errors import ProofError

UNPAIRED = (
    "the records were made apart: machine, clocks and versions are in the difference; time both versions in one run to price one"
)


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Report:
    """A line for each shape and arm that both hold. Records that refuse their numbers are refused here too."""
    for name, record in (("A", a), ("B", b)):
        if record["refusals"]:
            raise ProofError(
                f"{name}: expected a record with numbers, got one that refuses them: {'; '.join(record['refusals'])}"
            )
    pairs = common(a, b)
    if not pairs:
        raise ProofError("A, B: expected a shape and an arm that both hold, got none; name the arms the same and repeat")
    table = Table(("shape", "arm", "A us", "B us", "B against A"))
    lines = []
    for (shape, arm), (before, after) in pairs.items():
        found = _judge(before, after, noise_of_record(a, shape), noise_of_record(b, shape))
        row = (shape, arm, microseconds(stats.median(before)), microseconds(stats.median(after)), f"{found.effect.estimate:+.1%}")
        table.rows.append(row)
        lines.append((f"{shape}: {arm}: {found.text}", STYLES[found.word]))
    unlike = differing(a, b, ("machine", "versions", "settings"))
    lines += [(f"not the same: {what}", "yellow") for what in unlike]
    title = f"A {a['date']} {_sha(a)}, B {b['date']} {_sha(b)}"
    return Report(title, [table], [*lines, (UNPAIRED, "dim")])


def common(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[tuple[str, str], tuple[Any, Any]]:
    """(shape, arm) -> the samples of both records."""
    theirs = {shape["name"]: shape["samples"] for shape in b["shapes"]}
    return {
        (shape["name"], arm): (rows, theirs[shape["name"]][arm])
        for shape in a["shapes"]
        for arm, rows in shape["samples"].items()
        if arm in theirs.get(shape["name"], {})
    }


def noise_of_record(record: Mapping[str, Any], shape: str) -> float:
    """The noise floor that a record has for a shape, or its margin."""
    made = next(made for made in record["shapes"] if made["name"] == shape)
    noises = [float(found["noise"]) for found in made["verdicts"].values()]
    return max([float(record["settings"]["margin"]), *noises])


def _judge(before: Any, after: Any, *noises: float) -> Verdict:
    logs = (np.log(np.asarray(rows, dtype=np.float64).mean(-1)) for rows in (before, after))
    return verdict.judge(stats.unpaired_effect(*logs), max(noises))


def _sha(record: Mapping[str, Any]) -> str:
    sha = record["bigpool"]["git_sha"]
    return f"{sha[:8]}{'+' if record['bigpool']['git_dirty'] else ''}" if sha else str(record["bigpool"]["version"])
