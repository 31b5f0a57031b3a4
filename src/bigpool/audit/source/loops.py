"""Loops: what they carry becomes a phi, what a pointer gains in a pass becomes a term of its own."""

from __future__ import annotations

import ast
from dataclasses import replace

from ..expr import Node, Origin, Sink, Var, binary, close, const, extend, phi, variable
from .evaluate import evaluate
from .frame import Frame
from .modules import dotted
from .statements import assign, merge_names, run
from .values import Float, Opaque, Plain, Pointer, Tuple, Value, as_node

UNROLL = 6


def run_for(frame: Frame, node: ast.For) -> bool:
    bounds = _bounds(frame, node)
    if bounds is None:
        return _run_over(frame, node)
    low, high, step = bounds
    span = frame.span(node.iter)
    frame.state.sink(Sink("bound", tuple(side for side in (low, high) if side.op != "const") or (low,), span))
    backwards = step.op == "const" and step.value < 0
    if backwards:
        low, high = binary("add", high, const(1)), binary("add", low, const(1))
        step = const(-step.value)
    last = binary("sub", high, const(1), span)
    width = max((side.width for side in (low, high, step)), default=32) or 32
    name = node.target.id if isinstance(node.target, ast.Name) else "i"
    limit = 2 ** (width - 1) - 1
    # A persistent loop starts at its program id: the lower end is what the variable is at least.
    var = Var(name, Origin.LOOP, width, -limit - 1, limit, "type", frame.span(node.target), low, last)
    assign(frame, node.target, variable(var))
    trips = binary("floordiv", binary("add", binary("sub", high, low), binary("sub", step, const(1))), step)
    _carry(frame, node.body, trips, {name})
    run(frame, node.orelse)
    return False


def run_while(frame: Frame, node: ast.While) -> bool:
    def body() -> None:
        condition = evaluate(frame, node.test)
        number = as_node(condition)
        if number is not None and number.width and not isinstance(condition, Opaque):
            frame.state.sink(Sink("bound", (number,), frame.span(node.test)))
        run(frame, node.body)

    _carried(frame, node.body, None, set(), body)
    return False


def _bounds(frame: Frame, node: ast.For) -> tuple[Node, Node, Node] | None:
    """(start, stop, step) of a range."""
    if not isinstance(node.iter, ast.Call) or dotted(node.iter.func).rpartition(".")[2] not in ("range", "static_range"):
        return None
    values = [as_node(evaluate(frame, arg)) for arg in node.iter.args if not isinstance(arg, ast.Starred)]
    named = {
        key.arg: as_node(evaluate(frame, key.value))
        for key in node.iter.keywords
        if key.arg in ("start", "end", "step", "arg1", "arg2")
    }
    if len(values) == 1 and not named:
        values = [const(0), values[0]]
    start = named.get("start") or named.get("arg1") or (values[0] if values else None)
    stop = named.get("end") or named.get("arg2") or (values[1] if len(values) > 1 else None)
    step = named.get("step") or (values[2] if len(values) > 2 else const(1))
    if start is None or stop is None or step is None:
        return None
    return start, stop, step


def _run_over(frame: Frame, node: ast.For) -> bool:
    """A loop over a tuple that is known when the kernel is compiled."""
    values = evaluate(frame, node.iter)
    items = values.items[:UNROLL] if isinstance(values, Tuple) else (Opaque("an element of what a loop runs over"),)
    for item in items:
        assign(frame, node.target, item)
        run(frame, node.body)
    return False


def _carry(frame: Frame, body: list[ast.stmt], trips: Node | None, skip: set[str]) -> None:
    _carried(frame, body, trips, skip, lambda: run(frame, body))


def _carried(frame: Frame, body: list[ast.stmt], trips: Node | None, skip: set[str], execute: object) -> None:
    """Runs a body once (twice if widths or pointers have to be learned first) with what it carries made symbolic."""
    assert callable(execute)
    names = [name for name in _assigned(body) if name in frame.names and name not in skip]
    before = dict(frame.names)
    gains: dict[str, Pointer] = {}
    widths: dict[str, int] = {}
    if _must_learn(before, names) and frame.state.muted < 2:
        frame.state.muted += 1
        phis = _open(frame, before, names, trips, {}, {})
        execute()
        frame.state.muted -= 1
        for name in names:
            after = frame.names.get(name)
            if isinstance(after, Pointer) and isinstance(before[name], Pointer):
                gains[name] = after
            elif isinstance(after, Node) and name in phis:
                widths[name] = after.width
        frame.names = dict(before)
    phis = _open(frame, before, names, trips, gains, widths)
    execute()
    _close(frame, before, phis)


def _must_learn(before: dict[str, Value], names: list[str]) -> bool:
    values = [before[name] for name in names]
    return any(isinstance(value, Pointer) or (isinstance(value, Node) and value.width in (0, 1)) for value in values)


def _open(
    frame: Frame,
    before: dict[str, Value],
    names: list[str],
    trips: Node | None,
    gains: dict[str, Pointer],
    widths: dict[str, int],
) -> dict[str, Node]:
    phis = {}
    for name in names:
        value = before[name]
        if isinstance(value, Node):
            start = extend(value, widths.get(name) or 32) if value.width == 0 else value
            phis[name] = phi(name, start, trips, value.span)
            phis[name].name = name
            frame.names[name] = phis[name]
        elif name in gains and isinstance(value, Pointer):
            # What a pass adds is extended to 64 bits each time: it wraps on its own or not at all.
            frame.names[name] = replace(gains[name], decided=value.decided)
    return phis


def _close(frame: Frame, before: dict[str, Value], phis: dict[str, Node]) -> None:
    for name, node in phis.items():
        update = as_node(frame.names.get(name, node))
        if isinstance(frame.names.get(name), (Float, Plain)):
            continue
        if update is None or update is node:
            close(node, node.args[0])
        else:
            close(node, extend(update, node.width, node.signed))
        frame.names[name] = node
    for name, value in before.items():
        if name not in frame.names:
            frame.names[name] = value


def _assigned(body: list[ast.stmt]) -> list[str]:
    """Names that statements assign, each once."""
    found: dict[str, None] = {}
    stack: list[ast.AST] = list(body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = None
        elif isinstance(node, (ast.stmt, ast.Tuple, ast.List, ast.Starred, ast.withitem)) or hasattr(node, "body"):
            stack.extend(ast.iter_child_nodes(node))
    return list(found)


__all__ = ["merge_names", "run_for", "run_while"]
