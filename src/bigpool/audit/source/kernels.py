"""Kernels of the audited files as programs for the core."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import product

from ..expr import Node, Program, const
from .frame import Budget, Facts, Frame, State
from .host import Host
from .modules import Library, Module
from .statements import parameters, run
from .values import Pointer

MAX_GATES = 3
WIDE = ("int64", "uint64", "i64")


def programs(
    library: Library, module: Module, name: str, function: ast.FunctionDef, inlined: set[tuple[str, str]], facts: Facts
) -> Iterator[Program]:
    """One program for each value of the constexprs that choose between a narrow and a wide index."""
    gates, wide = _gates(module, function)
    gates = {name: nodes for name, nodes in gates.items() if name not in facts.values}
    for values in product((True, False), repeat=len(gates)):
        program = Program(name, module.span(function), gates=dict(zip(gates, values, strict=True)))
        program.wide = wide
        program.checked, program.pieces, program.inner = facts.host.tensors, facts.host.pieces, facts.host.inner
        program.gated = [(gate, module.span(node)) for gate, nodes in gates.items() for node in nodes]
        state = State(program, library, program.gates, facts)
        try:
            frame = Frame(state, module, function, {})
            parameters(frame)
            _relate(frame, facts.host)
            run(frame, function.body)
        except Budget as reason:
            program.skipped = str(reason)
        except RecursionError:
            program.skipped = "nested too deeply to follow"
        if not program.skipped and not state.accesses and _accesses(function):
            program.skipped = "none of its loads and stores was recognised"
        inlined |= state.inlined
        yield program


def _relate(frame: Frame, host: Host) -> None:
    """What the launches say of sizes and the grid, on the parameters as they are passed."""
    nodes: dict[str, Node] = {}
    for name, value in frame.names.items():
        node = value.var if isinstance(value, Pointer) else value
        if isinstance(node, Node):
            nodes[name] = node
    program = frame.state.program
    program.products = list(host.products.items())
    for axis, extent in host.extents.items():
        if nodes.keys() >= {*extent.sizes, *([extent.tile] if extent.tile else [])}:
            whole = nodes[extent.sizes[0]]
            for name in extent.sizes[1:]:
                whole = Node("mul", (whole, nodes[name]), 0)
            last = Node("sub", (whole, const(1)), 0)
            program.extents[axis] = Node("floordiv", (last, nodes[extent.tile]), 0) if extent.tile else last


def _gates(module: Module, function: ast.FunctionDef) -> tuple[dict[str, list[ast.AST]], dict[str, bool]]:
    """Constexprs that are tested by name where one branch names a 64-bit type: their wide branches, their wide values."""
    constexprs = {
        arg.arg
        for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        if arg.annotation is not None and "constexpr" in ast.unparse(arg.annotation)
    }
    gates: dict[str, list[ast.AST]] = {}
    values: dict[str, bool] = {}
    for node in ast.walk(function):
        if not isinstance(node, (ast.If, ast.IfExp)):
            continue
        test = node.test.operand if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not) else node.test
        if not isinstance(test, ast.Name) or test.id not in constexprs:
            continue
        sides = [node.body, node.orelse]
        wide = [side for side in sides if side and any(map(_is_wide, side if isinstance(side, list) else [side]))]
        narrow = sides[wide[0] is node.body] if wide else None
        only = len(wide) == 1 and _only_widens(wide[0]) and (not narrow or _only_widens(narrow))
        if only and (test.id in gates or len(gates) < MAX_GATES):
            branch = wide[0]
            values.setdefault(test.id, (branch is node.body) == (test is node.test))
            gates.setdefault(test.id, []).extend(branch if isinstance(branch, list) else [branch])
    return gates, values


def _accesses(function: ast.FunctionDef) -> bool:
    calls = (node.func.attr for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
    return any(name in ("load", "store") or name.startswith("atomic_") for name in calls)


def _only_widens(branch: list[ast.stmt] | ast.expr) -> bool:
    """Whether a branch does nothing but compute an index; a branch that loads is there for another reason."""
    parts: list[ast.AST] = [*branch] if isinstance(branch, list) else [branch]
    if not all(isinstance(part, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.expr)) for part in parts):
        return False
    calls = (node for part in parts for node in ast.walk(part) if isinstance(node, ast.Call))
    return not any(isinstance(call.func, ast.Attribute) and call.func.attr in ("load", "store", "dot") for call in calls)


def _is_wide(node: ast.AST) -> bool:
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr in WIDE:
            return True
        if isinstance(part, ast.Name) and part.id in WIDE:
            return True
    return False
