"""Tensors of an emulated kernel: numpy arrays with Triton's types and its arithmetic."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl

STORED = {
    "int1": np.bool_, "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64,
    "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32, "uint64": np.uint64,
    "fp16": np.float16, "bf16": np.float32, "fp32": np.float32, "fp64": np.float64, "fp8e4nv": np.float32, "fp8e5": np.float32,
}  # fmt: skip
# Types that numpy lacks: values are fp32, bits are torch's.
ROUNDED = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
LARGEST = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
TYPES = {
    torch.bool: tl.int1, torch.int8: tl.int8, torch.uint8: tl.uint8, torch.int32: tl.int32, torch.int64: tl.int64,
    torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5,
}  # fmt: skip


def rounded(values: np.ndarray, dtype: Any) -> np.ndarray:
    """`values` in the array type of `dtype`, rounded to it."""
    with np.errstate(all="ignore"):
        if dtype.name not in ROUNDED:
            return np.asarray(values).astype(STORED[dtype.name])
        values = np.asarray(values, dtype=np.float32)
        if dtype.name in LARGEST:
            values = np.where(np.isnan(values), values, np.clip(values, -LARGEST[dtype.name], LARGEST[dtype.name]))
        return torch.from_numpy(np.array(values, copy=True)).to(ROUNDED[dtype.name]).float().numpy()


def from_bits(data: np.ndarray, dtype: Any) -> np.ndarray:
    """Values of bytes [..., size of an element]."""
    flat = np.array(data, copy=True, order="C").reshape(-1)
    if dtype.name in ROUNDED:
        return torch.from_numpy(flat).view(ROUNDED[dtype.name]).float().numpy().reshape(data.shape[:-1])
    return flat.view(STORED[dtype.name]).reshape(data.shape[:-1])


def to_bits(values: np.ndarray, dtype: Any) -> np.ndarray:
    """The bytes of values, [..., size of an element]."""
    flat = np.array(values, copy=True, order="C").reshape(-1)
    if dtype.name in ROUNDED:
        flat = torch.from_numpy(flat).to(ROUNDED[dtype.name]).view(torch.uint8).numpy()
    return flat.view(np.uint8).reshape(*np.shape(values), dtype.primitive_bitwidth // 8)


def common(a: Any, b: Any) -> Any:
    """The type in which two operands meet. Python numbers take the other's type if that can hold their kind."""
    if not isinstance(a, Tensor):
        return tl.float32 if isinstance(a, float) and not b.dtype.is_floating() else b.dtype
    if not isinstance(b, Tensor):
        return common(b, a)
    first, second = a.dtype, b.dtype
    if first == second:
        return first
    if first.is_floating() != second.is_floating():
        return first if first.is_floating() else second
    if first.is_floating():
        return tl.float32 if first.primitive_bitwidth == second.primitive_bitwidth else _wider(first, second)
    if first.primitive_bitwidth == second.primitive_bitwidth:
        return first if first.is_int_unsigned() else second
    return _wider(first, second)


