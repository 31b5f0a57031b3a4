"""Bounds that the user states: `block_table < num_pages`, `page < 2**20`, `stride_k_page = 901_120`."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ArgumentError
from .expr import Node, Program, Sink, Var, walk
from .finding import Span
from .poly import strip
from .relations import product_names
from .source.types import named
from .source.values import DType

NAME = r"[A-Za-z_][\w.]*(?:\([012]?\))?"
FORM = re.compile(rf"^\s*({NAME}(?:\s*\*\s*{NAME})*)\s*(<=|<|==|=|:)\s*([^,#]+?)\s*$")
NUMEL = ".numel"
GRAMMAR = "NAME < BOUND, NAME <= BOUND, NAME = VALUE or TENSOR: int64"
# Of a tensor of more, the last element is beyond 32 bits.
MAX_ELEMENTS = 2**31
BYTES = dict(zip(("", "b", "kib", "mib", "gib", "tib"), (1, 1, 2**10, 2**20, 2**30, 2**40), strict=True))
BYTES |= dict(zip(("kb", "mb", "gb", "tb"), (10**3, 10**6, 10**9, 10**12), strict=True))


@dataclass(slots=True)
class Assumption:
    """`name` is a variable, the tensor that a value is loaded from, or a product of variables. `where` limits it to a place."""

    name: str
    sign: str
    bound: str
    reason: str = ""
    where: Span | None = None
    kernel: str = ""
    used: int = 0
    values: Mapping[str, int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return f"{self.name} {self.sign} {self.bound}"

    @property
    def shown(self) -> str:
        """For a report: with the reason, and with what is missing for it to mean anything."""
        lacks = "" if self.sign == ":" or self.maximum() is not None else f" (bounds nothing: {self.bound} has no value; --at)"
        return self.text + (f" ({self.reason})" if self.reason else "") + lacks

    def maximum(self) -> int | None:
        if self.sign == ":":
            return None
        value = integer(self.bound, self.values)
        return None if value is None else value - 1 if self.sign == "<" else value

    def covers(self, names: Iterable[str], span: Span | None, kernel: str) -> bool:
        if self.kernel and self.kernel != kernel:
            return False
        if self.where is not None and (span is None or not span.within(self.where)):
            return False
        return any(
            name == self.name or (name.endswith(("_ptr", "_tensor")) and name.rpartition("_")[0] == self.name) for name in names
        )


def parse(text: str, values: Mapping[str, int], origin: str = "--assume") -> Assumption:
    """Raises ArgumentError."""
    found = FORM.match(text)
    if found is None:
        raise ArgumentError("bigpool audit", f"{origin}: expected {GRAMMAR}, got {text!r}; such as 'page < 2**20'")
    if found[2] == ":" and named(found[3]) is None:
        raise ArgumentError(
            "bigpool audit", f"{origin}: expected an element type after the colon, got {text!r}; such as 'slots: int64'"
        )
    name, sign = _product(found[1].split("*")), found[2]
    if "*" in name and sign not in ("<", "<="):
        raise ArgumentError("bigpool audit", f"{origin}: expected < or <= after a product, got {text!r}; such as 'm * n < 2**31'")
    return Assumption(name, "=" if sign == "==" else sign, found[3], values=values)


def _product(names: Iterable[str]) -> str:
    return " * ".join(sorted(name.strip().removesuffix("()") for name in names))


def read(texts: Iterable[str], values: Mapping[str, int]) -> list[Assumption]:
    """What `--assume` names: bounds, and TOML files of bounds.

    Raises:
        ArgumentError: one that cannot be read.
    """
    found = []
    for text in texts:
        found += from_file(Path(text), values) if text.endswith(".toml") else [parse(text, values)]
    return found


def memory(text: str) -> int:
    """The bytes of `--max-memory 288GiB`.

    Raises:
        ArgumentError: it is no size.
    """
    found = re.fullmatch(r"\s*(\d[\d_.]*)\s*([a-zA-Z]*)\s*", text)
    unit = BYTES.get(found[2].lower()) if found else None
    try:
        if found is None or unit is None:
            raise ValueError
        return int(float(found[1].replace("_", "")) * unit)
    except (ValueError, OverflowError):
        raise ArgumentError(
            "bigpool audit", f"--max-memory: expected bytes or a size like 288GiB, got {text!r}; pass 288GiB"
        ) from None


def at(texts: Iterable[str]) -> dict[str, int]:
    """`--at "num_pages=100_000"`."""
    values = {}
    for text in texts:
        name, equals, number = text.partition("=")
        value = integer(number, {})
        if not equals or value is None or not name.strip().isidentifier():
            raise ArgumentError("bigpool audit", f"--at: expected NAME=INTEGER, got {text!r}; such as num_pages=100_000")
        values[name.strip()] = value
    return values


def integer(text: str, values: Mapping[str, int]) -> int | None:
    """The value of an expression of integers and known names, None if it has none."""
    if len(text) > 200:
        return None
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, values)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, values: Mapping[str, int]) -> int | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return values.get(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand, values)
        return None if value is None else -value
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _value(node.left, values), _value(node.right, values)
    if left is None or right is None or max(abs(left), abs(right)) > 2**64:
        return None
    if isinstance(node.op, ast.Pow):
        return left**right if 0 <= right <= 64 else None
    if isinstance(node.op, ast.LShift):
        return left << right if 0 <= right <= 64 else None
    if isinstance(node.op, (ast.FloorDiv, ast.Mod)):
        return None if right == 0 else left // right if isinstance(node.op, ast.FloorDiv) else left % right
    if isinstance(node.op, ast.Mult):
        return left * right
    return left + right if isinstance(node.op, ast.Add) else left - right if isinstance(node.op, ast.Sub) else None


def from_file(path: Path, values: Mapping[str, int]) -> list[Assumption]:
    """Reads `[[assume]]` tables with `bound`, and optionally `reason` and `kernel`."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError("bigpool audit", f"--assume: expected a TOML file, got {path}: {error}; see docs/audit.md") from error
    tables = data.get("assume", [])
    if not isinstance(tables, list) or not all(
        isinstance(table, dict) and isinstance(table.get("bound"), str) for table in tables
    ):
        raise ArgumentError(
            "bigpool audit", f"--assume: expected [[assume]] tables with a bound, got others in {path}; see docs/audit.md"
        )
    found = []
    for table in tables:
        assumption = parse(table["bound"], values, str(path))
        assumption.reason, assumption.kernel = str(table.get("reason", "")), str(table.get("kernel", ""))
        found.append(assumption)
    return found


