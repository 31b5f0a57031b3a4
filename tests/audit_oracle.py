"""Runs a kernel of the development set with the interpreter on memory that is not there, and writes down what it would access.

Each kernel runs twice: as it is, and with every index, argument and loaded integer in 64 bits. Where the two access the same
elements, nothing wrapped. No auditor takes part.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from audit_cases._format import Kernel

BASE = 56
ACCESSES = 400
INTEGER = {"*i1": 1, "*i8": 8, "*u8": 8, "*i32": 32, "*i64": 64}
FLOATS = {"*bf16": tl.bfloat16, "*fp16": tl.float16, "*fp32": tl.float32}
INTEGERS = {"*i1": tl.int1, "*i8": tl.int8, "*u8": tl.uint8, "*i32": tl.int32, "*i64": tl.int64}
NUMPY = {tl.int1: np.bool_, tl.int8: np.int8, tl.uint8: np.uint8, tl.int32: np.int32, tl.int64: np.int64}


class Enough(Exception):
    """The trace is long enough."""


class Unmodelled(Exception):
    """The kernel does something that this oracle does not model."""


def program_names(kernel: Kernel) -> dict[str, int]:
    """Which variable is the program id of which axis."""
    tree = ast.parse(kernel.file.read_text(encoding="utf-8"))
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == kernel.name)
    names = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            text = ast.unparse(node.value)
            if text.startswith("tl.program_id(") and not any(sign in text for sign in "+*"):
                names[node.targets[0].id] = int(text[len("tl.program_id(")])
    return names


def trace(kernel: Kernel, symbol: str, value: int, wide: bool, last: bool) -> list[tuple[Any, ...]]:
    """(what, argument, element offsets of the active lanes) of each access, with `symbol` at `value`.

    `last` puts the other program ids at their most, otherwise they are 0.
    """
    args = dict(kernel.meta["args"])
    programs = program_names(kernel)
    grid = [*kernel.meta["grid"], 1, 1][:3]
    index = [extent - 1 if last else 0 for extent in grid]
    loads = None
    if symbol in programs or symbol == "pid":
        index[programs.get(symbol, 0)] = value
    elif symbol in args:
        args[symbol] = value
    else:
        loads = value
    pointers = [name for name in kernel.params if isinstance(args[name], str) and args[name].startswith("*")]
    recorder = _Recorder(kernel, pointers, loads, wide)
    bound = {name: _convert(kernel, name, args[name], pointers, wide) for name in kernel.params}
    function = getattr(importlib.import_module(kernel.module), kernel.name)
    with recorder.patched(index):
        scope = interpreter._patch_lang(function.fn)
        try:
            interpreter_builder.set_grid_dim(*(max(extent, at + 1) for extent, at in zip(grid, index, strict=True)))
            interpreter_builder.set_grid_idx(*index)
            function.rewrite()(**bound)
        except Enough:
            pass
        finally:
            if scope is not None:
                scope.restore()
    return recorder.accesses


def _convert(kernel: Kernel, name: str, value: Any, pointers: list[str], wide: bool) -> Any:
    if name in kernel.constexprs:
        is_type = isinstance(value, str) and value.startswith("tl.")
        return getattr(tl, value.removeprefix("tl.")) if is_type else value
    if name in pointers:
        element = FLOATS.get(value) or INTEGERS[value]
        if wide and value == "*i32":
            element = tl.int64
        kind = tl.pointer_type(element)
        return tl.tensor(TensorHandle(np.array([(pointers.index(name) + 1) << BASE], dtype=np.uint64), kind), kind)
    if isinstance(value, str):
        if value not in ("i32", "i64"):
            raise Unmodelled(value)
        value = 1000
    narrow = not wide and "64" not in kernel.annotations.get(name, "") and -(2**31) <= value < 2**31
    kind, data = (tl.int32, np.int32) if narrow else (tl.int64, np.int64)
    return tl.tensor(TensorHandle(np.array([value], dtype=data), kind), kind)


class _Recorder:
    def __init__(self, kernel: Kernel, pointers: list[str], loads: int | None, wide: bool) -> None:
        self.kernel = kernel
        self.pointers = pointers
        self.loads = loads
        self.wide = wide
        self.accesses: list[tuple[Any, ...]] = []

    def _note(self, what: str, pointer: TensorHandle, mask: Any) -> str:
        """Records an access and returns the type of the argument that it goes through."""
        data = np.broadcast_to(pointer.data, np.broadcast_shapes(pointer.data.shape, np.shape(mask))).astype(np.int64)
        active = data[np.broadcast_to(np.asarray(mask, dtype=bool), data.shape)] if mask is not None else data.ravel()
        which = int(np.rint(pointer.data.astype(np.float64).ravel()[0] / 2**BASE)) - 1
        name = self.pointers[which]
        kind = str(self.kernel.meta["args"][name])
        element = pointer.get_element_ty()
        size = max(1, element.primitive_bitwidth // 8)
        offsets = (active - ((which + 1) << BASE)) // size
        self.accesses.append((what, name, tuple(offsets.ravel().tolist())))
        if len(self.accesses) > ACCESSES:
            raise Enough
        return kind

    def load(self, ptrs: TensorHandle, mask: Any, other: Any, *rest: Any) -> TensorHandle:
        lanes = None if mask is None else mask.data
        kind = self._note("load", ptrs, lanes)
        element = ptrs.get_element_ty()
        shape = ptrs.data.shape
        if kind not in INTEGER or element in FLOATS.values():
            return TensorHandle(np.zeros(shape, dtype=interpreter._get_np_dtype(element)), element)
        bits = INTEGER[kind]
        value = 1 if bits < 32 else self.loads if self.loads is not None else self._most()
        return TensorHandle(np.full(shape, value).astype(NUMPY[element]), element)

    def _most(self) -> int:
        highest = [int(high) for _, high in self.kernel.meta.get("ranges", {}).values()]
        return max(highest, default=1000)

    def store(self, ptrs: TensorHandle, value: Any, mask: Any, *rest: Any) -> None:
        self._note("store", ptrs, None if mask is None else mask.data)

    def atomic(self, op: Any, ptr: TensorHandle, val: TensorHandle, mask: Any, *rest: Any) -> TensorHandle:
        self._note("atomic", ptr, None if mask is None else mask.data)
        return TensorHandle(np.zeros_like(val.data), val.dtype)

    @contextmanager
    def patched(self, index: list[int]) -> Iterator[None]:
        kind, data = (tl.int64, np.int64) if self.wide else (tl.int32, np.int32)

        def program_id(semantic: Any, axis: Any) -> Any:
            return tl.tensor(TensorHandle(np.array([index[int(axis)]], dtype=data), kind), kind)

        def no_descriptor(*args: Any, **kwargs: Any) -> Any:
            raise Unmodelled("a descriptor")

        builder = type(interpreter_builder)
        with (
            mock.patch.object(builder, "create_masked_load", lambda _, *args: self.load(*args)),
            mock.patch.object(builder, "create_load", lambda _, ptr, *rest: self.load(ptr, None, None)),
            mock.patch.object(builder, "create_masked_store", lambda _, *args: self.store(*args)),
            mock.patch.object(builder, "create_store", lambda _, ptr, value, *rest: self.store(ptr, value, None)),
            mock.patch.object(builder, "create_atomic_rmw", lambda _, *args: self.atomic(*args)),
            mock.patch.object(builder, "create_make_tensor_descriptor", no_descriptor),
            mock.patch.object(TritonSemantic, "program_id", program_id),
            np.errstate(over="ignore"),
        ):
            yield
