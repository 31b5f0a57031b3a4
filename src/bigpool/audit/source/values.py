"""What an expression of a kernel can be, for the auditor: integers are nodes of the graph, the rest is one of these."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from ..expr import MAX_COUNT, Node, Origin, Var, binary, select, unknown, variable
from ..finding import Span

if TYPE_CHECKING:
    from .modules import Module


@dataclass(frozen=True, slots=True)
class DType:
    """An element type. `kind` is "int", "uint", "float", "pointer", "block" or "" where it is not known."""

    kind: str = ""
    bits: int = 0
    element: DType | None = None


@dataclass(frozen=True, slots=True)
class Plain:
    """A Python value that is no integer: a string, None, a float."""

    value: object


@dataclass(frozen=True, slots=True)
class Float:
    """A floating-point value, whatever it is."""


@dataclass(frozen=True, slots=True)
class Opaque:
    """What the auditor does not understand, and why. `width`: that of the integer it would be, 32 of a call that is not read."""

    reason: str
    width: int = 64


@dataclass(frozen=True, slots=True)
class Term:
    node: Node
    span: Span


@dataclass(frozen=True, slots=True)
class Pointer:
    """A pointer, or a scalar argument of which it is not yet known (`decided` is False).

    `terms` were added to it one after the other.
    """

    name: str
    terms: tuple[Term, ...] = ()
    dtype: DType = DType()
    decided: bool = True
    var: Node | None = None
    in_bytes: bool = False

    def add(self, term: Node, span: Span) -> Pointer:
        return replace(self, terms=(*self.terms, Term(term, span)))


@dataclass(frozen=True, slots=True)
class Block:
    """A block pointer or a tensor descriptor: its offsets are multiplied in 64 bits."""

    pointer: Pointer | None


@dataclass(frozen=True, slots=True)
class Function:
    module: Module
    node: ast.FunctionDef
    scope: tuple[ast.FunctionDef, ...] = ()


@dataclass(frozen=True, slots=True)
class Dotted:
    """Something imported, by its full name."""

    name: str


@dataclass(frozen=True, slots=True)
class Bound:
    """A method of a value."""

    value: Value
    name: str


@dataclass(frozen=True, slots=True)
class Tuple:
    items: tuple[Value, ...]


Value: TypeAlias = Node | DType | Plain | Float | Opaque | Pointer | Block | Function | Dotted | Bound | Tuple


def argument(name: str, span: Span, width: int = 32, typed: bool = True) -> Node:
    """A scalar argument: by default the 32-bit variant, not negative."""
    origin = Origin.STRIDE if "stride" in name.lower() else Origin.SCALAR
    high = MAX_COUNT if width == 32 else 2 ** (width - 1) - 1
    return variable(Var(name, origin, width, 0, high, "type", span, typed=typed))


def as_node(value: Value, span: Span | None = None) -> Node | None:
    """The integer that a value is; None if it is none."""
    if isinstance(value, Node):
        return value
    if isinstance(value, Pointer) and not value.decided and value.var is not None:
        total = value.var
        for term in value.terms:
            total = binary("add", total, term.node, term.span)
        return total
    if isinstance(value, Opaque):
        return unknown(value.reason, value.width, span)
    return None


def merge(left: Value, right: Value) -> Value:
    """A variable after a branch."""
    if left is right or left == right:
        return left
    if isinstance(left, Pointer) and isinstance(right, Pointer):
        return merge_pointers(left, right)
    if isinstance(left, Tuple) and isinstance(right, Tuple) and len(left.items) == len(right.items):
        return Tuple(tuple(merge(a, b) for a, b in zip(left.items, right.items, strict=True)))
    if isinstance(left, Tuple) and isinstance(right, Tuple):
        return left if len(left.items) > len(right.items) else right
    for one, other in ((left, right), (right, left)):
        if isinstance(one, (Plain, Opaque)):
            return other
        if isinstance(one, Float):
            return one
        if isinstance(one, Pointer) and one.decided:
            return one
    first, second = as_node(left), as_node(right)
    if first is not None and second is not None:
        return select(None, first, second)
    return left


def merge_pointers(left: Pointer, right: Pointer) -> Pointer:
    """Every term of both: each is extended on its own."""
    known = {term.node.uid for term in left.terms}
    extra = tuple(term for term in right.terms if term.node.uid not in known)
    dtype = left.dtype if left.dtype == right.dtype else DType()
    return replace(left, terms=(*left.terms, *extra), dtype=dtype, decided=left.decided or right.decided)
