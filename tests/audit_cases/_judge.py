"""Compares what an auditor says about a kernel of the set with what is expected of it. Both front ends are judged by this."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ._format import Kernel

if TYPE_CHECKING:
    from bigpool.audit import Finding


def complaints(kernel: Kernel, findings: Iterable[Finding], walls: bool = True) -> list[str]:
    """What is missed, wrong or too much, one sentence each. Notes do not count.

    `walls=False` leaves out rule and wall: for a front end that does not know this kernel's strides and bounds.
    """
    here = kernel.file.resolve()
    told: dict[int, list[Finding]] = {}
    for finding in findings:
        if finding.severity.name == "NOTE":
            continue
        spans = [finding.primary.span, *(label.span for label in finding.secondary if label.text == "called from here")]
        lines = [span.line for span in spans if _same(span.file, here)]
        told.setdefault(lines[0] if lines else 0, []).append(finding)
    found = []
    for expected in kernel.expected:
        answers = told.pop(expected.line, [])
        if not answers:
            found.append(f"line {expected.line}: missed {'|'.join(expected.rules)} {expected.symbol}")
            continue
        if not walls:
            continue
        if not any(answer.rule in expected.rules for answer in answers):
            found.append(f"line {expected.line}: {answers[0].rule} for {'|'.join(expected.rules)}")
        pairs = [pair for answer in answers for pair in _pairs(answer)]
        if expected.wall is not None and not any(_fits(pair, expected.symbol, expected.wall) for pair in pairs):
            found.append(f"line {expected.line}: wall {pairs} for {expected.symbol} {expected.wall:,}")
    for line, answers in told.items():
        found.append(f"line {line}: {answers[0].rule} where nothing is wrong")
    return found


def _pairs(finding: Finding) -> list[tuple[str, int | None]]:
    wall = finding.wall
    if wall is None:
        return []
    return [(wall.variable, wall.value), *([wall.base] if wall.base is not None else [])]


def _fits(pair: tuple[str, int | None], symbol: str, wall: int) -> bool:
    return pair[1] == wall and symbol in (pair[0], "*")


def _same(file: str, here: object) -> bool:
    from pathlib import Path

    return Path(file).resolve() == here


def source_assumptions(kernel: Kernel) -> tuple[str, ...]:
    """What META says about a kernel, as `--assume` takes it."""
    import ast

    said = [f"{name} = {value}" for name, value in kernel.meta["args"].items() if type(value) is int]
    said += [f"{name} <= {bounds[1]}" for name, bounds in kernel.meta.get("ranges", {}).items()]
    grid = kernel.meta["grid"]
    tree = ast.parse(kernel.file.read_text(encoding="utf-8"))
    function = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == kernel.name)
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        for call in ast.walk(node.value):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "program_id" and call.args:
                axis = ast.literal_eval(call.args[0])
                bare = ast.unparse(node.value).startswith("tl.program_id") and " " not in ast.unparse(node.value)
                name = node.targets[0].id if bare else f"tl.program_id({axis})"
                said.append(f"{name} <= {(grid[axis] if axis < len(grid) else 1) - 1}")
    return tuple(dict.fromkeys(said))
