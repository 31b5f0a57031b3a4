"""The expression graph that both front ends build: integer operations with widths, variables with bounds, and sinks.

A node is one operation, evaluated in `width` bits. Width 0 is a Python integer, which does not wrap: constants, constexprs and
what is computed from them while a kernel is compiled. The meaning of a node is its exact value; the core asks where the machine's
value differs. Nodes are compared by identity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from .finding import Span

INT32_MAX = 2**31 - 1
INT32_MIN = -(2**31)
# The largest tile: triton.language.TRITON_MAX_TENSOR_NUMEL.
MAX_TILE = 2**20
MAX_GRID = (2**31 - 1, 65535, 65535)
# An unknown 32-bit count stays a few tiles below 2^31: the round-up in cdiv is not worth a word.
MAX_COUNT = 2**31 - 2**23

# `detail` of an extension to a type that a constexpr names starts with this.
BY_TYPE = "by type: "

RING = frozenset({"add", "sub", "mul", "shl", "neg"})
# Operations that look at the value of their operands, so that a wrapped one shows.
OBSERVERS = frozenset({"floordiv", "mod", "shr", "and", "or", "xor", "min", "max", "abs", "cmp", "reduce", "scan"})
_uids = count()


class Origin(str, Enum):
    PROGRAM_ID = "program id"
    NUM_PROGRAMS = "grid size"
    LOAD = "load"
    SCALAR = "scalar argument"
    STRIDE = "stride argument"
    ARANGE = "arange"
    CONSTEXPR = "constexpr"
    LOOP = "loop variable"
    UNKNOWN = "unknown"


@dataclass(eq=False, slots=True)
class Var:
    """A free variable.

    Attributes:
        name: what the author calls it; may be set later, when the value is assigned to a name.
        minimum, maximum: inclusive.
        bound_from: where the bounds come from: "physics", "type", "constexpr", "launcher", "assumption" or "captured".
        low, high: tighter bounds as nodes (inclusive), such as those of a loop.
        axis: of a program id or a grid size.
        pointer: for a load, the name of the tensor that is read.
        typed: False where the width of a load is only assumed.
        lanes: for a load, the `arange`s that its address is made of: how many values it gives.
        reason: why an UNKNOWN is unknown.
    """

    name: str
    origin: Origin
    width: int
    minimum: int
    maximum: int
    bound_from: str = "physics"
    span: Span | None = None
    low: Node | None = None
    high: Node | None = None
    axis: int = -1
    pointer: str = ""
    typed: bool = True
    lanes: tuple[Node, ...] = ()
    reason: str = ""

    @property
    def declared(self) -> bool:
        """Somebody said so: the bound is not a default."""
        return self.bound_from in ("assumption", "captured")


@dataclass(eq=False, slots=True)
class Node:
    """One value.

    `detail` holds what an operation needs besides its arguments: the comparison, "explicit" for a written cast. `name` is what
    the author called the value.
    """

    op: str
    args: tuple[Node, ...] = ()
    width: int = 32
    signed: bool = True
    span: Span | None = None
    var: Var | None = None
    value: int = 0
    detail: str = ""
    name: str = ""
    uid: int = field(default_factory=lambda: next(_uids))

    @property
    def narrow(self) -> bool:
        return 0 < self.width <= 32

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest and largest value that `width` bits hold."""
        if self.signed:
            return -(2 ** (self.width - 1)), 2 ** (self.width - 1) - 1
        return 0, 2**self.width - 1


def const(value: int, width: int = 0, span: Span | None = None) -> Node:
    return Node("const", (), width, True, span, None, value)


def variable(var: Var, signed: bool = True, span: Span | None = None) -> Node:
    width = 0 if var.origin is Origin.CONSTEXPR else var.width
    return Node("var", (), width, signed, span or var.span, var)


def unknown(reason: str, width: int = 64, span: Span | None = None) -> Node:
    """A value that the front end does not understand. It is never called safe."""
    half = 2 ** (width - 1)
    return variable(Var("?", Origin.UNKNOWN, width, -half, half - 1, "type", span, reason=reason))


def extend(node: Node, width: int, signed: bool = True, span: Span | None = None, explicit: bool = False) -> Node:
    """`node` in `width` bits: an extension, a narrowing, or itself."""
    if node.width == width and node.signed == signed:
        return node
    if node.width == 0:
        return Node("ext", (node,), width, signed, span or node.span, detail="constant")
    op = "trunc" if node.width > width else "ext"
    return Node(op, (node,), width, signed, span or node.span, detail="explicit" if explicit else "")


def promote(left: Node, right: Node) -> tuple[int, bool]:
    """Width and signedness of an operation on both, by Triton's rules. Python ints take the type of the tensor if they fit."""
    if left.width == 0 and right.width == 0:
        return 0, True
    for python, tensor in ((left, right), (right, left)):
        if python.width == 0:
            if tensor.width == 1:
                return 32, True
            low, high = tensor.limits
            fits = python.op != "const" or low <= python.value <= high
            if fits:
                return tensor.width, tensor.signed
            return (32, True) if tensor.width < 32 and INT32_MIN <= python.value <= INT32_MAX else (64, True)
    if left.width == right.width:
        return left.width, left.signed and right.signed
    wide = left if left.width > right.width else right
    return wide.width, wide.signed


