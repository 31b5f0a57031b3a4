"""What the launches of a kernel say about its arguments: grids, sizes that the host checks, buffers that it allocates.

Only launches in the kernel's own file are read, and only if the kernel is used nowhere else in sight. What all of them agree
on is a fact about the kernel, as long as it is launched by them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .launcher import Launcher, launched
from .modules import Library, Module

MAX_LAUNCHES = 20
# A function that tries a kernel out says nothing about the sizes of its users.
TRIAL = re.compile(r"_*(test|bench|main|demo|example|check|perf|run_?(test|bench)|verify|validate)", re.I)
LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class Extent:
    """The programs of an axis: the product of some parameters, or tiles of it that are as long as another one says."""

    sizes: tuple[str, ...]
    tile: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """`bounds`: the largest value of a parameter. `grid`: the most programs of an axis, None where that is not known.

    `tensors`: parameters whose tensor is checked to have at most 2^31 elements, with the check. `pieces`: parameters that count
    tiles, or are the stride of a buffer with one entry for each tile. `inner`: tensors whose sizes are the outer sizes of another
    one that is passed, and that one. `extents`: axes of the grid by parameters. `products`: parameters whose product is checked.
    """

    bounds: dict[str, int] = field(default_factory=dict)
    grid: tuple[int | None, ...] = ()
    tensors: dict[str, str] = field(default_factory=dict)
    pieces: frozenset[str] = frozenset()
    inner: dict[str, str] = field(default_factory=dict)
    extents: dict[int, Extent] = field(default_factory=dict)
    products: dict[tuple[str, ...], int] = field(default_factory=dict)

    def programs(self, axis: int) -> int | None:
        return self.grid[axis] if axis < len(self.grid) else None


NOTHING = Host()


class Hosts:
    """Reads the launches of the kernels of an audit."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.launchers: dict[int, Launcher] = {}
        self.calls: dict[int, dict[str, list[tuple[ast.FunctionDef | None, ast.Call]]]] = {}
        self.used: dict[int, dict[str, int]] = {}
        self.imported: set[str] | None = None

    def of(self, module: Module, kernel: str) -> Host:
        """What is known of one kernel; nothing if it may be launched from elsewhere."""
        if id(module) not in self.calls:
            self._read(module)
        found = self.calls[id(module)].get(kernel, [])
        if not found or len(found) > MAX_LAUNCHES or self.used[id(module)].get(kernel, 0) > len(found) or self._elsewhere(kernel):
            return NOTHING
        try:
            seen = [self._one(module, kernel, function, call) for function, call in found]
        except RecursionError:
            return NOTHING
        return NOTHING if None in seen else _agreed([host for host in seen if host is not None])

    def _read(self, module: Module) -> None:
        calls: dict[str, list[tuple[ast.FunctionDef | None, ast.Call]]] = {}
        used: dict[str, int] = {}
        stack: list[tuple[ast.AST, ast.FunctionDef | None]] = [(module.tree, None)]
        while stack:
            node, owner = stack.pop()
            if isinstance(node, ast.Call) and (name := launched(node)) in module.kernels:
                calls.setdefault(name, []).append((owner, node))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in module.kernels:
                used[node.id] = used.get(node.id, 0) + 1
            inner = owner or (node if isinstance(node, ast.FunctionDef) else None)
            stack.extend((child, inner) for child in ast.iter_child_nodes(node))
        self.calls[id(module)], self.used[id(module)] = calls, used

    def _elsewhere(self, kernel: str) -> bool:
        if self.imported is None:
            names = (name for module in self.library.modules.values() for name in module.imports.values())
            self.imported = {name.rpartition(".")[2].rpartition("|")[2] for name in names}
        return kernel in self.imported

    def _one(self, module: Module, kernel: str, function: ast.FunctionDef | None, call: ast.Call) -> Host | None:
        if function is None or TRIAL.match(function.name):
            return None
        launcher = self.launchers.get(id(function))
        if launcher is None:
            launcher = self.launchers[id(function)] = Launcher(function, module.constants)
        arguments = _arguments(module.kernels[kernel], call)
        if arguments is None:
            return None
        known = launcher.checked(call)
        bounds = {name: bound for name, node in arguments.items() if (bound := launcher.bound(node, known)) is not None}
        tensors = {name: check for name, node in arguments.items() if (check := launcher.fits(node, known, LIMIT))}
        assert isinstance(call.func, ast.Subscript)
        grid = tuple(launcher.bound(node, known) for node in launcher.grid(call.func.slice))
        pieces = frozenset(name for name, node in arguments.items() if launcher.counts_tiles(node))
        passed = _passed(launcher, arguments, launcher.resolved(call.func.slice))
        extents = {
            axis: extent
            for axis, node in enumerate(launcher.grid(call.func.slice))
            if (extent := _extent(launcher, node, passed)) is not None
        }
        return Host(bounds, grid, tensors, pieces, dict(_inner(launcher, arguments)), extents, _products(known, passed))