def facts(kernel: str, span: Span, stated: Iterable[Assumption]) -> tuple[dict[str, DType], dict[str, int]]:
    """Element types and exact values that hold for a kernel."""
    dtypes: dict[str, DType] = {}
    values: dict[str, int] = {}
    for item in stated:
        if (item.kernel and item.kernel != kernel) or (item.where is not None and not span.within(item.where)):
            continue
        dtype = named(item.bound) if item.sign == ":" else None
        value = item.maximum() if item.sign == "=" else None
        if dtype is not None:
            dtypes[item.name] = dtype
            item.used += 1
        elif value is not None:
            values[item.name] = value
            item.used += 1
    return dtypes, values


def apply(program: Program, assumptions: Iterable[Assumption], refined: Iterable[Sink] = ()) -> dict[Node, tuple[int, int]]:
    """Sets the bounds of variables; gives intervals for what is not a variable but has the name, in `refined` sinks too."""
    pins: dict[Node, tuple[int, int]] = {}
    chosen = list(assumptions)
    if not chosen:
        return pins
    products = any("*" in assumption.name for assumption in chosen)
    _relate(program, chosen)
    for node in everything([*program.sinks, *refined]):
        names = [name for name in (node.name, *((node.var.name, node.var.pointer) if node.var else ())) if name]
        if products and node.op == "mul":
            names.append(_product(_factors(node)))
        for assumption in chosen:
            if not names or not assumption.covers(names, node.span, program.name):
                continue
            high = assumption.maximum()
            if assumption.sign == ":":
                continue
            assumption.used += 1
            if high is None:
                continue
            if node.var is not None:
                _bound(node.var, high, assumption.sign == "=")
            elif node.op not in ("const", "ext", "trunc") and not _refines(node) and _fits(node, high):
                pins[node] = (high if assumption.sign == "=" else 0, high)
    return pins


def _relate(program: Program, chosen: Iterable[Assumption]) -> None:
    """Takes down what is stated about products of sizes and about the elements of tensors."""
    nodes = [*everything(program.sinks), *(part for last in program.extents.values() for part in walk(last))]
    names = {node.var.name for node in nodes if node.var is not None}
    pointers = {sink.pointer for sink in program.sinks}
    for item in chosen:
        high = item.maximum()
        if high is None or not item.covers((item.name,), program.span, program.name):
            continue
        if "*" in item.name and names.issuperset(parts := product_names(item.name)):
            program.products.append((parts, high))
            item.used += 1
        elif item.name.endswith(NUMEL) and high <= MAX_ELEMENTS:
            base = item.name.removesuffix(NUMEL)
            for pointer in pointers & {base, f"{base}_ptr", f"{base}_tensor"}:
                program.stated[pointer] = item.text
                item.used += 1


def _refines(node: Node) -> bool:
    """Whether a node is a value of the same name behind a mask: that one is bounded itself."""
    return node.op in ("min", "max") and bool(node.name) and node.args[0].name == node.name


def _fits(node: Node, high: int) -> bool:
    """Whether a bound keeps a computed value in its type. One that does not is no reason to look away."""
    return node.width == 0 or high < 2 ** (node.width - node.signed)


def _factors(node: Node) -> list[str]:
    """The names of what is multiplied; a product that has a name is one factor."""
    found = []
    for arg in node.args:
        part = strip(arg)
        found += _factors(part) if part.op == "mul" and not part.name else [part.name or (part.var.name if part.var else "")]
    return found


def _bound(var: Var, high: int, exact: bool) -> None:
    var.maximum = high
    var.minimum = high if exact else min(max(var.minimum, 0), high)
    var.bound_from = "assumption"
    var.low = var.high = None


def everything(sinks: Iterable[Sink]) -> Iterable[Node]:
    """Every node that sinks are made of, bounds of variables included."""
    seen: set[int] = set()
    stack = [term for sink in sinks for term in sink.terms]
    while stack:
        for node in walk(stack.pop()):
            if node.uid in seen:
                continue
            seen.add(node.uid)
            yield node
            if node.var is not None:
                stack += [bound for bound in (node.var.low, node.var.high) if bound is not None and bound.uid not in seen]
