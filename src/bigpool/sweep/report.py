"""A sweep in words, in Markdown, and as a record."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

from bigpool.audit.launch.audit import shown
from bigpool.audit.report.jsonfile import as_dict
from bigpool.audit.words import wall_text
from bigpool.sweep.sweep import Sweep

SCHEMA = "bigpool-sweep/1"


def lines(made: Sweep) -> Iterator[tuple[str, str]]:
    """(kind, text): kind is "head", "plain", "good", "bad", "dim" or "diff"."""
    yield "head", f"{made.script}: {_counts(made)}"
    for one in made.confirmations:
        finding = made.finding(one.id)
        span = finding.primary.span
        yield "plain", ""
        yield "head", f"{finding.rule} {span.file}:{span.line} in {finding.kernel} ({one.id})"
        yield "plain", f"  {finding.message}"
        if finding.wall is not None:
            yield "plain", f"  wall: {wall_text(finding.wall)}"
        yield ("bad" if one.outcome == "confirmed" else "plain"), f"  {one.outcome}: {one.text}"
        if one.along:
            yield "dim", f"  grown along with it: {', '.join(one.along)}"
        for proof in made.proofs:
            if proof.id == one.id:
                yield ("good" if proof.proven else "bad"), f"  fix: {proof.text}"
    if made.fixed is not None and made.fixed.files:
        yield "plain", ""
        yield from (("diff", line) for line in diff_of(made).splitlines())
    for price in made.prices:
        yield "plain", ""
        yield "plain", f"cost of the fix in {price.kernel}: {price.text}"
    yield "plain", ""
    yield from _last(made)


def _last(made: Sweep) -> Iterator[tuple[str, str]]:
    if made.failed:
        yield "dim", f"the script stopped early: {made.failed}; what it launched until then was swept"
    for what, why in made.report.skipped_kernels:
        yield "dim", f"not read: {what}: {why}"
    yield "dim", f"ran on: {made.device}"
    if made.written:
        yield "good", f"written: {', '.join(made.written)}"
    elif made.proven:
        yield "good", "the fix is proven; --write puts it into your files"
    elif made.confirmed:
        yield "bad", "confirmed, and not fixed"


def _counts(made: Sweep) -> str:
    if not made.confirmations:
        return "no 32-bit index that can wrap was found in what it launched"
    words = ("confirmed", "refuted", "could not reproduce")
    counts = [(sum(one.outcome == word for one in made.confirmations), word) for word in words]
    total = len(made.confirmations)
    said = ", ".join(f"{count} {word if word != words[2] else 'not reproduced'}" for count, word in counts if count)
    return f"{total} fault{'s' if total > 1 else ''}: {said}"


def diff_of(made: Sweep) -> str:
    """The fix as a diff, with paths as a user would write them."""
    assert made.fixed is not None
    text = made.fixed.diff()
    for path in made.fixed.files:
        text = text.replace(str(path), shown(str(path)))
    return text


def as_markdown(made: Sweep) -> str:
    """The same as a document."""
    parts = [f"# Sweep of `{made.script}`", "", _counts(made) + ".", ""]
    parts += ["| id | place | wall | outcome | after the fix |", "|---|---|---|---|---|"]
    for one in made.confirmations:
        finding = made.finding(one.id)
        proof = next((proof.text for proof in made.proofs if proof.id == one.id), "")
        wall = wall_text(finding.wall) if finding.wall is not None else ""
        place = f"`{finding.primary.span.file}:{finding.primary.span.line}` {finding.rule}"
        row = (one.id, place, wall, f"**{one.outcome}**: {one.text}", proof)
        parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    if made.fixed is not None and made.fixed.files:
        parts += ["", "## The fix", "", "```diff", diff_of(made).rstrip("\n"), "```"]
    if made.prices:
        parts += ["", "## What it costs", ""] + [f"- `{price.kernel}`: {price.text}" for price in made.prices]
    parts += [""] + [text for _, text in _last(made)]
    return "\n".join(parts) + "\n"


def as_record(made: Sweep) -> dict[str, Any]:
    """The record: schema bigpool-sweep/1."""
    fixed = made.fixed
    return {
        "schema": SCHEMA,
        "status": made.status,
        "script": made.script,
        "machine": {"device": made.device, "versions": _versions()},
        "audit": as_dict(made.report, notes=False),
        "confirmations": [one.to_json() for one in made.confirmations],
        "fix": None if fixed is None else {"diff": diff_of(made), "fixed": fixed.fixed, "left": len(fixed.left)},
        "proofs": [proof.to_json() for proof in made.proofs],
        "prices": [price.to_json() for price in made.prices],
        "script_stopped": made.failed,
        "written": made.written,
    }


def _versions() -> dict[str, str]:
    import torch
    import triton

    from bigpool import __version__

    return {
        "bigpool": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
    }
