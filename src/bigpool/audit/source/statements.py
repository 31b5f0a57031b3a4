"""Statements of a kernel: assignments, branches, helper bodies. Loops are in `loops.py`."""

from __future__ import annotations

import ast
from dataclasses import replace

from ..expr import INT32_MAX, Node, Origin, Sink, const, walk
from . import types
from .conditions import bounded
from .evaluate import BINARY, evaluate, gate, operate, resolve
from .frame import Frame
from .values import Block, Float, Function, Opaque, Plain, Pointer, Tuple, Value, argument, as_node, merge


def run_function(frame: Frame, function: Function, names: dict[str, Value]) -> Value:
    """Follows a helper and gives what it returns."""
    inner = Frame(frame.state, function.module, function.node, names, frame.depth + 1)
    _annotated(inner)
    run(inner, function.node.body)
    if not inner.returned:
        return Plain(None)
    result = inner.returned[0]
    for value in inner.returned[1:]:
        result = _narrower(result, value) if inner.one_side else merge(result, value)
    return result


def _annotated(frame: Frame) -> None:
    """A 64-bit annotation on a helper's parameter does not convert what is passed: only a kernel's own parameters obey it."""
    for arg in frame.function.args.args:
        value = frame.names.get(arg.arg)
        if isinstance(value, Node) and not value.name and value.op not in ("const", "var"):
            value.name = arg.arg


def run(frame: Frame, body: list[ast.stmt]) -> bool:
    """Runs statements; True if every way through them returns."""
    return any(_run_one(frame, statement) for statement in body)


def _run_one(frame: Frame, node: ast.stmt) -> bool:
    frame.state.step()
    if isinstance(node, ast.Assign):
        value = evaluate(frame, node.value)
        for target in node.targets:
            assign(frame, target, value)
    elif isinstance(node, ast.AugAssign):
        _augmented(frame, node)
    elif isinstance(node, ast.AnnAssign):
        if node.value is not None:
            assign(frame, node.target, _converted(frame, node))
    elif isinstance(node, ast.Expr):
        evaluate(frame, node.value)
    elif isinstance(node, ast.Return):
        frame.returned.append(evaluate(frame, node.value) if node.value is not None else Plain(None))
        return True
    elif isinstance(node, ast.If):
        return _if(frame, node)
    elif isinstance(node, ast.For):
        from .loops import run_for

        return run_for(frame, node)
    elif isinstance(node, ast.While):
        from .loops import run_while

        return run_while(frame, node)
    elif isinstance(node, ast.With):
        for item in node.items:
            value = evaluate(frame, item.context_expr)
            if item.optional_vars is not None:
                assign(frame, item.optional_vars, value)
        return run(frame, node.body)
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            frame.names[name] = resolve(frame, frame.module.imports.get(name, alias.name))
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        frame.names[node.name] = (
            Function(frame.module, node) if isinstance(node, ast.FunctionDef) else Opaque("a class in a kernel")
        )
    return isinstance(node, (ast.Raise, ast.Break, ast.Continue))


def _converted(frame: Frame, node: ast.AnnAssign) -> Value:
    """`x: tl.constexpr = 3` stays a Python integer."""
    assert node.value is not None
    return evaluate(frame, node.value)


def assign(frame: Frame, target: ast.expr, value: Value) -> None:
    if isinstance(target, ast.Name):
        frame.names[target.id] = name_value(value, target.id)
    elif isinstance(target, (ast.Tuple, ast.List)):
        items = value.items if isinstance(value, Tuple) else ()
        unread = isinstance(value, Pointer) and not value.decided and not value.terms
        for place, part in enumerate(target.elts):
            if unread and isinstance(part, ast.Name):
                # A parameter that is a tuple.
                span = frame.span(part)
                assign(frame, part, Pointer(part.id, (), decided=False, var=argument(part.id, span)))
            elif isinstance(part, ast.Starred):
                assign(frame, part.value, Tuple(items[place:]))
            else:
                rest = value if isinstance(value, (Opaque, Float)) else Opaque("part of what is no tuple")
                assign(frame, part, items[place] if place < len(items) else rest)


def name_value(value: Value, name: str) -> Value:
    """Remembers what the author calls a value; the first name wins."""
    if isinstance(value, Node) and not value.name:
        value.name = name
        inner = value
        while inner.op in ("ext", "trunc"):
            inner = inner.args[0]
        if inner.var is not None and inner.var.origin in (Origin.PROGRAM_ID, Origin.LOAD, Origin.NUM_PROGRAMS) and not inner.name:
            inner.name = name
        if inner.var is not None and inner.var.name in ("arange",):
            inner.var.name = name
    return value


def _augmented(frame: Frame, node: ast.AugAssign) -> None:
    right = evaluate(frame, node.value)
    if not isinstance(node.target, ast.Name):
        return
    left = frame.names.get(node.target.id, Opaque(f"the variable {node.target.id}"))
    op = BINARY.get(type(node.op))
    value = Float() if op is None else operate(frame, op, left, right, node)
    frame.names[node.target.id] = name_value(value, node.target.id)


