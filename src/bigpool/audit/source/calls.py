"""Calls in a kernel: methods, helpers of the audited tree, functions of triton.language."""

from __future__ import annotations

import ast

from ..expr import Node, Sink, binary
from . import builtins
from .evaluate import TRITON, cast, evaluate, operate, truth
from .frame import MAX_CALLS, Frame
from .modules import dotted, is_jit
from .values import Block, Bound, Dotted, DType, Float, Function, Opaque, Plain, Pointer, Tuple, Value, as_node

MODULE_WORDS = ("tl", "triton", "language", "libdevice", "gl", "ttgl", "gluon", "math")


class Arguments:
    """The arguments of a call, by position or by name."""

    def __init__(self, frame: Frame, node: ast.Call, depth: int) -> None:
        self.node = node
        self.by_place: list[Value] = []
        for arg in node.args:
            if isinstance(arg, ast.Starred):
                value = evaluate(frame, arg.value, depth + 1)
                self.by_place += value.items if isinstance(value, Tuple) else [value]
            else:
                self.by_place.append(evaluate(frame, arg, depth + 1))
        self.by_name = {key.arg: evaluate(frame, key.value, depth + 1) for key in node.keywords if key.arg}

    def get(self, place: int, name: str) -> Value | None:
        if name in self.by_name:
            return self.by_name[name]
        return self.by_place[place] if place < len(self.by_place) else None

    def of(self, values: tuple[Value, ...]) -> Arguments:
        """Other arguments at the same place."""
        other = object.__new__(Arguments)
        other.node, other.by_place, other.by_name = self.node, [*values], {}
        return other

    def shifted(self, value: Value) -> Arguments:
        """The same with `value` first: a method as a function."""
        other = object.__new__(Arguments)
        other.node, other.by_place, other.by_name = self.node, [value, *self.by_place], self.by_name
        return other


def call(frame: Frame, node: ast.Call, depth: int) -> Value:
    function = evaluate(frame, node.func, depth + 1)
    if isinstance(node.func, ast.Subscript) and isinstance(function, Function):
        return Opaque("a launch inside a kernel")
    arguments = Arguments(frame, node, depth)
    if isinstance(function, Function):
        return _inline(frame, function, arguments)
    if isinstance(function, Bound):
        return _method(frame, function, arguments)
    if isinstance(function, DType):
        value = arguments.get(0, "value")
        return cast(frame, value, function, node) if value is not None else function
    if isinstance(function, Dotted):
        return _library(frame, function.name, arguments)
    if isinstance(function, Pointer) and isinstance(node.func, ast.Attribute):
        owner, text = evaluate(frame, node.func.value, depth + 1), frame.module.kernels.get(node.func.attr)
        if text is not None and text.args.args and text.args.args[0].arg == "self":
            return _inline(frame, Function(frame.module, text), arguments.shifted(owner))
    return _unread(frame, dotted(node.func) or "a computed function", arguments)


def _library(frame: Frame, name: str, arguments: Arguments) -> Value:
    head, _, last = name.rpartition(".")
    root = name.split(".")[0]
    if last == "to" and root in TRITON:
        last = "cast"
    if root == "builtins":
        return _python(frame, last, arguments)
    if last == "warp_specialize":
        return _workers(frame, arguments)
    if root in TRITON or head.rpartition(".")[2] in MODULE_WORDS:
        return builtins.call(frame, last, arguments)
    handled = builtins.call(frame, last, arguments)
    return handled if not isinstance(handled, Opaque) else _unread(frame, name.rpartition("|")[2], arguments)


def _workers(frame: Frame, arguments: Arguments) -> Value:
    """Functions that warps of one program run, each with its arguments: `[(function, arguments), ...]`."""
    jobs = arguments.by_place[0] if arguments.by_place else None
    for job in jobs.items if isinstance(jobs, Tuple) else ():
        function, values = job.items if isinstance(job, Tuple) and len(job.items) == 2 else (None, None)
        if isinstance(function, Function) and isinstance(values, Tuple):
            _inline(frame, function, arguments.of(values.items))
    return Plain(None)


def _unread(frame: Frame, name: str, arguments: Arguments) -> Value:
    """A function whose text is not at hand: it gives any int32."""
    builtins.used(frame, arguments)
    return Opaque(f"a call of {name}", 32)


