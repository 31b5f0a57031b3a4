"""What launches in the same file say about a constexpr gate: whether the wide branch is ever taken."""

from __future__ import annotations

import ast

from .modules import Module


def unguarded(module: Module, kernel: str, gate: str, wide: bool) -> bool:
    """Whether every launch of a kernel that the file shows chooses the narrow branch by a constant, or by the gate's default.

    False where a launch decides by an expression, passes arguments that cannot be told apart, or none is seen: then the guard is
    left to the host.
    """
    launches = [call for call in ast.walk(module.tree) if isinstance(call, ast.Call) and _launched(call) == kernel]
    function = module.kernels[kernel]
    return bool(launches) and all(_value(call, function, gate) == (not wide) for call in launches)


def _launched(call: ast.Call) -> str:
    target = call.func.value if isinstance(call.func, ast.Subscript) else None
    return target.id if isinstance(target, ast.Name) else ""


def _value(call: ast.Call, function: ast.FunctionDef, gate: str) -> bool | None:
    """What a launch passes for the gate, if it is a constant."""
    for keyword in call.keywords:
        if keyword.arg is None:
            return None
        if keyword.arg == gate:
            return _constant(keyword.value)
    if any(isinstance(arg, ast.Starred) for arg in call.args):
        return None
    parameters = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    place = parameters.index(gate) if gate in parameters else len(call.args)
    if place < len(call.args):
        return _constant(call.args[place])
    behind = len(parameters) - place
    return _constant(function.args.defaults[-behind]) if 0 < behind <= len(function.args.defaults) else None


def _constant(node: ast.expr) -> bool | None:
    return bool(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)) else None