def _if(frame: Frame, node: ast.If) -> bool:
    condition = evaluate(frame, node.test)
    known = gate(frame, node.test, condition)
    if known is not None:
        return run(frame, node.body if known else node.orelse)
    number = as_node(condition)
    if number is not None and number.width and not isinstance(condition, Opaque):
        frame.state.sink(Sink("mask", (number,), frame.span(node.test)))
    before = dict(frame.names)
    if number is not None:
        _narrowed(frame, node.test, number, True)
    ended = run(frame, node.body)
    one_side = number is not None and compiled(number)
    frame.one_side = frame.one_side or (one_side and ended)
    after = frame.names
    frame.names = dict(before)
    if number is not None and ended:
        _narrowed(frame, node.test, number, False)
    if run(frame, node.orelse):
        if ended:
            return True
        frame.names = after
    elif not ended:
        frame.names = merge_names(after, frame.names, one_side)
    return False


def _narrowed(frame: Frame, test: ast.expr, condition: Node, holds: bool) -> None:
    """Variables that a condition compares are bounded where it decides."""
    for part in ast.walk(test):
        if isinstance(part, ast.Name) and isinstance(value := frame.names.get(part.id), Node) and value.width:
            frame.names[part.id] = bounded(condition, value, holds)


def merge_names(left: dict[str, Value], right: dict[str, Value], one_side: bool = False) -> dict[str, Value]:
    """The variables after a branch. What only one side defines is what it defines.

    `one_side`: a specialisation has one of the sides, so what the other side assigns does not widen a 32-bit value: it is kept.
    """
    merged = dict(left)
    for name, value in right.items():
        other = left.get(name)
        if other is None:
            merged[name] = value
        else:
            merged[name] = name_value(_narrower(other, value) if one_side else merge(other, value), name)
    return merged


def _narrower(left: Value, right: Value) -> Value:
    """One of two values that no specialisation has both of: the narrower, where one is 32 bits wide and the other 64."""
    if isinstance(left, Tuple) and isinstance(right, Tuple) and len(left.items) == len(right.items):
        return Tuple(tuple(_narrower(a, b) for a, b in zip(left.items, right.items, strict=True)))
    widths = _width(left), _width(right)
    if 1 < min(widths) < max(widths):
        return left if widths[0] < widths[1] else right
    return merge(left, right)


def _width(value: Value) -> int:
    """Bits of an integer, 0 of anything else."""
    if isinstance(value, Pointer) and value.decided:
        return 0
    number = as_node(value) if isinstance(value, (Node, Pointer)) else None
    return number.width if number is not None else 0


def compiled(condition: Node) -> bool:
    """Whether a condition is decided when the kernel is compiled."""
    leaves = [node.var for node in walk(condition) if node.var is not None]
    return bool(leaves) and all(var.origin is Origin.CONSTEXPR for var in leaves)


def parameters(frame: Frame) -> None:
    """The parameters of a kernel as it is launched: constexprs, annotated scalars, and what may be a pointer or a scalar."""
    spec = frame.function.args
    for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs):
        frame.names[arg.arg] = _parameter(frame, arg)
    if spec.vararg is not None:
        frame.names[spec.vararg.arg] = Opaque(f"the arguments *{spec.vararg.arg}")


def _parameter(frame: Frame, arg: ast.arg) -> Value:
    from .frame import constexpr

    span = frame.span(arg)
    facts = frame.state.facts
    stated = facts.dtype(arg.arg)
    if stated is not None:
        return Pointer(arg.arg, (), stated)
    value = facts.values.get(arg.arg)
    note = ast.unparse(arg.annotation).strip("'\"") if arg.annotation is not None else ""
    if "constexpr" in note:
        frame.state.constexprs.add(arg.arg)
        if value is not None:
            return replace(const(value, 0, span), name=arg.arg, detail="constexpr")
        return _held(frame, arg.arg, constexpr(arg.arg, span))
    dtype = types.named(note) if note else None
    if dtype is not None and dtype.kind == "pointer":
        return Pointer(arg.arg, (), dtype.element or dtype)
    if dtype is not None and dtype.kind in ("int", "uint") and "ptr" not in note:
        return _held(frame, arg.arg, argument(arg.arg, span, max(dtype.bits, 8)))
    if dtype is not None and dtype.kind == "float":
        return Float()
    if "pointer" in note.lower() or note.endswith("Tensor"):
        return Pointer(arg.arg)
    if "descriptor" in note.lower():
        return Block(Pointer(arg.arg))
    width = 64 if value is not None and abs(value) > INT32_MAX else 32
    return Pointer(arg.arg, (), decided=False, var=_held(frame, arg.arg, argument(arg.arg, span, width)))


def _held(frame: Frame, name: str, node: Node) -> Node:
    """A parameter with the bound that its launches keep."""
    most, var = frame.state.facts.host.bounds.get(name), node.var
    if most is not None and var is not None and 0 <= most < var.maximum:
        var.maximum, var.bound_from = most, "launcher"
    return node


__all__ = ["assign", "merge_names", "parameters", "replace", "run", "run_function"]
