"""What a condition says about the values that it compares."""

from __future__ import annotations

from ..expr import Node, binary, const
from ..poly import strip


def bounded(condition: Node, value: Node, holds: bool) -> Node:
    """`value` where a condition holds (or does not): `i < n` makes it `min(i, n - 1)`."""
    if condition.op == "and" and holds:
        for part in condition.args:
            value = bounded(part, value, True)
        return value
    if condition.op == "or" and not holds:
        for part in condition.args:
            value = bounded(part, value, False)
        return value
    if condition.op != "cmp":
        return value
    left, right = condition.args
    sign = condition.detail if holds else {"Lt": "GtE", "LtE": "Gt", "Gt": "LtE", "GtE": "Lt"}.get(condition.detail, "")
    if strip(right) is strip(value):
        left, right, sign = right, left, {"Lt": "Gt", "LtE": "GtE", "Gt": "Lt", "GtE": "LtE"}.get(sign, "")
    if strip(left) is not strip(value) or sign not in ("Lt", "LtE") or value.op == "const" or strip(right) is strip(value):
        return value
    limit = binary("sub", strip(right), const(1)) if sign == "Lt" else strip(right)
    # As wide as the value: the bound is a fact about it, not an operation of the kernel.
    return Node("min", (value, limit), value.width, value.signed, value.span, name=value.name)
