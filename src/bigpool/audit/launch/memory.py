"""What operations on pointers are: where integers start to matter."""

from __future__ import annotations

from ..expr import Node, Origin, Var, extend, variable
from .lift import Lift
from .ops import data, handles, result_type
from .ttir import Op, element, groups, item_bytes, width
from .values import DATA, Pointer, Value


@handles("tt.addptr")
def add_pointer(lift: Lift, op: Op) -> list[Value]:
    base = lift.get(op.operands[0])
    if not isinstance(base, Pointer):
        base = Pointer("?", unknown="the address comes from an integer", item_bytes=item_bytes(op.types.partition(",")[0]))
    offset = lift.node(op.operands[1])
    many = "tensor<" in op.types
    return [Pointer(base.name, (*base.terms, offset), (*base.tensor, many), base.item_bytes, base.unknown)]


@handles("tt.bitcast")
def bitcast(lift: Lift, op: Op) -> list[Value]:
    value = lift.get(op.operands[0])
    bits = width(result_type(op))
    if isinstance(value, Pointer):
        return [Pointer(value.name, value.terms, value.tensor, item_bytes(result_type(op)) or value.item_bytes, value.unknown)]
    if bits and not isinstance(value, Node):
        return [data(lift, op, bits)]
    return [value]


@handles("tt.int_to_ptr")
def from_integer(lift: Lift, op: Op) -> list[Value]:
    """A table of pointers: a load of 64 bits is a base like any argument."""
    node = lift.node(op.operands[0], 64)
    name = node.var.name if node.var is not None else node.name or "a computed address"
    if node.var is not None and node.var.origin is Origin.LOAD and node.width == 64:
        return [Pointer(name, (), (), item_bytes(result_type(op)))]
    return [Pointer(name, (node,), (False,), item_bytes(result_type(op)))]


@handles("tt.ptr_to_int")
def to_integer(lift: Lift, op: Op) -> list[Value]:
    value = lift.get(op.operands[0])
    terms = value.terms if isinstance(value, Pointer) else ()
    name = value.name if isinstance(value, Pointer) else "?"
    node = variable(Var(name, Origin.SCALAR, 64, 0, 2**62, "type", lift.where(op.loc)))
    for term in terms:
        wide = extend(term, 64)
        node = Node("add", (node, wide), 64, True, term.span)
    return [node]


def _loaded(lift: Lift, op: Op, pointer: Pointer | None, type_: str) -> Value:
    kind = element(type_)
    if kind.startswith("ptr<"):
        name = lift.name_of(op, f"{pointer.name if pointer else '?'}[...]")
        return Pointer(name, (), (), item_bytes(type_))
    bits = width(type_)
    if not bits:
        return DATA
    source = pointer.name if pointer is not None else "?"
    name = lift.name_of(op, f"{source}[...]")
    most = 1 if bits == 1 else 2**bits - 1 if bits < 32 else 2 ** (bits - 1) - 1
    low, high, known = lift.bounded(name, -(2 ** (bits - 1)) if bits == 8 else 0, most)
    var = Var(name, Origin.LOAD, bits, low, high, known, lift.where(op.loc), pointer=source)
    return variable(var)


@handles("tt.load")
def load(lift: Lift, op: Op) -> list[Value]:
    pointer = lift.get(op.operands[0])
    names = op.operands
    mask = lift.get(names[1]) if len(names) > 1 else None
    if isinstance(pointer, Pointer) and pointer.block:
        return [DATA for _ in op.results]
    if isinstance(pointer, Pointer):
        lift.sink("address", pointer.terms, op, pointer, mask if isinstance(mask, Node) else None)
    if isinstance(mask, Node):
        lift.sink("mask", (mask,), op)
    pointee = element(op.types).removeprefix("ptr<").removesuffix(">")
    value = _loaded(
        lift,
        op,
        pointer if isinstance(pointer, Pointer) else None,
        pointee if not pointee.startswith("ptr<") else f"!tt.{pointee}",
    )
    return [value for _ in op.results]


@handles("tt.store")
def store(lift: Lift, op: Op) -> list[Value]:
    pointer = lift.get(op.operands[0])
    mask = lift.get(op.operands[2]) if len(op.operands) > 2 else None
    if isinstance(pointer, Pointer) and not pointer.block:
        lift.sink("address", pointer.terms, op, pointer, mask if isinstance(mask, Node) else None)
    if isinstance(mask, Node):
        lift.sink("mask", (mask,), op)
    return []


@handles("tt.atomic_rmw", "tt.atomic_cas")
def atomic(lift: Lift, op: Op) -> list[Value]:
    pointer = lift.get(op.operands[0])
    mask = lift.get(op.operands[2]) if op.name == "tt.atomic_rmw" and len(op.operands) > 2 else None
    if isinstance(pointer, Pointer):
        lift.sink("atomic", pointer.terms, op, pointer, mask if isinstance(mask, Node) else None)
    return [_loaded(lift, op, pointer if isinstance(pointer, Pointer) else None, result_type(op))]


@handles("tt.make_tensor_ptr", "tt.make_tensor_descriptor", "tt.reinterpret_tensor_descriptor")
def block_pointer(lift: Lift, op: Op) -> list[Value]:
    base = lift.get(op.operands[0])
    if isinstance(base, Pointer):
        if base.terms:
            lift.sink("base", base.terms, op, base)
        if op.name == "tt.make_tensor_ptr":
            coordinates(lift, op, groups(op.text)[2] if len(groups(op.text)) > 2 else [])
        return [Pointer(base.name, item_bytes=base.item_bytes, unknown=base.unknown, block=True)]
    return [Pointer("?", block=True)]


def coordinates(lift: Lift, op: Op, names: list[str]) -> None:
    for name in names:
        node = lift.get(name)
        if isinstance(node, Node) and node.op != "const":
            lift.sink("coordinate", (node,), op)


@handles("tt.advance")
def advance(lift: Lift, op: Op) -> list[Value]:
    coordinates(lift, op, groups(op.text)[0] if groups(op.text) else [])
    return [lift.get(op.operands[0])]


@handles(
    "tt.descriptor_load",
    "tt.descriptor_store",
    "tt.descriptor_reduce",
    "tt.descriptor_gather",
    "tt.descriptor_scatter",
    "tt.experimental_descriptor_load",
    "tt.experimental_descriptor_store",
)
def descriptor(lift: Lift, op: Op) -> list[Value]:
    coordinates(lift, op, groups(op.text)[0] if groups(op.text) else [])
    bits = width(result_type(op))
    return [data(lift, op, bits) if bits else DATA for _ in op.results]
