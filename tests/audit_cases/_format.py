"""Reads the development set without importing it. README.md says what the files hold."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
COMMENT = re.compile(r"#.*?\bexpect(?:@(?P<variant>\w+))?:\s*(?P<text>.*)$")
ITEM = re.compile(
    r"(?:@(?P<variant>\w+):\s*)?(?P<rules>BP\d+(?:\|BP\d+)*)\s+(?P<symbol>\w+|\*)(?:\s+(?P<wall>[\d,]+))?(?P<byte> byte)?"
)


@dataclass(frozen=True)
class Expectation:
    line: int
    rules: tuple[str, ...]
    symbol: str
    wall: int | None
    byte: bool = False


@dataclass(frozen=True)
class Kernel:
    """One kernel in one variant. `expected` is empty for a clean one."""

    file: Path
    name: str
    variant: str
    line: int
    last: int
    params: tuple[str, ...]
    constexprs: frozenset[str]
    annotations: dict[str, str]
    expected: tuple[Expectation, ...]
    meta: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.file.stem}.{self.name}" + (f"@{self.variant}" if self.variant else "")

    @property
    def module(self) -> str:
        return f"audit_cases.{self.file.stem}"


def files() -> list[Path]:
    return sorted(path for path in FOLDER.glob("*.py") if not path.name.startswith("_"))


@cache
def kernels() -> tuple[Kernel, ...]:
    return tuple(kernel for path in files() for kernel in read(path))


def read(path: Path) -> list[Kernel]:
    """Every kernel and variant of one file, in the file's order."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    comments = {
        token.start[0]: match
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and (match := COMMENT.match(token.string))
    }
    meta: dict[str, Any] = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "META"
    )
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    found = []
    for function in functions if meta else ():
        entries = {key: value for key, value in meta.items() if key.partition("@")[0] == function.name}
        if not entries:
            original = re.sub(r"(_partly)?_fixed$", "", function.name)
            entries = {function.name: meta[original]}
        for key, entry in entries.items():
            found.append(_kernel(path, function, key.partition("@")[2], entry, comments))
    return found


def _kernel(
    path: Path, function: ast.FunctionDef, variant: str, meta: dict[str, Any], comments: dict[int, re.Match[str]]
) -> Kernel:
    last = function.end_lineno or function.lineno
    inside = {line: match for line, match in comments.items() if function.lineno <= line <= last}
    expected: list[Expectation] = []
    clean = meta.get("clean", False)
    for line, match in sorted(inside.items()):
        if match["text"] == "clean":
            clean = True
            continue
        items = [ITEM.fullmatch(item.strip()) for item in match["text"].split(";")]
        if not all(items):
            raise ValueError(f"{path.name}:{line}: expected `RULE SYMBOL [WALL]`, got {match['text']!r}")
        named = {item["variant"] or match["variant"] for item in items if item}
        for item in items:
            assert item
            own = item["variant"] or match["variant"]
            if own == variant or (own is None and variant not in named):
                wall = int(item["wall"].replace(",", "")) if item["wall"] else None
                expected.append(Expectation(line, tuple(item["rules"].split("|")), item["symbol"], wall, bool(item["byte"])))
    if clean == bool(expected):
        raise ValueError(
            f"{path.name}:{function.name}@{variant}: expected faults or `clean`, got {'both' if clean else 'neither'}"
        )
    arguments = function.args.args
    notes = {a.arg: ast.unparse(a.annotation) for a in arguments if a.annotation}
    constexprs = frozenset(name for name, note in notes.items() if note.endswith("constexpr"))
    return Kernel(
        path,
        function.name,
        variant,
        function.lineno,
        last,
        tuple(a.arg for a in arguments),
        constexprs,
        {name: note for name, note in notes.items() if name not in constexprs},
        tuple(expected),
        meta,
    )
