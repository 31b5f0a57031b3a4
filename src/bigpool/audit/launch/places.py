"""From a line and a column of TTIR to the expression that stands there, and to the names that its author gave."""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache

from ..finding import Span
from .ttir import Place

_OPERATORS: dict[str, type[ast.operator]] = {
    "add": ast.Add,
    "sub": ast.Sub,
    "mul": ast.Mult,
    "floordiv": ast.FloorDiv,
    "mod": ast.Mod,
    "shl": ast.LShift,
    "shr": ast.RShift,
    "and": ast.BitAnd,
    "or": ast.BitOr,
    "xor": ast.BitXor,
}


class SourceFile:
    """The expressions of one file by where they start."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.starts: dict[int, list[ast.expr]] = {}
        self.loops: dict[int, ast.For] = {}
        self.assigned: dict[int, str] = {}
        self.tree: ast.Module | None = None
        self.lines = linecache.getlines(file)
        try:
            tree = ast.parse("".join(self.lines))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return
        self.tree = tree
        for node in ast.walk(tree):
            if isinstance(node, ast.expr):
                self.starts.setdefault(node.lineno, []).append(node)
            elif isinstance(node, ast.For):
                self.loops.setdefault(node.lineno, node)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._assign_to(node.targets[0], node.value)

    def _assign_to(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._assign(target.id, value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for part, part_value in zip(target.elts, value.elts, strict=True):
                self._assign_to(part, part_value)

    def _assign(self, name: str, value: ast.expr) -> None:
        """`name = value`, also behind casts and index brackets: what the author calls that value."""
        while True:
            self.assigned[id(value)] = name
            if isinstance(value, ast.Call):
                function = value.func
                if isinstance(function, ast.Attribute) and function.attr == "to":
                    value = function.value
                    continue
                if getattr(function, "attr", getattr(function, "id", "")) == "cast" and value.args:
                    value = value.args[0]
                    continue
            elif isinstance(value, ast.Subscript):
                value = value.value
                continue
            return

    def find(self, place: Place, op: str) -> ast.expr | None:
        """The expression at a place: an operator of the right kind, else the longest call, else the longest expression."""
        line = self.starts.get(place.line, ())
        here = [node for node in line if self._is_at(node, place)]
        wanted = _OPERATORS.get(op)
        if wanted is not None:
            for nodes in (here, line):
                exact = [node for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, wanted)]
                if nodes is here and exact:
                    return min(exact, key=_length)
                if len(exact) == 1:
                    return exact[0]
        calls = [node for node in here if isinstance(node, ast.Call)]
        return max(calls or here, key=_length, default=None)

    def _is_at(self, node: ast.expr, place: Place) -> bool:
        if not place.last_part:
            return self._column(node) == place.col
        last: ast.expr | None = None
        if isinstance(node, ast.BinOp):
            last = node.right
        elif isinstance(node, ast.Call):
            # Keywords are visited before positions.
            last = node.args[-1] if node.args else node.keywords[-1].value if node.keywords else None
        return last is not None and last.lineno == place.line and self._column(last) == place.col + 1

    def _column(self, node: ast.expr) -> int:
        return self._characters(node.lineno, node.col_offset) + 1

    def _characters(self, line: int, offset: int) -> int:
        """ast counts bytes."""
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        return offset if text.isascii() else len(text.encode()[:offset].decode(errors="replace"))

    def span_of(self, node: ast.expr) -> Span:
        end_line, end_col = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        return Span(self.file, node.lineno, self._column(node), end_line, self._characters(end_line, end_col) + 1)


def _length(node: ast.expr) -> tuple[int, int]:
    return (node.end_lineno or 0) - node.lineno, (node.end_col_offset or 0) - node.col_offset


@lru_cache(maxsize=64)
def source_file(file: str) -> SourceFile:
    return SourceFile(file)


def span(place: Place, op: str = "") -> Span:
    """The expression that an operation comes from; one character where the source is not at hand."""
    file = source_file(place.file)
    node = file.find(place, op)
    return Span(place.file, place.line, place.col, place.line, place.col + 1) if node is None else file.span_of(node)


def loop_variable(place: Place) -> str:
    loop = source_file(place.file).loops.get(place.line)
    return loop.target.id if loop is not None and isinstance(loop.target, ast.Name) else ""


def given_name(place: Place, op: str = "") -> str:
    """The name of a value that is assigned as it is; empty where it is only a part of what is assigned."""
    file = source_file(place.file)
    if not file.starts:
        return place.name
    node = file.find(place, op)
    return file.assigned.get(id(node), "") if node is not None else ""
