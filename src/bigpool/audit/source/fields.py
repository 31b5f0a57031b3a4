"""Fields of an argument that holds several values."""

from __future__ import annotations

import ast

from ..expr import Node
from .frame import Frame, constexpr
from .values import Bound, Pointer, Value, argument

METHODS = frozenset(("to", "cast", "load", "store", "sum", "max", "min", "reshape", "view", "trans", "permute", "split"))


def field_of(frame: Frame, owner: Pointer | Node, node: ast.Attribute) -> Value:
    """A field of `self` of an aggregate or the like: a constexpr if it is written in capitals, else a pointer or a scalar.

    What a constexpr holds is a constexpr: `CONFIG.tile`.
    """
    if node.attr in METHODS or node.attr.startswith("is_"):
        return Bound(owner, node.attr)
    whole = owner.var.name if isinstance(owner, Node) and owner.var is not None else ""
    name = f"{whole or getattr(owner, 'name', '')}.{node.attr}"
    found = frame.state.fields.get(name)
    if found is None:
        span = frame.span(node)
        found = (
            constexpr(name if whole else node.attr, span)
            if whole or node.attr.isupper()
            else Pointer(node.attr, (), decided=False, var=argument(node.attr, span))
        )
        frame.state.fields[name] = found
    return found
