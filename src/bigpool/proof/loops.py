"""Finds loops whose variable the interpreter computes otherwise than a GPU does."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def list_loops(source: str) -> list[int]:
    """Lines of the loops `for i in range(...)` or `tl.range(...)` in jitted functions that use `i`.

    The interpreter runs them with Python ints, so that `i * STRIDE` of a constexpr does not wrap; on a GPU `i` is int32.
    `tl.static_range` is left out: its variable is a constant, which does not wrap on a GPU either.
    """
    tree = ast.parse(source)
    loops = (node for function in _jitted(tree) for node in ast.walk(function) if isinstance(node, ast.For))
    return sorted({loop.lineno for loop in loops if _counts(loop)})


def _jitted(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(mark) for mark in node.decorator_list):
            yield node


def _counts(node: ast.For) -> bool:
    if not isinstance(node.target, ast.Name) or not isinstance(node.iter, ast.Call):
        return False
    if ast.unparse(node.iter.func).rpartition(".")[2] != "range":
        return False
    names = (name for part in node.body for name in ast.walk(part) if isinstance(name, ast.Name))
    return any(name.id == node.target.id and isinstance(name.ctx, ast.Load) for name in names)