def _wider(first: Any, second: Any) -> Any:
    return first if first.primitive_bitwidth > second.primitive_bitwidth else second


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Toward zero, as in C."""
    floor = a // b
    return floor + ((floor * b != a) & ((a < 0) != (b < 0)))


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a - _quotient(a, b) * b


def _numbers(dtype: Any, *operands: Any) -> list[np.ndarray]:
    return [rounded(one.a if isinstance(one, Tensor) else np.asarray(one), dtype) for one in operands]


def _binary(apply: Callable[..., Any], a: Any, b: Any, result: Any = None) -> Tensor:
    dtype = common(a, b)
    x, y = _numbers(dtype, a, b)
    with np.errstate(all="ignore"):
        out = apply(x, y)
    return Tensor(rounded(out, result or dtype), result or dtype, layout_of(a, b))


def layout_of(*operands: Any) -> Any:
    return next((one.layout for one in operands if isinstance(one, Tensor) and one.layout is not None and one.a.ndim), None)


def arithmetic(apply: Callable[..., Any], result: Any = None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def straight(self: Tensor, other: Any) -> Any:
        return _binary(apply, self, other, result)

    def reflected(self: Tensor, other: Any) -> Any:
        return _binary(apply, other, self, result)

    return straight, reflected


class Tensor:
    """A value of a kernel, of any number of dimensions. `a` of a pointer: addresses, int64."""

    def __init__(self, a: Any, dtype: Any, layout: Any = None) -> None:
        self.a, self.dtype, self.layout = np.asarray(a), dtype, layout

    @property
    def shape(self) -> list[int]:
        return list(self.a.shape)

    @property
    def type(self) -> Tensor:
        """Its `layout` is what kernels ask of it."""
        return self

    def __add__(self, other: Any) -> Tensor:
        if self.dtype.is_ptr():
            size = self.dtype.element_ty.primitive_bitwidth // 8
            steps = (other.a if isinstance(other, Tensor) else np.asarray(other)).astype(np.int64)
            return Tensor(self.a + steps * size, self.dtype, layout_of(other, self))
        if isinstance(other, Tensor) and other.dtype.is_ptr():
            return other + self
        return _binary(operator.add, self, other)

    __radd__ = __add__
    __sub__, __rsub__ = arithmetic(operator.sub)
    __mul__, __rmul__ = arithmetic(operator.mul)
    __floordiv__, __rfloordiv__ = arithmetic(_quotient)
    __mod__, __rmod__ = arithmetic(_remainder)
    __and__, __rand__ = arithmetic(operator.and_)
    __or__, __ror__ = arithmetic(operator.or_)
    __xor__, __rxor__ = arithmetic(operator.xor)
    __lshift__, __rlshift__ = arithmetic(operator.lshift)
    __rshift__, __rrshift__ = arithmetic(operator.rshift)
    __lt__, _ = arithmetic(operator.lt, tl.int1)
    __le__, _ = arithmetic(operator.le, tl.int1)
    __gt__, _ = arithmetic(operator.gt, tl.int1)
    __ge__, _ = arithmetic(operator.ge, tl.int1)
    __eq__, _ = arithmetic(operator.eq, tl.int1)  # type: ignore[assignment]
    __ne__, _ = arithmetic(operator.ne, tl.int1)  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __truediv__(self, other: Any) -> Tensor:
        return _divide(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return _divide(other, self)

    def __neg__(self) -> Tensor:
        return 0 - self

    def __bool__(self) -> bool:
        assert self.a.ndim == 0, f"a condition is a number, not {self.shape}"
        return bool(self.a)

    def __int__(self) -> int:
        assert self.a.ndim == 0, f"expected a number, got {self.shape}"
        return int(self.a)

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        if bitcast:
            return Tensor(from_bits(to_bits(self.a, self.dtype), dtype), dtype, self.layout)
        if not dtype.is_floating() and self.dtype.is_floating():
            with np.errstate(all="ignore"):
                return Tensor(np.trunc(self.a).astype(np.int64).astype(STORED[dtype.name]), dtype, self.layout)
        return Tensor(rounded(self.a, dtype), dtype, self.layout)

    def reshape(self, *shape: Any) -> Tensor:
        return Tensor(self.a.reshape(_sizes(shape)), self.dtype)

    def permute(self, *order: Any) -> Tensor:
        return Tensor(self.a.transpose(_sizes(order)), self.dtype)

    def expand_dims(self, axis: int) -> Tensor:
        parent = getattr(self.layout, "parent", None)
        return Tensor(np.expand_dims(self.a, axis), self.dtype, parent if parent and self.layout.dim == axis else None)

    def __getitem__(self, places: Any) -> Tensor:
        made = self
        for axis, place in enumerate(places if isinstance(places, tuple) else (places,)):
            if place is None:
                made = made.expand_dims(axis)
            else:
                assert place == slice(None), "a kernel takes no part of a value"
        return made


def _divide(a: Any, b: Any) -> Tensor:
    dtype = common(a, b)
    return _binary(operator.truediv, a, b, dtype if dtype.is_floating() else tl.float32)


def _sizes(given: tuple[Any, ...]) -> list[int]:
    return [int(size) for size in (given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given)]


def wrap(value: Any) -> Tensor:
    """A number as the launcher passes it: int32 where that holds it."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, torch.Tensor):
        return Tensor(np.int64(value.data_ptr()), tl.pointer_type(TYPES[value.dtype]))
    if isinstance(value, float):
        return Tensor(np.float32(value), tl.float32)
    return Tensor(
        np.asarray(value, np.int32 if -(2**31) <= value < 2**31 else np.int64),
        tl.int32 if -(2**31) <= value < 2**31 else tl.int64,
    )