def _python(frame: Frame, name: str, arguments: Arguments) -> Value:
    values = arguments.by_place
    if name in ("min", "max") and len(values) == 1 and isinstance(values[0], Tuple):
        values = list(values[0].items)
    if name in ("min", "max") and len(values) > 1:
        result = values[0]
        for value in values[1:]:
            result = operate(frame, name, result, value, arguments.node)
        return result
    if name in ("abs", "range"):
        return builtins.call(frame, name, arguments)
    if name == "len" and values and isinstance(values[0], Tuple):
        return Node("const", (), 0, True, frame.span(arguments.node), None, len(values[0].items))
    if name in ("int", "bool") and values:
        return values[0]
    if name == "float":
        return Float()
    if name in ("tuple", "list"):
        return values[0] if values else Tuple(())
    if name in ("print", "isinstance", "hasattr"):
        return Plain(None) if name == "print" else builtins.flag(frame, arguments)
    return Opaque(f"a call of {name}")


def _method(frame: Frame, method: Bound, arguments: Arguments) -> Value:
    value, name = method.value, method.name
    if name in ("to", "cast"):
        dtype = arguments.get(0, "dtype")
        return cast(frame, value, dtype, arguments.node) if dtype is not None else value
    if isinstance(value, Block):
        return builtins.block_method(frame, value, name, arguments)
    if name in ("is_ptr", "is_floating", "is_block", "is_int", "is_fp8", "is_constexpr", "is_int64", "is_int32"):
        return builtins.flag(frame, arguments)
    if isinstance(value, Opaque) and name in ("load", "store"):
        # Shared memory, most likely; but it is said that it was not seen what is accessed.
        frame.state.sink(Sink("address", (), frame.span(arguments.node), unknown=f"a {name} of what comes from {value.reason}"))
        return builtins.shared(frame, name, arguments)
    if isinstance(value, (Plain, Opaque, DType)):
        return Opaque(f"a call of the method {name}")
    if isinstance(value, Tuple) or (isinstance(value, Node) and name in ("load", "store", "program_id", "arange")):
        return Opaque(f"a call of the method {name}")
    return builtins.call(frame, name, arguments.shifted(value))


def _inline(frame: Frame, function: Function, arguments: Arguments) -> Value:
    """Follows a call to a function of the audited tree."""
    from .statements import run_function

    name = function.node.name
    if frame.depth >= MAX_CALLS:
        return Opaque(f"calls nested deeper than {MAX_CALLS} at {name}")
    jitted = any(is_jit(function.module, mark) for mark in function.node.decorator_list) or name in function.module.kernels
    if not jitted and not _constexpr_function(function):
        handled = builtins.call(frame, name, arguments)
        if not isinstance(handled, Opaque):
            return handled
    names = bind(frame, function, arguments)
    if names is None:
        return Opaque(f"a call of {name} with arguments that do not fit")
    if not frame.state.muted:
        frame.state.program.calls.append((function.module.span(function.node), frame.span(arguments.node)))
        frame.state.inlined.add((function.module.path, name))
    return run_function(frame, function, names)


def _constexpr_function(function: Function) -> bool:
    return any("constexpr_function" in ast.unparse(mark) for mark in function.node.decorator_list)


def bind(frame: Frame, function: Function, arguments: Arguments) -> dict[str, Value] | None:
    """Parameter names to values."""
    spec = function.node.args
    parameters = [*spec.posonlyargs, *spec.args]
    names: dict[str, Value] = {}
    defaults = dict(zip([arg.arg for arg in parameters][len(parameters) - len(spec.defaults) :], spec.defaults, strict=True))
    defaults.update(
        {arg.arg: default for arg, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if default is not None}
    )
    for place, parameter in enumerate(parameters):
        if place < len(arguments.by_place):
            names[parameter.arg] = arguments.by_place[place]
    if spec.vararg is not None:
        names[spec.vararg.arg] = Tuple(tuple(arguments.by_place[len(parameters) :]))
    elif len(arguments.by_place) > len(parameters):
        return None
    names.update(arguments.by_name)
    outer = Frame(frame.state, function.module, function.node, {}, frame.depth)
    for parameter in (*parameters, *spec.kwonlyargs):
        if parameter.arg not in names:
            default = defaults.get(parameter.arg)
            names[parameter.arg] = evaluate(outer, default) if default is not None else Opaque(f"the argument {parameter.arg}")
    return names


def decided(value: Value) -> bool:
    return not isinstance(value, Pointer) or value.decided


__all__ = ["Arguments", "as_node", "binary", "bind", "call", "truth"]
