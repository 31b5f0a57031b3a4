"""Find and remove the widenings to 64 bits in Triton source. Text in, text out; the line numbers stay.

Four spellings are cut: `x.to(tl.int64)`, `tl.cast(x, tl.int64)`, a parameter annotated `tl.int64`, and `tl.int64` as the dtype of
`tl.full` or `tl.zeros`. What else names a 64-bit type is listed by `uncut`, so that nothing is passed over in silence.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

WIDE = ("int64", "uint64")
WIDE_STRINGS = {"i64", "u64", *WIDE, *(f"tl.{name}" for name in WIDE)}
CASTS = ("to", "cast")


class Widening(NamedTuple):
    """`line` and `col` count from 1; `text` is what `narrow` takes away."""

    line: int
    col: int
    text: str


@dataclass(frozen=True)
class _Cut:
    """One widening: byte ranges of the source with their replacements."""

    place: tuple[int, int]
    text: str
    edits: tuple[tuple[int, int, bytes], ...]


def list_widenings(source: str) -> list[Widening]:
    """Every widening that `narrow` can remove, in the order of the source."""
    return [Widening(*cut.place, cut.text) for cut in _Finder(source).cuts()]


def narrow(source: str, only: int | None = None) -> str:
    """`source` with every widening removed, or only the one at index `only` of `list_widenings`."""
    cuts = _Finder(source).cuts()
    if only is not None:
        cuts = [cuts[only]]
    data = source.encode()
    for start, stop, text in sorted((edit for cut in cuts for edit in cut.edits), reverse=True):
        data = data[:start] + text + data[stop:]
    return data.decode()


def uncut(source: str) -> list[tuple[int, str]]:
    """Lines that name a 64-bit Triton type in a way that `narrow` does not cut: (line, the line's text)."""
    finder = _Finder(source)
    taken = {id(node) for node in finder.claimed()}
    lines = source.splitlines()
    wide = (node for node in ast.walk(finder.tree) if isinstance(node, ast.expr) and finder.is_wide(node))
    found = {node.lineno for node in wide if id(node) not in taken}
    return [(line, lines[line - 1].strip()) for line in sorted(found)]


class _Finder:
    def __init__(self, source: str) -> None:
        self.data = source.encode()
        self.tree = ast.parse(source)
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.modules, self.names = _triton_names(self.tree)
        self.dots = self._attribute_dots(source)

    def is_wide(self, node: ast.AST | None) -> bool:
        """Is this expression triton.language.int64, by whatever name it was imported?"""
        if isinstance(node, ast.Attribute):
            return node.attr in WIDE and ast.unparse(node.value) in self.modules
        return isinstance(node, ast.Name) and node.id in self.names

    def cuts(self) -> list[_Cut]:
        found = [cut for node in ast.walk(self.tree) if (cut := self._cut(node)) is not None]
        return sorted(found, key=lambda cut: cut.place)

    def claimed(self) -> Iterator[ast.AST]:
        """The type expressions that belong to a cut."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.arg) and node.annotation is not None and self._cut(node) is not None:
                yield node.annotation
            elif isinstance(node, ast.Call) and self._cut(node) is not None:
                yield from (child for child in (*node.args, *(key.value for key in node.keywords)) if self.is_wide(child))

    def _cut(self, node: ast.AST) -> _Cut | None:
        if isinstance(node, ast.arg):
            return self._cut_annotation(node)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return None
        func, wide = node.func, self._dtype_argument(node)
        if wide is None:
            return None
        if ast.unparse(func.value) not in self.modules:
            return self._cut_method(node, func) if func.attr in CASTS and wide is _first(node, 0, "dtype") else None
        if func.attr == "cast" and wide is _first(node, 1, "dtype"):
            return self._cut_cast(node)
        if func.attr in ("full", "zeros"):
            start, stop = self._span(wide)
            text = self.data[start:stop].replace(b"int64", b"int32")
            return _Cut(self._place(start), f"{func.attr}(..., {ast.unparse(wide)})", ((start, stop, text),))
        return None

    def _cut_annotation(self, node: ast.arg) -> _Cut | None:
        note = node.annotation
        if note is None:
            return None
        if not self.is_wide(note) and not (isinstance(note, ast.Constant) and note.value in WIDE_STRINGS):
            return None
        start = self._span(node)[0] + len(node.arg.encode())
        stop = self._span(note)[1]
        return _Cut(self._place(start), f": {ast.unparse(note)}", ((start, stop, self._pad(start, stop, b"\\\n")),))

    def _cut_method(self, node: ast.Call, func: ast.Attribute) -> _Cut:
        start = self.dots[self._span(func)[1]]
        stop = self._span(node)[1]
        arguments = ", ".join(ast.unparse(child) for child in (*node.args, *node.keywords))
        # A removed line break outside brackets would end the statement, so it becomes a continuation.
        edit = (start, stop, self._pad(start, stop, b"\\\n"))
        return _Cut(self._place(start), f".{func.attr}({arguments})", (edit,))

    def _cut_cast(self, node: ast.Call) -> _Cut | None:
        value = _first(node, 0, "input")
        if value is None:
            return None
        start, stop = self._span(node)
        inner_start, inner_stop = self._span(value)
        edits = (
            (start, inner_start, b"(" + self._pad(start, inner_start, b"\n")),
            (inner_stop, stop, self._pad(inner_stop, stop, b"\n") + b")"),
        )
        return _Cut(self._place(start), f"{ast.unparse(node.func)}(..., int64)", edits)

    def _dtype_argument(self, node: ast.Call) -> ast.expr | None:
        candidates = (*node.args, *(key.value for key in node.keywords if key.arg == "dtype"))
        return next((child for child in candidates if self.is_wide(child)), None)

    def _span(self, node: ast.expr | ast.arg) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _place(self, offset: int) -> tuple[int, int]:
        line = self.data.count(b"\n", 0, offset) + 1
        return line, offset - self.starts[line - 1] + 1

    def _pad(self, start: int, stop: int, line_break: bytes) -> bytes:
        return line_break * self.data.count(b"\n", start, stop)

    def _attribute_dots(self, source: str) -> dict[int, int]:
        """Byte offset of the end of an attribute name -> byte offset of the dot before it."""
        dots = {}
        before: tokenize.TokenInfo | None = None
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in (tokenize.NL, tokenize.COMMENT):
                continue
            if token.type == tokenize.NAME and before is not None and before.string == ".":
                dots[self._offset(token.line, token.end)] = self._offset(before.line, before.start)
            before = token
        return dots

    def _offset(self, text: str, place: tuple[int, int]) -> int:
        line, col = place
        start = self.starts[line - 1]
        return start + len(self.data[start:].split(b"\n", 1)[0].decode()[:col].encode())


def _first(node: ast.Call, position: int, keyword: str) -> ast.expr | None:
    """The argument at `position`, or the one called `keyword`."""
    if len(node.args) > position:
        return node.args[position]
    return next((key.value for key in node.keywords if key.arg == keyword), None)


def _triton_names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """(spellings of the module triton.language, names bound to a wide type) in this file."""
    modules, names = {"tl", "triton.language"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {name.asname for name in node.names if name.name == "triton.language" and name.asname}
            modules |= {f"{name.asname}.language" for name in node.names if name.name == "triton" and name.asname}
        elif isinstance(node, ast.ImportFrom) and node.module in ("triton", "triton.experimental.gluon"):
            modules |= {name.asname or name.name for name in node.names if name.name == "language"}
        elif isinstance(node, ast.ImportFrom) and node.module == "triton.language":
            names |= {name.asname or name.name for name in node.names if name.name in WIDE}
    return modules, names
