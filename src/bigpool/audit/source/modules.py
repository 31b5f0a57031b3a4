"""Files, their imports, and the jit functions in them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..finding import Span

MAX_FILE_BYTES = 4 * 2**20
MAX_NESTING = 90
FOREIGN_JITS = ("torch", "jax", "numba", "tvm", "taichi", "cupy", "flax", "equinox", "cutlass", "warp", "mlx", "keras", "paddle")
# A file without this word holds no kernel. One that a kernel imports from may still hold a constant or a helper.
KERNELS = re.compile(rb"jit|bigpool:")
MENTION = re.compile(rb"triton|gluon|\btl\.")


class Unreadable(Exception):
    """A file that cannot be audited; the text says why."""


@dataclass(eq=False)
class Module:
    """A parsed file. `imports` maps a local name to the dotted name that it stands for."""

    path: str
    file: Path
    text: str
    tree: ast.Module
    lines: list[str] = field(default_factory=list)
    imports: dict[str, str] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    kernels: dict[str, ast.FunctionDef] = field(default_factory=dict)
    constants: dict[str, ast.expr] = field(default_factory=dict)

    def span(self, node: ast.AST) -> Span:
        line, end = getattr(node, "lineno", 1), getattr(node, "end_lineno", 1)
        return Span(
            self.path,
            line,
            self._column(line, getattr(node, "col_offset", 0)),
            end,
            self._column(end, getattr(node, "end_col_offset", 0)),
        )

    def _column(self, line: int, offset: int) -> int:
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        return offset + 1 if text.isascii() else len(text.encode()[:offset].decode(errors="replace")) + 1


def python_files(paths: list[Path], skipped: list[tuple[str, str]]) -> Iterator[Path]:
    """Every .py file under `paths`, each once, whatever symbolic links say."""
    seen: set[Path] = set()
    for path in paths:
        if path.is_file():
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield path
        elif path.is_dir():
            known = len(skipped)
            yield from _walk(path, seen, skipped)
            inside = any(file.suffix == ".py" and path.resolve() in file.parents for file in seen)
            if not inside and len(skipped) == known:
                skipped.append((str(path), "no Python file in it"))
        else:
            skipped.append((str(path), "no such file or directory"))


def _walk(root: Path, seen: set[Path], skipped: list[tuple[str, str]]) -> Iterator[Path]:
    stack = [root]
    while stack:
        folder = stack.pop()
        try:
            real = folder.resolve()
            if real in seen:
                continue
            seen.add(real)
            entries = sorted(folder.iterdir())
        except (OSError, RuntimeError) as error:
            skipped.append((str(folder), f"cannot be listed: {error}"))
            continue
        for entry in entries:
            try:
                if entry.is_dir():
                    if not entry.name.startswith(".") and entry.name != "__pycache__":
                        stack.append(entry)
                elif entry.suffix == ".py" and not entry.is_file():
                    skipped.append((str(entry), "is no file, or a link to none"))
                elif entry.suffix == ".py" and entry.resolve() not in seen:
                    seen.add(entry.resolve())
                    yield entry
            except (OSError, RuntimeError) as error:
                skipped.append((str(entry), f"cannot be read: {error}"))


def load(file: Path, shown: str, mention: re.Pattern[bytes] = MENTION) -> Module | None:
    """Parses a file; None if it mentions nothing that would make it worth it.

    Raises:
        Unreadable: too large, not decodable, not Python, or nested too deeply.
    """
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise Unreadable(f"larger than {MAX_FILE_BYTES // 2**20} MiB")
        data = file.read_bytes()
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from error
    if b"\0" in data:
        raise Unreadable("holds NUL bytes: UTF-16, or no text")
    if not mention.search(data):
        return None
    return parse(data, file, shown)


def parse(data: bytes, file: Path, shown: str) -> Module:
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
        tree = ast.parse(text.encode() if encoding.lower() in ("utf-8", "utf-8-sig") else text)
    except (SyntaxError, ValueError, LookupError) as error:
        line = getattr(error, "lineno", None)
        place = f" in line {line}" if line else ""
        raise Unreadable(f"does not parse as Python{place}: {getattr(error, 'msg', None) or error}") from error
    except (RecursionError, MemoryError) as error:
        raise Unreadable("nested too deeply to parse") from error
    text = text.removeprefix("\ufeff")
    module = Module(shown, file, text, tree, text.splitlines())
    _index(module)
    return module


def _index(module: Module) -> None:
    """Finds imports, functions and constants; without recursion, so that depth does not matter."""
    package = module.file.resolve().parent.parts
    stack: list[tuple[ast.AST, tuple[ast.FunctionDef, ...]]] = [(module.tree, ())]
    marked: set[str] = set()
    while stack:
        node, owners = stack.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                module.imports[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            _import_from(module, node, package)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            if not owners:
                module.constants[node.targets[0].id] = node.value
            marked |= _jitted_by_call(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None and not owners:
            module.constants[node.target.id] = node.value
        if isinstance(node, ast.FunctionDef):
            module.functions[node.name] = node
            owners = (*owners, node)
        if isinstance(node, (ast.stmt, ast.Module, ast.ExceptHandler)):
            stack.extend((child, owners) for child in reversed(list(_statements(node))))
    for name, function in module.functions.items():
        if name in marked or any(is_jit(module, mark) for mark in function.decorator_list):
            module.kernels[name] = function
    _forget(module)


def _forget(module: Module) -> None:
    """Keeps of a file without kernels only what others may import: trees are what an audit of a large project is made of."""
    if module.kernels:
        return
    module.tree = ast.Module([], [])
    module.functions = {name: node for name, node in module.functions.items() if _is_constexpr_function(node)}
    module.constants = {name: node for name, node in module.constants.items() if _is_plain(node)}
    if "bigpool:" not in module.text:
        module.text, module.lines = "", []


def _is_plain(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return dotted(node.func).rpartition(".")[2] == "constexpr"
    return not isinstance(node, ast.Dict)


def _is_constexpr_function(node: ast.FunctionDef) -> bool:
    return any(dotted(mark).endswith("constexpr_function") for mark in node.decorator_list)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    for name in ("body", "orelse", "finalbody", "handlers"):
        yield from getattr(node, name, ()) or ()


def _jitted_by_call(node: ast.expr) -> set[str]:
    """`kernel = triton.jit(function)`, behind other calls too."""
    found = set()
    while isinstance(node, ast.Call):
        for arg in node.args:
            if isinstance(arg, ast.Name) and dotted(node.func).rpartition(".")[2] == "jit":
                found.add(arg.id)
        node = node.args[0] if node.args else node.func
    return found


def _import_from(module: Module, node: ast.ImportFrom, package: tuple[str, ...]) -> None:
    base = node.module or ""
    if node.level:
        parts = package[: len(package) - node.level + 1]
        base = "/".join(parts) + "|" + base
    for alias in node.names:
        module.imports[alias.asname or alias.name] = f"{base}.{alias.name}" if base and base[-1] != "|" else f"{base}{alias.name}"


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or an attribute, else an empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        return ".".join([node.id, *reversed(parts)])
    return ""


def full_name(module: Module, node: ast.AST) -> str:
    """The dotted name of an expression, imports resolved."""
    name = dotted(node)
    head, dot, rest = name.partition(".")
    return f"{module.imports[head]}{dot}{rest}" if head in module.imports else name


def is_jit(module: Module, mark: ast.expr) -> bool:
    """Whether a decorator makes a Triton (or Gluon) kernel: by its name, whoever wraps it."""
    while isinstance(mark, ast.Call):
        mark = mark.func
    name = full_name(module, mark)
    parts = name.lower().replace("|", ".").split(".")
    if not parts[-1].endswith("jit") or any(part in FOREIGN_JITS for part in parts[:-1]):
        return False
    known = any(part in ("triton", "gluon") for part in parts)
    return known or any("triton" in target for target in module.imports.values())


class Library:
    """The modules of an audit, and those that they import from files beside them."""

    def __init__(self) -> None:
        self.modules: dict[Path, Module] = {}
        self.by_tail: dict[str, list[Path]] = {}
        self.missing: set[Path] = set()

    def add(self, module: Module) -> None:
        self.modules[module.file.resolve()] = module
        self.know(module.file)

    def know(self, file: Path) -> None:
        """A file that is read only if a kernel imports from it."""
        stem = file.parent.name if file.name == "__init__.py" else file.stem
        self.by_tail.setdefault(stem, []).append(file.resolve())

    def find(self, name: str, near: Path | None = None) -> tuple[Module, str] | None:
        """The module and the attribute that a dotted name `package.module.attribute` stands for.

        `near`: the file that imports it. What it imports from its own package is read from the folder of that package.
        """
        target, _, attribute = name.rpartition(".")
        if "|" in target or (not target and "|" in name):
            folder, _, inside = (target or name).partition("|")
            base = Path("/", *folder.strip("/").split("/"), *inside.split("."))
            module = self._at(base)
            return (module, attribute) if module is not None else None
        parts = target.split(".")
        for file in self.by_tail.get(parts[-1], ()):
            path = file.with_suffix("")
            tail = path.parts[:-1] if path.name == "__init__" else path.parts
            if tail[-len(parts) :] == tuple(parts) and (module := self._read(file)) is not None:
                return module, attribute
        for around in near.resolve().parents if near is not None and len(parts) > 1 else ():
            if around.name == parts[0] and (module := self._at(around.parent.joinpath(*parts))) is not None:
                return module, attribute
        return None

    def _read(self, file: Path) -> Module | None:
        if file not in self.modules and file not in self.missing:
            try:
                module = load(file, str(file))
            except Unreadable:
                module = None
            if module is None:
                self.missing.add(file)
            else:
                self.modules[file] = module
        return self.modules.get(file)

    def _at(self, base: Path) -> Module | None:
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if (file in self.modules or file.is_file()) and (module := self._read(file)) is not None:
                return module
        return None
