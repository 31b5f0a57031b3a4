"""Applies fixes: the smallest cast, on the load or the program id. The result is audited again before it is offered."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from .finding import Finding, Severity
from .run import Options, Report, audit

TAIL = ".to(tl.int64)"
MAX_ROUNDS = 4


@dataclass(slots=True)
class Fixes:
    """Edited files, how many findings they resolve, and findings that were left with the reason."""

    files: dict[Path, tuple[bytes, bytes]] = field(default_factory=dict)
    fixed: int = 0
    left: list[tuple[Finding, str]] = field(default_factory=list)

    def diff(self) -> str:
        parts: list[str] = []
        for path, (before, after) in self.files.items():
            lines = [data.decode("utf-8", "surrogateescape").splitlines(keepends=True) for data in (before, after)]
            parts += difflib.unified_diff(lines[0], lines[1], str(path), str(path))
        return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in parts)


def fixes(paths: Iterable[Path], options: Options, report: Report, unsafe: bool) -> Fixes:
    """Fixes what `report` found. Nothing is written."""
    paths = list(paths)
    result = Fixes()
    overlay: dict[Path, bytes] = {}
    current = report
    for _ in range(MAX_ROUNDS):
        edits = _edits(current, unsafe, overlay)
        if not edits:
            break
        proposed = {**overlay, **edits}
        after = audit(paths, replace(options, overlay=proposed))
        if len(after.faults) >= len(current.faults) or len(after.skipped_files) > len(current.skipped_files):
            break
        overlay, current = proposed, after
    result.fixed = len(report.faults) - len(current.faults)
    for path, data in overlay.items():
        result.files[path] = (path.read_bytes(), data)
    for finding in current.faults:
        reason = (
            "no fix is known"
            if finding.fix is None
            else "an unsafe fix; --unsafe-fixes"
            if not finding.fix.safe
            else "its fix does not resolve it"
        )
        result.left.append((finding, reason))
    return result


def _edits(report: Report, unsafe: bool, overlay: dict[Path, bytes]) -> dict[Path, bytes]:
    """The new text of every file that a fix touches."""
    inserts: dict[Path, set[tuple[int, int, str]]] = {}
    for finding in report.faults:
        if finding.severity is Severity.NOTE or finding.fix is None:
            continue
        for file, line, col, text in finding.fix.inserts:
            path = Path(file).resolve()
            safe = finding.fix.safe and not _reassigned(path, line, overlay)
            if safe or unsafe:
                inserts.setdefault(path, set()).add((line, col, text))
    return {path: edited for path, places in inserts.items() if (edited := _insert(_text(path, overlay), places)) is not None}


def _text(path: Path, overlay: dict[Path, bytes]) -> bytes:
    return overlay.get(path) or path.read_bytes()


def _insert(data: bytes, places: set[tuple[int, int, str]]) -> bytes | None:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    lines = text.removeprefix(mark).splitlines(keepends=True)
    tail = TAIL.replace("tl", _alias(text))
    for line, col, what in sorted(places, reverse=True):
        row = lines[line - 1]
        if col > 0:
            lines[line - 1] = row[: col - 1] + tail + row[col - 1 :]
            continue
        # A use of a name from a column on: `what` is the name.
        found = re.compile(rf"\b{re.escape(what)}\b(?!\s*[.(])").search(row, -col - 1)
        if found is None:
            return None
        lines[line - 1] = row[: found.end()] + tail + row[found.end() :]
    return (mark + "".join(lines)).encode("utf-8")


def _alias(text: str) -> str:
    """What the file calls triton.language."""
    for pattern in (r"^\s*import triton\.language as (\w+)", r"^\s*from triton import language as (\w+)"):
        if found := re.search(pattern, text, re.M):
            return found[1]
    if re.search(r"^\s*from triton import language\b", text, re.M):
        return "language"
    return "tl" if re.search(r"\btl\b", text) else "triton.language"


def _reassigned(path: Path, line: int, overlay: dict[Path, bytes]) -> bool:
    """Whether the name that the statement in `line` assigns is assigned elsewhere in its function too.

    Triton wants one type for a variable that a branch or a loop carries, so that a cast on one of them might not compile.
    """
    try:
        tree = ast.parse(_text(path, overlay))
    except (SyntaxError, ValueError, RecursionError):
        return True
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or line)
    ]
    if not functions:
        return True
    inner = min(functions, key=lambda node: (node.end_lineno or 0) - node.lineno)
    stores = [node for node in ast.walk(inner) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    statements = [
        node
        for node in ast.walk(inner)
        if isinstance(node, (ast.Assign, ast.AugAssign)) and node.lineno <= line <= (node.end_lineno or line)
    ]
    targets = {
        node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return any(sum(store.id == target for store in stores) > 1 for target in targets)
