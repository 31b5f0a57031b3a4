"""What each operation of TTIR on integers is in the expression graph. Pointers are in `memory.py`."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..expr import Node, Origin, Var, const, extend, unknown, variable
from ..facts import holds
from .lift import Lift
from .ttir import Op, width
from .values import DATA, Value, merge

Handler = Callable[[Lift, Op], list[Value]]
HANDLERS: dict[str, Handler] = {}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BINARY = {
    "addi": "add",
    "subi": "sub",
    "muli": "mul",
    "shli": "shl",
    "shrsi": "shr",
    "divsi": "floordiv",
    "floordivsi": "floordiv",
    "remsi": "mod",
    "andi": "and",
    "ori": "or",
    "xori": "xor",
    "minsi": "min",
    "maxsi": "max",
    "ceildivsi": "floordiv",
}
_UNSIGNED = {"shrui": "shr", "divui": "floordiv", "remui": "mod", "minui": "min", "maxui": "max", "ceildivui": "floordiv"}
_SAME = (
    "tt.splat tt.unsplat tt.broadcast tt.expand_dims tt.reshape tt.trans tt.view ttg.convert_layout arith.bitcast "
    "arith.index_cast tt.split"
)


def handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def result_type(op: Op) -> str:
    types = op.types
    for arrow in ("->", " to "):
        if arrow in types:
            types = types.rpartition(arrow)[2]
    return types.strip()


@handles("arith.constant")
def constant(lift: Lift, op: Op) -> list[Value]:
    if op.text.startswith(("true", "false")):
        return [const(int(op.text.startswith("true")), 1)]
    bits = width(op.types)
    if not bits:
        return [DATA]
    found = re.match(r"(?:dense<)?(-?\d+|true|false)>?", op.text)
    if found is None:
        return [unknown("a constant tensor", bits, lift.where(op.loc))]
    value = int(found[1] == "true") if found[1] in ("true", "false") else int(found[1])
    return [const(value, bits)]


@handles("tt.get_program_id", "tt.get_num_programs")
def program(lift: Lift, op: Op) -> list[Value]:
    axis = "xyz".find(op.text[:1])
    origin = Origin.PROGRAM_ID if op.name.endswith("id") else Origin.NUM_PROGRAMS
    return [lift.program_axis(origin, max(axis, 0), op)]


@handles("tt.make_range")
def make_range(lift: Lift, op: Op) -> list[Value]:
    found = {name: int(value) for name, value in re.findall(r"(start|end) = (-?\d+)", op.text)}
    start, end = found.get("start", 0), found.get("end", 1)
    name = lift.name_of(op, f"arange({start}, {end})")
    var = Var(name, Origin.ARANGE, 32, start, end - 1, "captured", lift.where(op.loc))
    var.low, var.high = const(start), const(end - 1)
    return [variable(var)]


@handles(*_SAME.split())
def same(lift: Lift, op: Op) -> list[Value]:
    value = lift.get(op.operands[0]) if op.operands else DATA
    bits = width(result_type(op))
    if isinstance(value, Node) and bits and bits != value.width and op.name == "arith.index_cast":
        value = extend(value, bits)
    return [value for _ in op.results]


@handles("tt.join", "tt.cat")
def joined(lift: Lift, op: Op) -> list[Value]:
    return [merge([lift.get(name) for name in op.operands])]


@handles("tt.gather")
def gathered(lift: Lift, op: Op) -> list[Value]:
    return [lift.get(op.operands[0].partition("[")[0])]


def _binary(lift: Lift, op: Op, kind: str) -> list[Value]:
    bits = width(op.types)
    left, right = (lift.node(name, bits) for name in op.operands[:2])
    where = lift.where(op.loc, kind)
    name = lift.name_of(op, "", kind) if kind not in ("add", "sub", "mul", "shl") else ""
    if kind == "or" and _apart(lift, left, right):
        kind = "add"
    if kind in ("add", "sub", "mul") and left.op == right.op == "const" and not (left.name or right.name):
        value = {"add": left.value + right.value, "sub": left.value - right.value, "mul": left.value * right.value}[kind]
        if -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            return [const(value, bits)]
    return [Node(kind, (left, right), bits, True, where, name=name)]


def _apart(lift: Lift, left: Node, right: Node) -> bool:
    """Whether two values have no bit in common, so that `|` adds them."""
    for low, high in ((left, right), (right, left)):
        least, most = lift.ranges.of(low)
        if least < 0:
            continue
        ways = lift.ranges.expander.ways(high)
        if all(coefficient % 2 ** most.bit_length() == 0 for poly in ways for coefficient in poly.values()):
            return True
    return False


def _unsigned(lift: Lift, op: Op, kind: str) -> list[Value]:
    """Unsigned values wrap on purpose. What comes out is known by its bits, or by the divisor."""
    bits = width(op.types)
    left, right = (lift.node(name, bits) for name in op.operands[:2])
    where = lift.where(op.loc, kind)
    low, high = lift.ranges.of(left)
    if low >= 0 and high < 2 ** (bits - 1):
        return [Node(kind, (left, right), bits, True, where)]
    top = 2**bits - 1
    least, most = lift.ranges.of(right)
    if kind == "mod" and most > 0:
        top = most - 1
    elif kind == "shr" and least >= 0:
        top >>= least
    elif kind == "floordiv" and least > 0:
        top //= least
    name = lift.name_of(op, "an unsigned value")
    return [variable(Var(name, Origin.UNKNOWN, bits, 0, min(top, 2 ** (bits - 1) - 1), "type", where))]


def _register_arithmetic() -> None:
    for suffix, kind in _BINARY.items():
        HANDLERS[f"arith.{suffix}"] = lambda lift, op, kind=kind: _binary(lift, op, kind)  # type: ignore[misc]
    for suffix, kind in _UNSIGNED.items():
        HANDLERS[f"arith.{suffix}"] = lambda lift, op, kind=kind: _unsigned(lift, op, kind)  # type: ignore[misc]


_register_arithmetic()


@handles("math.absi")
def absolute(lift: Lift, op: Op) -> list[Value]:
    operand = lift.node(op.operands[0], width(op.types))
    return [Node("abs", (operand,), operand.width, True, lift.where(op.loc))]


@handles("arith.cmpi")
def compare(lift: Lift, op: Op) -> list[Value]:
    predicate = op.text.partition(",")[0].strip()
    bits = width(op.types)
    left, right = (lift.node(name, bits) for name in op.operands[:2])
    detail = _COMPARISONS.get(predicate.lstrip("su") if predicate not in ("eq", "ne") else predicate, "")
    return [Node("cmp", (left, right), 1, False, lift.where(op.loc), detail=detail)]


@handles("arith.extsi", "arith.extui", "arith.trunci")
def resize(lift: Lift, op: Op) -> list[Value]:
    bits = width(result_type(op))
    operand = lift.node(op.operands[0], width(op.types.partition(" to ")[0]))
    if operand.op == "const":
        return [const(operand.value, bits)]
    where = lift.where(op.loc)
    if op.name == "arith.extui" and operand.width > 1 and lift.ranges.of(operand)[0] < 0:
        return [variable(Var("an unsigned value", Origin.UNKNOWN, bits, 0, 2**operand.width - 1, "type", where))]
    return [Node("trunc" if op.name == "arith.trunci" else "ext", (operand,), bits, True, where, detail="explicit")]


@handles("arith.select")
def choose(lift: Lift, op: Op) -> list[Value]:
    condition, left, right = op.operands[:3]
    first, second = lift.get(left), lift.get(right)
    if isinstance(first, Node) and isinstance(second, Node):
        return [lift.choose(lift.node(condition, 1), first, second)]
    return [merge([first, second])]


@handles("tt.clampi")
def clamp(lift: Lift, op: Op) -> list[Value]:
    value, low, high = (lift.node(name) for name in op.operands[:3])
    return [Node("min", (Node("max", (value, low), value.width), high), value.width, True, lift.where(op.loc))]


def data(lift: Lift, op: Op, bits: int) -> Node:
    """An integer that was computed as data: a sum of a product of matrices, a converted float."""
    half = 2 ** (bits - 1)
    reason = f"{op.name} computes it"
    return variable(
        Var(
            lift.name_of(op, "a computed value"), Origin.UNKNOWN, bits, -half, half - 1, "type", lift.where(op.loc), reason=reason
        )
    )


@handles("arith.fptosi", "arith.fptoui", "tt.dot", "tt.dot_scaled", "tt.mulhiui", "tt.histogram")
def computed(lift: Lift, op: Op) -> list[Value]:
    bits = width(result_type(op))
    if op.name == "tt.mulhiui":
        return [variable(Var("a high product", Origin.UNKNOWN, bits, 0, 2**bits - 1, "type", lift.where(op.loc)))]
    return [data(lift, op, bits) if bits else DATA for _ in op.results]


@handles("scf.for")
def for_loop(lift: Lift, op: Op) -> list[Value]:
    return lift.for_loop(op)


@handles("scf.while")
def while_loop(lift: Lift, op: Op) -> list[Value]:
    return lift.while_loop(op)


@handles("scf.if")
def branch(lift: Lift, op: Op) -> list[Value]:
    return lift.if_op(op)


@handles("tt.call", "func.call")
def call(lift: Lift, op: Op) -> list[Value]:
    return lift.call(op)


@handles("tt.reduce", "tt.scan")
def combine(lift: Lift, op: Op) -> list[Value]:
    """Sums add up over the axis; anything else picks one of the values."""
    inputs = [lift.get(name) for name in op.operands[: len(op.results)]]
    if not any(isinstance(value, Node) for value in inputs):
        return [DATA for _ in op.results]
    block = op.regions[0][0]
    frame = lift.frames[-1]
    for place, (name, type_, _) in enumerate(block.args):
        value = inputs[place % len(inputs)]
        bits = width(type_)
        frame[name] = variable(Var("", Origin.UNKNOWN, bits, 0, 0)) if isinstance(value, Node) and bits else value
    yielded = lift.region(op.regions[0])
    return [_combined(lift, op, value, made) for value, made in zip(inputs, yielded, strict=False)]


def _combined(lift: Lift, op: Op, value: Value, made: Value) -> Value:
    if not isinstance(value, Node) or not isinstance(made, Node):
        return value
    where = lift.where(op.loc)
    name = lift.name_of(op, "")
    kind = "reduce" if op.name == "tt.reduce" else "scan"
    if made.op in ("min", "max", "select", "var"):
        return Node(kind, (value, const(1)), value.width, True, where, detail="max", name=name)
    if made.op == "add":
        detail = "sum" if kind == "reduce" else "cumsum"
        return Node(kind, (value, const(_length(op))), value.width, True, where, detail=detail, name=name)
    if made.op in ("or", "and", "xor"):
        return Node(made.op, (value, value), value.width, True, where, name=name)
    return unknown("a reduction that is not understood", value.width, where)


def _length(op: Op) -> int:
    """Elements along the axis of a reduction."""
    axis = re.search(r"axis = (\d+)", op.text)
    shape = re.search(r"tensor<((?:\d+x)+)", op.types)
    if axis is None or shape is None:
        return 2**20
    sizes = [int(size) for size in shape[1].strip("x").split("x")]
    return sizes[int(axis[1])] if int(axis[1]) < len(sizes) else 2**20


@handles("tt.assert")
def asserted(lift: Lift, op: Op) -> list[Value]:
    """Read by tests only: the frontend's own overflow checks end here."""
    lift.asserted.append((lift.node(op.operands[0], 1), lift.where(op.loc) or lift.program.span))
    return []


@handles("tt.print", "ub.poison", "gpu.barrier", "tt.debug_barrier", "scf.yield")
def nothing(lift: Lift, op: Op) -> list[Value]:
    bits = width(op.types) if op.results else 0
    return [const(0, bits) if bits else DATA for _ in op.results]


@handles("llvm.intr.assume")
def assume(lift: Lift, op: Op) -> list[Value]:
    """`tl.assume` holds from here on."""
    lift.facts += holds(lift.node(op.operands[0], 1))
    return []