def _arguments(function: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr] | None:
    """What a launch passes for each parameter; None if that cannot be told."""
    parameters = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    if any(isinstance(arg, ast.Starred) for arg in call.args) or len(call.args) > len(parameters):
        return None
    passed = dict(zip(parameters, call.args, strict=False))
    return passed | {key.arg: key.value for key in call.keywords if key.arg is not None}


def _passed(launcher: Launcher, arguments: dict[str, ast.expr], grid: ast.expr) -> dict[str, str]:
    """Parameters by what is passed for them, in the launcher's words; a constant that several get says nothing."""
    texts = {name: launcher.text(node) for name, node in arguments.items()}
    alone = [text for text in texts.values() if not text.isdigit() or list(texts.values()).count(text) == 1]
    passed = {text: name for name, text in reversed(texts.items()) if text in alone}
    if not isinstance(grid, ast.Lambda) or len(grid.args.args) != 1:
        return passed
    return passed | {f"{grid.args.args[0].arg}['{name}']": name for name in texts}


def _factors(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [*_factors(node.left), *_factors(node.right)]
    return [node]


def _extent(launcher: Launcher, node: ast.expr, passed: dict[str, str]) -> Extent | None:
    """The programs of an axis by the parameters of the kernel; None if other things decide."""
    node, tile = launcher.resolved(node), ""
    if isinstance(node, ast.Call) and len(node.args) == 2 and launcher.counts_tiles(node):
        tile = passed.get(launcher.text(node.args[1]), "")
        if not tile:
            return None
        node = launcher.resolved(node.args[0])
    whole = passed.get(launcher.text(node))
    names = [whole] if whole else [passed.get(launcher.text(part), "") for part in _factors(node)]
    return Extent(tuple(names), tile) if all(names) else None


def _products(known: dict[str, int], passed: dict[str, str]) -> dict[tuple[str, ...], int]:
    """What is checked of products of arguments."""
    found = {}
    for text, most in known.items():
        if " * " not in text:
            continue
        try:
            names = [passed.get(ast.unparse(part), "") for part in _factors(ast.parse(text, mode="eval").body)]
        except (SyntaxError, ValueError):
            # An operation that such a text has no sign for.
            continue
        if len(names) > 1 and all(names):
            found[tuple(sorted(names))] = most
    return found


def _inner(launcher: Launcher, arguments: dict[str, ast.expr]) -> Iterator[tuple[str, str]]:
    """Tensors of two axes and more that another one goes along, with an axis more."""
    sizes = {name: sizes for name, node in arguments.items() if len(sizes := launcher.sizes(node)) > 1}
    for name, own in sizes.items():
        for other, its in sizes.items():
            if len(its) > len(own) and its[: len(own)] == own:
                yield name, other


def _agreed(hosts: list[Host]) -> Host:
    """What holds in every launch."""
    bounds = {name: max(host.bounds[name] for host in hosts) for name in _common(host.bounds for host in hosts)}
    axes = [[host.grid[axis] for host in hosts] for axis in range(min(len(host.grid) for host in hosts))]
    grid = tuple(None if None in sizes else max(size for size in sizes if size is not None) for sizes in axes)
    tensors = {name: hosts[0].tensors[name] for name in _common(host.tensors for host in hosts)}
    inner = {name: hosts[0].inner[name] for name in _common(host.inner for host in hosts)}
    pieces = frozenset(_common(host.pieces for host in hosts))
    extents = {
        axis: extent for axis, extent in hosts[0].extents.items() if all(host.extents.get(axis) == extent for host in hosts)
    }
    products = {
        names: max(host.products[names] for host in hosts)
        for names in hosts[0].products
        if all(names in h.products for h in hosts)
    }
    return Host(bounds, grid, tensors, pieces, inner, extents, products)


def _common(names: Iterable[Iterable[str]]) -> Iterator[str]:
    first, *others = map(set, names)
    yield from first.intersection(*others)
