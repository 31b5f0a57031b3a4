"""Expressions of a kernel, evaluated to values."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace

from ..expr import BY_TYPE, INT32_MAX, MAX_COUNT, Node, Origin, Var, binary, const, extend, select, unary, unknown, variable
from . import types
from .fields import field_of
from .frame import Frame, constexpr
from .modules import dotted
from .values import (
    Block,
    Bound,
    Dotted,
    DType,
    Float,
    Function,
    Opaque,
    Plain,
    Pointer,
    Term,
    Tuple,
    Value,
    as_node,
    merge,
)

BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.LShift: "shl",
    ast.RShift: "shr",
    ast.BitAnd: "and",
    ast.BitOr: "or",
    ast.BitXor: "xor",
}
MAX_DEPTH = 150
TRITON = ("triton", "gluon")
# What a project's own module that is not among the audited files hands on under these names.
HANDED_ON = {"tl": "triton.language", "language": "triton.language", "triton": "triton"}


def evaluate(frame: Frame, node: ast.expr, depth: int = 0) -> Value:
    frame.state.step()
    if depth > MAX_DEPTH:
        return Opaque("an expression nested too deeply")
    if isinstance(node, ast.Constant):
        return _constant(frame, node)
    if isinstance(node, ast.Name):
        return lookup(frame, node)
    if isinstance(node, ast.BinOp):
        return _binary(frame, node, depth)
    if isinstance(node, ast.UnaryOp):
        return _unary(frame, node, depth)
    if isinstance(node, ast.Compare):
        return _compare(frame, node, depth)
    if isinstance(node, ast.BoolOp):
        return _bool(frame, node, depth)
    if isinstance(node, ast.IfExp):
        return _conditional(frame, node, depth)
    if isinstance(node, ast.Call):
        from .calls import call

        return call(frame, node, depth)
    if isinstance(node, ast.Attribute):
        return _attribute(frame, node, depth)
    if isinstance(node, ast.Subscript):
        return _subscript(frame, node, depth)
    if isinstance(node, (ast.Tuple, ast.List)):
        return Tuple(tuple(evaluate(frame, item, depth + 1) for item in node.elts))
    if isinstance(node, ast.NamedExpr):
        value = evaluate(frame, node.value, depth + 1)
        frame.names[node.target.id] = value
        return value
    if isinstance(node, ast.JoinedStr):
        return Plain("")
    return Opaque(f"a {type(node).__name__} expression")


def _constant(frame: Frame, node: ast.Constant) -> Value:
    if isinstance(node.value, (bool, int)):
        return const(int(node.value), 0, frame.span(node))
    if isinstance(node.value, float):
        return Float()
    return Plain(node.value)


def lookup(frame: Frame, node: ast.Name) -> Value:
    """A local name, a global of the module, an import, or a Python builtin."""
    name, module = node.id, frame.module
    if name in frame.names:
        return frame.names[name]
    if name in frame.constants:
        return frame.constants[name]
    value: Value
    if name in module.functions:
        value = Function(module, module.functions[name])
    elif name in module.imports:
        value = resolve(frame, module.imports[name])
    elif name in module.constants:
        frame.constants[name] = Opaque(f"the global {name}")
        value = _global(frame, name)
    else:
        value = Dotted(f"builtins.{name}")
    frame.constants[name] = value
    return value


def _global(frame: Frame, name: str) -> Value:
    source = frame.module.constants[name]
    while isinstance(source, ast.Call) and dotted(source.func).rpartition(".")[2] == "constexpr" and source.args:
        source = source.args[0]
    if isinstance(source, ast.Call) and dotted(source.func).rpartition(".")[2] in ("jit", "autotune", "heuristics"):
        return Opaque(f"the global {name}")
    if isinstance(source, (ast.Constant, ast.Name, ast.Attribute, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.List)):
        value = evaluate(replace(frame, names={}), source)
        if not isinstance(value, Opaque):
            return value
    return constexpr(name, frame.span(source))


def resolve(frame: Frame, name: str) -> Value:
    """What an import stands for: a function of the audited tree, a constant, or a name of a library."""
    for _ in range(5):
        if name.split(".")[0] in TRITON:
            return types.named(name) or Dotted(name)
        found = frame.state.library.find(name, frame.module.file)
        if found is None:
            return Dotted(HANDED_ON.get(name.rpartition(".")[2], name))
        module, attribute = found
        if module.imports.get(attribute, "").split(".")[0] in TRITON:
            # Where Triton is optional, a placeholder is assigned to the same name.
            name = module.imports[attribute]
            continue
        if attribute in module.functions:
            return Function(module, module.functions[attribute])
        if attribute in module.constants:
            return _global(replace(frame, module=module, names={}, constants={}), attribute)
        if attribute not in module.imports:
            return Dotted(name)
        name = module.imports[attribute]
    return Dotted(name)


def _binary(frame: Frame, node: ast.BinOp, depth: int) -> Value:
    left, right = evaluate(frame, node.left, depth + 1), evaluate(frame, node.right, depth + 1)
    if isinstance(node.op, (ast.Div, ast.MatMult, ast.Pow)):
        return _division(frame, node, left, right)
    return operate(frame, BINARY[type(node.op)], left, right, node)


def _division(frame: Frame, node: ast.BinOp, left: Value, right: Value) -> Value:
    if isinstance(node.op, ast.Pow) and isinstance(left, Node) and isinstance(right, Node):
        if left.op == right.op == "const" and 0 <= right.value < 64 and abs(left.value) < 2**16:
            return const(left.value**right.value, 0, frame.span(node))
        if left.width == right.width == 0:
            return constexpr("**", frame.span(node))
    return Float()


def operate(frame: Frame, op: str, left: Value, right: Value, node: ast.AST) -> Value:
    """`left op right` for whatever the two are."""
    span = frame.span(node)
    if op == "add":
        for pointer, other in ((left, right), (right, left)):
            if isinstance(pointer, Pointer) and (pointer.decided or pointer is left or not isinstance(other, Pointer)):
                term = as_node(other, span)
                if term is None:
                    return Float() if isinstance(other, Float) and not pointer.decided else pointer
                return pointer.add(term, span)
    if op == "sub" and isinstance(left, Pointer) and (left.decided or (left.terms and not isinstance(right, Pointer))):
        term = as_node(right, span)
        return left if term is None else left.add(unary("neg", term, span), span)
    if isinstance(left, Float) or isinstance(right, Float):
        return Float()
    first, second = as_node(left, span), as_node(right, span)
    if first is None or second is None:
        if isinstance(left, Tuple) and isinstance(right, Tuple) and op == "add":
            return Tuple((*left.items, *right.items))
        return next((side for side in (left, right) if isinstance(side, Opaque)), Opaque("an operation on what is no integer"))
    return binary(op, first, second, span)


def _unary(frame: Frame, node: ast.UnaryOp, depth: int) -> Value:
    operand = evaluate(frame, node.operand, depth + 1)
    span = frame.span(node)
    if isinstance(node.op, ast.Not):
        known = truth(operand)
        return const(int(not known), 0, span) if known is not None else operand
    value = as_node(operand, span)
    if value is None or isinstance(node.op, ast.UAdd):
        return operand
    if isinstance(node.op, ast.USub):
        return unary("neg", value, span)
    return value if value.width == 1 else binary("sub", unary("neg", value, span), const(1), span)


def _compare(frame: Frame, node: ast.Compare, depth: int) -> Value:
    left = evaluate(frame, node.left, depth + 1)
    result: Value | None = None
    for op, side in zip(node.ops, node.comparators, strict=True):
        right = evaluate(frame, side, depth + 1)
        one = _compared(frame, op, left, right, node)
        result = one if result is None else operate(frame, "and", result, one, node)
        left = right
    assert result is not None
    return result


def _compared(frame: Frame, op: ast.cmpop, left: Value, right: Value, node: ast.AST) -> Value:
    span = frame.span(node)
    if isinstance(op, (ast.Is, ast.IsNot)) or isinstance(left, (Plain, DType)) or isinstance(right, (Plain, DType)):
        return _identity(op, left, right)
    if isinstance(left, Float) or isinstance(right, Float):
        return variable(Var("comparison", Origin.ARANGE, 1, 0, 1, "type", span), False)
    first, second = as_node(left, span), as_node(right, span)
    if first is None or second is None:
        return constexpr("comparison", span, 1)
    if first.op == second.op == "const":
        known = _COMPARE.get(type(op))
        if known is not None:
            return const(int(known(first.value, second.value)), 0, span)
    return binary("cmp", first, second, span, type(op).__name__)


_COMPARE: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}


def _identity(op: ast.cmpop, left: Value, right: Value) -> Value:
    same: bool | None = None
    if isinstance(left, Plain) and isinstance(right, Plain):
        same = left == right
    elif isinstance(left, (Node, Block)) and isinstance(right, Plain) and right.value is None and not _constant_like(left):
        same = False
    if same is None or not isinstance(op, (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)):
        return constexpr("comparison", None, 1)
    return const(int(same == isinstance(op, (ast.Is, ast.Eq))))


def _constant_like(value: Value) -> bool:
    """Whether a value could be None: a constexpr that was passed on, not one that was computed."""
    return isinstance(value, Node) and value.width == 0 and value.op == "var"


def _bool(frame: Frame, node: ast.BoolOp, depth: int) -> Value:
    values = [evaluate(frame, item, depth + 1) for item in node.values]
    known = [truth(value) for value in values]
    stop = isinstance(node.op, ast.Or)
    if stop in known:
        return const(int(stop))
    left = [value for value, constant in zip(values, known, strict=True) if constant is None]
    if not left:
        return const(int(not stop))
    result = left[0]
    for value in left[1:]:
        result = operate(frame, "or" if stop else "and", result, value, node)
    return result


def _conditional(frame: Frame, node: ast.IfExp, depth: int) -> Value:
    condition = evaluate(frame, node.test, depth + 1)
    known = gate(frame, node.test, condition)
    if known is not None:
        return evaluate(frame, node.body if known else node.orelse, depth + 1)
    return merge(evaluate(frame, node.body, depth + 1), evaluate(frame, node.orelse, depth + 1))


def truth(value: Value) -> bool | None:
    """Whether a condition holds, None if that is not known."""
    if isinstance(value, Node) and value.op == "const":
        return bool(value.value)
    if isinstance(value, Plain):
        return bool(value.value)
    return None


def gate(frame: Frame, test: ast.expr, value: Value) -> bool | None:
    """`truth`, with the constexprs that this run has fixed."""
    negated = False
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, negated = test.operand, not negated
    if isinstance(test, ast.Name) and test.id in frame.names:
        named = frame.names[test.id]
        var = named.var if isinstance(named, Node) else None
        if var is not None and var.name in frame.state.gates:
            return frame.state.gates[var.name] != negated
    return truth(value)


def _attribute(frame: Frame, node: ast.Attribute, depth: int) -> Value:
    value = evaluate(frame, node.value, depth + 1)
    if isinstance(value, Dotted):
        name = f"{value.name}.{node.attr}"
        if name.split(".")[0] in TRITON:
            return types.named(name) or Dotted(name)
        return resolve(frame, name)
    if node.attr in ("dtype", "type"):
        return _type_of(value)
    if node.attr == "element_ty" and isinstance(value, DType):
        return value.element or DType()
    if node.attr in ("shape", "numel", "block_shape"):
        return Tuple(tuple(constexpr("shape") for _ in range(5)))
    if node.attr in ("T", "value", "handle"):
        return value
    plain = isinstance(value, Pointer) and not value.decided and not value.terms and value.var is not None
    if plain or (isinstance(value, Node) and value.var is not None and value.var.origin is Origin.CONSTEXPR):
        assert isinstance(value, (Pointer, Node))
        return field_of(frame, value, node)
    return Bound(value, node.attr)


def _type_of(value: Value) -> DType:
    if isinstance(value, Pointer):
        return DType("pointer", 64, value.dtype)
    if isinstance(value, Float):
        return DType("float", 32)
    if isinstance(value, Node) and value.width and (value.var is None or value.var.typed):
        return DType("int" if value.signed else "uint", value.width)
    return DType()


def _subscript(frame: Frame, node: ast.Subscript, depth: int) -> Value:
    value = evaluate(frame, node.value, depth + 1)
    if not isinstance(value, Tuple):
        return value
    index = evaluate(frame, node.slice, depth + 1) if not isinstance(node.slice, ast.Slice) else None
    if isinstance(index, Node) and index.op == "const" and -len(value.items) <= index.value < len(value.items):
        return value.items[index.value]
    if isinstance(node.slice, ast.Slice) or not value.items:
        return value
    result = value.items[0]
    for item in value.items[1:]:
        result = merge(result, item)
    return result


def cast(frame: Frame, value: Value, dtype: Value, node: ast.AST) -> Value:
    """`value.to(dtype)`, `tl.cast(value, dtype)`."""
    span = frame.span(node)
    if isinstance(dtype, Plain) and isinstance(dtype.value, str):
        dtype = types.named(dtype.value) or DType()
    if isinstance(dtype, DType) and dtype.kind == "pointer":
        # An address that was loaded, or the same address with elements of another size.
        if isinstance(value, Pointer):
            return replace(
                value, dtype=dtype.element or DType(), decided=True, in_bytes=types.item_bytes(dtype.element or DType()) == 1
            )
        return Pointer("a loaded address", (), dtype.element or DType())
    if isinstance(value, Pointer) and value.decided:
        return value
    if isinstance(dtype, DType) and dtype.kind == "float":
        return Float()
    number = as_node(value, span)
    if isinstance(dtype, DType) and dtype.kind in ("int", "uint"):
        if number is None:
            return variable(Var("number", Origin.ARANGE, dtype.bits, 0, min(INT32_MAX, 2 ** (dtype.bits - 1)), "type", span))
        return _cast_integer(number, dtype, span)
    if isinstance(dtype, Node) and dtype.var is not None and number is not None and number.narrow:
        # A type that the host chooses is a gate: trusted, and said to be.
        return Node("ext", (number,), 64, True, span, detail=f"{BY_TYPE}{dtype.var.name}")
    return value


def _cast_integer(number: Node, dtype: DType, span: object) -> Node:
    var = number.var
    if var is not None and var.origin is Origin.LOAD and not var.typed and dtype.bits < 64 and number.width == 32:
        return number
    result = extend(number, dtype.bits, dtype.kind == "int", number.span if span is None else None, explicit=True)
    if result is not number:
        result.span = span  # type: ignore[assignment]
    return result


__all__ = ["MAX_COUNT", "Term", "cast", "evaluate", "select", "unknown"]
