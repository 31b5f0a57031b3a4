"""Patches of Triton: an interpreter in which integers do not wrap, and programs that count from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from bigpool.confirm.exact import Array, Position, Setting, Trace, Untraced, user_line

# Integers that are kept exact in 64 bits.
NARROW = ("int8", "int16", "int32")


@contextmanager
def exact(trace: Trace | Untraced, narrow: frozenset[Position] = frozenset()) -> Iterator[None]:
    """Patches the interpreter: narrow integers are held in 64 bits, but not what the operations at `narrow` make.

    Accesses and comparisons go to `trace`.
    """
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    loads = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
    names = ("binary_op", "cast_impl", "create_idiv", "create_bitcast", *loads)
    before = {name: getattr(builder, name) for name in names}
    helpers = {name: getattr(interpreter, name) for name in ("_validate_np_data_size", "_get_np_dtype")}
    for name in names:
        setattr(builder, name, PATCHES[name](before[name], trace, interpreter, helpers["_get_np_dtype"]))
    if narrow:
        builder.binary_op = _narrowed(before["binary_op"], builder.binary_op, narrow, interpreter, helpers["_get_np_dtype"])
        builder.cast_impl = _narrowing(builder.cast_impl, narrow, interpreter, helpers["_get_np_dtype"])
    patch_tensor = interpreter._patch_lang_tensor
    interpreter._patch_lang_tensor = lambda tensor, *rest: _patched(patch_tensor, tensor, *rest)
    interpreter._validate_np_data_size = lambda data, dtype: True
    interpreter._get_np_dtype = lambda dtype: _wide(helpers["_get_np_dtype"](dtype))
    try:
        yield
    finally:
        for name in names:
            setattr(builder, name, before[name])
        interpreter._patch_lang_tensor = patch_tensor
        for name, helper in helpers.items():
            setattr(interpreter, name, helper)


def _patched(original: Callable[..., Any], tensor: Any, *rest: Any) -> None:
    """Triton 3.6 makes an int of an array in a way that numpy 2.4 no longer has."""
    original(tensor, *rest)
    tensor.__index__ = lambda self: int(self.handle.data.item())


def _wide(dtype: Any) -> Any:
    return np.dtype(np.int64) if dtype.name in NARROW else dtype


def _widened(handle: Any, interpreter: Any) -> Any:
    if handle.data.dtype.name not in NARROW:
        return handle
    return interpreter.TensorHandle(handle.data.astype(np.int64), handle.dtype, handle.attr)


def _narrowed(
    original: Callable[..., Any], wide: Callable[..., Any], narrow: frozenset[Position], interpreter: Any, true_dtype: Any
) -> Callable[..., Any]:
    def operate(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        if str(left.dtype.scalar) not in NARROW or user_line() not in narrow:
            return wide(self, left, right, *rest)
        kinds = [true_dtype(item.dtype.scalar) for item in (left, right)]
        parts = [
            interpreter.TensorHandle(item.data.astype(kind), item.dtype) for item, kind in zip((left, right), kinds, strict=True)
        ]
        return original(self, *parts, *rest)

    return operate


def _binary(original: Callable[..., Any], trace: Any, interpreter: Any, true_dtype: Callable[[Any], Any]) -> Any:
    def operate(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        wide = _widened(left, interpreter), _widened(right, interpreter)
        # What is narrow is what Triton says, not what holds it.
        made = original(self, *wide, *rest)
        if made.data.dtype == np.bool_:
            trace.comparison(wide[0].data, wide[1].data, made.data)
        elif str(left.dtype.scalar) in NARROW:
            trace.integer(made.data)
        return made

    return operate


def _cast(original: Callable[..., Any], trace: Any, interpreter: Any, true_dtype: Callable[[Any], Any]) -> Any:
    def cast(self: Any, source: Any, kind: Any) -> Any:
        made = original(self, source, kind)
        if str(kind.scalar) in NARROW and source.data.dtype.kind in "iu":
            trace.integer(made.data)
        return made

    return cast


def _narrowing(wide: Callable[..., Any], narrow: frozenset[Position], interpreter: Any, true_dtype: Any) -> Callable[..., Any]:
    def cast(self: Any, source: Any, kind: Any) -> Any:
        made = wide(self, source, kind)
        if str(kind.scalar) in NARROW and user_line() in narrow:
            return interpreter.TensorHandle(made.data.astype(true_dtype(kind)), made.dtype)
        return made

    return cast


def _bitcast(original: Callable[..., Any], trace: Any, interpreter: Any, true_dtype: Callable[[Any], Any]) -> Any:
    def cast(self: Any, source: Any, kind: Any) -> Any:
        data = source.data.astype(true_dtype(source.dtype.scalar))
        return interpreter.TensorHandle(data.view(true_dtype(kind)), kind.scalar)

    return cast


def _load(original: Callable[..., Any], trace: Any, interpreter: Any, true_dtype: Callable[[Any], Any]) -> Any:
    def load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        kind = pointers.get_element_ty()
        dtype = true_dtype(kind)
        shape = pointers.data.shape
        chosen = np.broadcast_to(mask.data.astype(bool), shape)
        usual = np.zeros(shape, dtype) if other is None else np.broadcast_to(other.data, shape).astype(dtype)

        def memory() -> Array:
            loaded: Array = interpreter._interpreter.load(pointers.data, np.ascontiguousarray(chosen), usual, dtype)
            return loaded

        loaded = trace.touch("load", pointers.data, chosen, None, dtype, memory)
        if trace.like is not None:
            wide = _wide(dtype)
            loaded = np.where(chosen, loaded, usual.astype(wide) if wide != dtype else usual)
        return interpreter.TensorHandle(loaded, kind)

    return load


def _store(original: Callable[..., Any], trace: Any, interpreter: Any, true_dtype: Callable[[Any], Any]) -> Any:
    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> None:
        dtype = true_dtype(pointers.get_element_ty())
        shape = pointers.data.shape
        data = np.ascontiguousarray(np.broadcast_to(value.data, shape).astype(dtype))
        chosen = np.ascontiguousarray(np.broadcast_to(mask.data.astype(bool), shape))

        def memory() -> Array:
            interpreter._interpreter.store(pointers.data, data, chosen)
            return data

        trace.touch("store", pointers.data, chosen, data, dtype, memory)

    return store


def _rmw(original: Callable[..., Any], trace: Any, interpreter: Any, true_dtype: Callable[[Any], Any]) -> Any:
    def update(self: Any, kind: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        dtype = true_dtype(pointers.get_element_ty())
        shape = pointers.data.shape
        data = interpreter.TensorHandle(np.ascontiguousarray(np.broadcast_to(value.data, shape).astype(dtype)), value.dtype)
        chosen = interpreter.TensorHandle(np.ascontiguousarray(np.broadcast_to(mask.data.astype(bool), shape)), mask.dtype)
        old = trace.touch(
            "atomic", pointers.data, chosen.data, None, dtype, lambda: original(self, kind, pointers, data, chosen, *rest).data
        )
        return interpreter.TensorHandle(old, value.dtype.scalar)

    return update


def _cas(original: Callable[..., Any], trace: Any, interpreter: Any, true_dtype: Callable[[Any], Any]) -> Any:
    def swap(self: Any, pointers: Any, expected: Any, value: Any, *rest: Any) -> Any:
        dtype = true_dtype(pointers.get_element_ty())
        both = [interpreter.TensorHandle(np.ascontiguousarray(item.data.astype(dtype)), item.dtype) for item in (expected, value)]
        everywhere = np.ones(pointers.data.shape, bool)
        old = trace.touch("atomic", pointers.data, everywhere, None, dtype, lambda: original(self, pointers, *both, *rest).data)
        return interpreter.TensorHandle(old, expected.dtype.scalar)

    return swap


PATCHES = {
    "binary_op": _binary,
    "cast_impl": _cast,
    "create_idiv": _binary,
    "create_bitcast": _bitcast,
    "create_masked_load": _load,
    "create_masked_store": _store,
    "create_atomic_rmw": _rmw,
    "create_atomic_cas": _cas,
}


@contextmanager
def first_programs(setting: Setting) -> Iterator[None]:
    """Programs count from `setting.first` on, and there are `setting.programs`: compiled and interpreted kernels alike."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    ids, counts = TritonSemantic.program_id, TritonSemantic.num_programs
    first, missing = setting.first, tuple(a - b for a, b in zip(setting.programs, setting.launched, strict=True))

    def moved(original: Callable[..., Any], amounts: tuple[int, ...]) -> Callable[..., Any]:
        def made(self: Any, axis: int) -> Any:
            found = original(self, axis)
            if not amounts[axis]:
                return found
            return tl.tensor(self.builder.create_add(found.handle, self.builder.get_int32(amounts[axis])), tl.int32)

        return made

    TritonSemantic.program_id, TritonSemantic.num_programs = moved(ids, first), moved(counts, missing)
    try:
        yield
    finally:
        TritonSemantic.program_id, TritonSemantic.num_programs = ids, counts