def binary(op: str, left: Node, right: Node, span: Span | None = None, detail: str = "") -> Node:
    """`left op right`, promoted, folded where both are constants."""
    if left.op == right.op == "const" and (value := _fold(op, left.value, right.value)) is not None and left.width == right.width:
        return const(value, left.width, span)
    if op == "floordiv" and right.op == "const" and right.value == 1:
        return left
    if op == "sub" and (divisor := _undone(left, right)) is not None:
        return binary("mod", left, divisor, span)
    width, signed = promote(left, right)
    if op in ("shl", "shr") and left.width:
        width, signed = left.width, left.signed
    if width:
        left, right = extend(left, width, signed), extend(right, width, signed)
    if op == "cmp":
        width, signed = 1, False
    return Node(op, (left, right), width, signed, span, detail=detail)


def _undone(left: Node, right: Node) -> Node | None:
    """The `d` of `x - (x // d) * d`, which is `x % d`."""
    if right.op != "mul":
        return None
    for quotient, divisor in (right.args, right.args[::-1]):
        quotient = _bare(quotient)
        if quotient.op == "floordiv" and _bare(quotient.args[0]) is _bare(left) and _same(quotient.args[1], divisor):
            return divisor
    return None


def _bare(node: Node) -> Node:
    """Without extensions: they keep the value."""
    while node.op == "ext":
        node = node.args[0]
    return node


def _same(left: Node, right: Node) -> bool:
    left, right = _bare(left), _bare(right)
    return left is right or (left.op == right.op == "const" and left.value == right.value)


def unary(op: str, operand: Node, span: Span | None = None) -> Node:
    if op == "neg" and operand.op == "const":
        return const(-operand.value, operand.width, span)
    return Node(op, (operand,), operand.width, operand.signed, span)


def select(condition: Node | None, left: Node, right: Node, span: Span | None = None) -> Node:
    """One of two values: `tl.where`, or a variable after a branch (then without a condition)."""
    if left is right:
        return left
    width, signed = promote(left, right)
    if width:
        left, right = extend(left, width, signed), extend(right, width, signed)
    args = (left, right) if condition is None else (left, right, condition)
    return Node("select", args, width, signed, span)


def phi(name: str, initial: Node, trips: Node | None, span: Span | None = None) -> Node:
    """A value that a loop carries. `trips` is how often the loop runs, None if that is not known. Close it with `close`."""
    node = Node("phi", (initial,), initial.width or 32, initial.signed, span, detail=name)
    if trips is not None:
        node.args = (initial, trips)
        node.value = 1
    return node


def close(node: Node, update: Node) -> None:
    """Says what a pass through the loop makes of the value `node`."""
    node.args = (*node.args, update)


def walk(root: Node) -> Iterator[Node]:
    """Every node under `root`, each once, without recursion. Loop-carried values and bounds of variables are not entered."""
    seen, stack = set(), [root]
    while stack:
        node = stack.pop()
        if node.uid in seen:
            continue
        seen.add(node.uid)
        yield node
        stack.extend(node.args)


def _fold(op: str, left: int, right: int) -> int | None:
    if op in ("add", "sub", "mul"):
        return left + right if op == "add" else left - right if op == "sub" else left * right
    if op in ("floordiv", "mod") and right:
        # Triton truncates towards zero at run time; a constexpr floors. They agree on what indices are: not negative.
        return left // right if op == "floordiv" else left % right
    if op in ("shl", "shr") and 0 <= right < 64:
        return left << right if op == "shl" else left >> right
    if op in ("min", "max"):
        return min(left, right) if op == "min" else max(left, right)
    if op in ("and", "or", "xor"):
        return left & right if op == "and" else left | right if op == "or" else left ^ right
    return None


@dataclass(frozen=True, slots=True)
class Sink:
    """Where an integer starts to matter.

    Attributes:
        kind: "address", "mask", "bound" (of a loop), "base" (of a block pointer), "coordinate" (of a descriptor) or "atomic".
        terms: what is added to the pointer, one after the other, each extended to 64 bits on its own; or the mask or bound.
        pointer: name of the tensor.
        item_bytes: bytes of what the pointer counts in; 0 if unknown.
        offset_bytes: True where the terms count bytes and 2^31 is a limit in bytes.
        guard: the mask; where it is false, nothing is accessed.
    """

    kind: str
    terms: tuple[Node, ...]
    span: Span
    pointer: str = ""
    item_bytes: int = 0
    offset_bytes: bool = False
    unknown: str = ""
    guard: Node | None = None


@dataclass(slots=True)
class Program:
    """One kernel (or one specialisation of it) as its front end understood it.

    `gates`: constexprs that were fixed to follow one branch; `wide`: the value at which each is meant to be wide; `gated`: the
    spans of the branches that are then taken. `calls`: (body of a helper, place of a call that was followed). `checked`: tensors
    that have at most 2^31 elements, and what the host checks to that end; `pieces`: scalars that count tiles, as the host has it;
    `inner`: tensors that another one goes along, with an axis more; `stated`: tensors that have at most 2^31 elements, as the
    user says; `products`: names of sizes, and the largest product of them; `extents`: the last program id of an axis.
    """

    name: str
    span: Span
    sinks: list[Sink] = field(default_factory=list)
    gates: dict[str, bool] = field(default_factory=dict)
    wide: dict[str, bool] = field(default_factory=dict)
    gated: list[tuple[str, Span]] = field(default_factory=list)
    calls: list[tuple[Span, Span]] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)
    checked: dict[str, str] = field(default_factory=dict)
    pieces: frozenset[str] = frozenset()
    inner: dict[str, str] = field(default_factory=dict)
    stated: dict[str, str] = field(default_factory=dict)
    products: list[tuple[tuple[str, ...], int]] = field(default_factory=list)
    extents: dict[int, Node] = field(default_factory=dict)
    skipped: str = ""
