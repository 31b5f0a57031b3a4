"""Shared memory, its barriers, and copies into it by TMA."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .threads import Hazard, program
from .values import TYPES, Tensor, from_bits, to_bits

TMA = np.uint8(128)


class Memory:
    """The bytes of one allocation: nothing that means anything until they are written. `unfenced`: written by warps, and not
    yet to be seen by TMA and the matrix units. `writers`: a bit for each partition that ever wrote a byte, and one for TMA."""

    def __init__(self, size: int) -> None:
        self.data = np.full(size, 0xFF, np.uint8)
        self.unfenced = np.zeros(size, bool)
        self.writers = np.zeros(size, np.uint8)
        self.bars: dict[int, Bar] = {}


@dataclass(eq=False)
class Bar:
    """An mbarrier: a phase ends when all arrivals and all bytes are there."""

    count: int
    parity: int = 0
    arrived: int = 0
    awaited: int = 0

    def arrive(self, count: int = 1) -> None:
        self.arrived += count
        if self.arrived > self.count:
            raise Hazard(f"{self.arrived} arrivals at a barrier of {self.count}")
        self.settle()

    def settle(self) -> None:
        if self.arrived == self.count and self.awaited == 0:
            self.parity ^= 1
            self.arrived = 0


@dataclass(eq=False)
class Shared:
    """Elements in shared memory. `at` [shape]: where each begins, in bytes. `swizzle`: bytes of a row that lie together."""

    memory: Memory
    dtype: Any
    at: np.ndarray
    swizzle: int = 0

    @property
    def shape(self) -> list[int]:
        return list(self.at.shape)

    @property
    def _size(self) -> int:
        return int(self.dtype.primitive_bitwidth) // 8

    @property
    def _bytes(self) -> np.ndarray:
        return self.at[..., None] + np.arange(self._size)

    def index(self, place: Any) -> Shared:
        place = int(place)
        assert 0 <= place < len(self.at), f"buffer {place} of {len(self.at)}"
        return Shared(self.memory, self.dtype, self.at[place], self.swizzle)

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        assert int(start) + length <= self.at.shape[dim], "a slice past the end"
        return Shared(self.memory, self.dtype, self.at.take(range(int(start), int(start) + length), axis=dim), self.swizzle)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.memory, self.dtype, self.at.transpose(order), self.swizzle)

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        assert layout.swizzle_byte_width == self.swizzle, "another swizzle moves bytes within a row"
        made = placed(self.memory, dtype, [int(size) for size in shape], layout)
        assert made.at.size * made._size == self.at.size * self._size, "another number of bytes"
        return made

    def bits(self) -> np.ndarray:
        for copy in program().copies:
            if copy.box.memory is self.memory and np.intersect1d(copy.box.at, self.at).size:
                raise Hazard(f"{program().now.name}: reads what a copy by TMA still writes")
        places = self._bytes
        program().now.reads.append((self.memory.writers, places))
        return self.memory.data[places]

    def load(self, layout: Any = None) -> Tensor:
        return Tensor(from_bits(self.bits(), self.dtype), self.dtype, layout)

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.dtype, f"{value.dtype} stored as {self.dtype}"
        assert value.shape == self.shape, f"{value.shape} stored as {self.shape}"
        places = self._bytes
        self.memory.data[places] = to_bits(value.a, self.dtype)
        self.memory.unfenced[places] = True
        self.memory.writers[places] |= program().now.bit
        program().now.unfenced.append((self.memory.unfenced, places))

    def operand(self) -> np.ndarray:
        """The bytes as the matrix units see them."""
        if self.memory.unfenced[self._bytes].any():
            raise Hazard(f"{program().now.name}: the matrix units read what was stored without fence_async_shared")
        return self.bits()


def placed(memory: Memory, dtype: Any, shape: list[int], layout: Any) -> Shared:
    """Rows of a swizzled layout lie in parts of `swizzle_byte_width` bytes: part, row, column."""
    size = dtype.primitive_bitwidth // 8
    swizzle = getattr(layout, "swizzle_byte_width", 0)
    if not swizzle:
        return Shared(memory, dtype, np.arange(int(np.prod(shape))).reshape(shape) * size)
    width, cols = swizzle // size, shape[-1]
    assert cols % width == 0, f"{cols} columns in parts of {width}"
    box = shape[len(shape) - layout.rank :]
    rows = int(np.prod(box[:-1]))
    row, col = np.arange(rows)[:, None], np.arange(cols)[None, :]
    one = ((col // width * rows + row) * width + col % width).reshape(box)
    lead = shape[: len(shape) - layout.rank]
    first = np.arange(int(np.prod(lead))).reshape([*lead, *[1] * layout.rank]) * (rows * cols)
    return Shared(memory, dtype, (first + one) * size, swizzle)


def allocate(dtype: Any, shape: list[int], layout: Any) -> Shared:
    shape = [int(size) for size in shape]
    return placed(Memory(int(np.prod(shape)) * dtype.primitive_bitwidth // 8), dtype, shape, layout)


class Descriptor:
    """A TensorDescriptor of the host."""

    def __init__(self, host: Any) -> None:
        self.dtype, self.block_shape, self.padding = TYPES[host.base.dtype], list(host.block_shape), host.padding
        self.sizes = list(host.shape)
        assert (
            host.base.element_size() * max((size - 1) * step for size, step in zip(host.shape, host.strides, strict=True))
            < host.base.untyped_storage().nbytes()
        ), "a descriptor past the end of its storage"
        self.pages = host.base.as_strided(host.shape, host.strides, host.base.storage_offset())

    def box(self, first: list[int]) -> np.ndarray:
        """The bytes of a box; what lies outside is 0, or NaN."""
        kind = self.pages.dtype
        box = torch.full(self.block_shape, float("nan") if self.padding == "nan" else 0, dtype=kind)
        spans = [
            (max(at, 0), min(at + length, size)) for at, length, size in zip(first, self.block_shape, self.sizes, strict=True)
        ]
        if all(low < high for low, high in spans):
            inside = tuple(slice(low - at, high - at) for (low, high), at in zip(spans, first, strict=True))
            box[inside] = self.pages[tuple(slice(low, high) for low, high in spans)]
        return box.unsqueeze(-1).view(torch.uint8).numpy()


@dataclass(eq=False)
class Copy:
    """A copy under way; it reads when it lands."""

    descriptor: Descriptor
    first: list[int]
    bar: Bar
    box: Shared

    def land(self) -> None:
        data = self.descriptor.box(self.first)
        places = self.box._bytes
        self.box.memory.data[places] = data
        self.box.memory.unfenced[places] = False
        self.box.memory.writers[places] |= TMA
        self.bar.awaited -= data.size
        self.bar.settle()


class Barriers:
    """gluon's `mbarrier`."""

    class MBarrierLayout:
        pass

    @staticmethod
    def of(bar: Shared) -> Bar:
        made = bar.memory.bars.get(int(bar.at.flat[0]))
        if made is None:
            raise Hazard("a barrier that nobody initialised")
        return made

    @staticmethod
    def init(bar: Shared, count: int) -> None:
        bar.memory.bars[int(bar.at.flat[0])] = Bar(count)

    def expect(self, bar: Shared, nbytes: int, pred: Any = True) -> None:
        if pred:
            program().now.may_signal("a copy is expected")
            made = self.of(bar)
            made.awaited += nbytes
            made.arrive()

    def arrive(self, bar: Shared, count: int = 1, pred: Any = True) -> None:
        if pred:
            program().now.may_signal("a barrier is signalled")
            self.of(bar).arrive(count)
            program().pause()

    def wait(self, bar: Shared, phase: Any, pred: Any = True) -> None:
        if pred:
            made, parity = self.of(bar), int(phase)
            program().pause(
                lambda: made.parity != parity, f"phase {parity} of a barrier of {made.count} ({made.arrived} arrived)"
            )


class CopyEngine:
    """gluon's `tma`."""

    @staticmethod
    def async_copy_global_to_shared(desc: Descriptor, first: list[Any], bar: Shared, box: Shared, pred: Any = True) -> None:
        if not pred:
            return
        program().now.may_signal("a copy begins")
        assert box.shape == desc.block_shape, f"a box of {desc.block_shape} copied to {box.shape}"
        assert box.dtype == desc.dtype, "another type"
        copy = Copy(desc, [int(place) for place in first], Barriers.of(bar), box)
        program().copies.append(copy)
        if program().haste == 1:
            program().land(copy)


def fence_async_shared() -> None:
    for unfenced, places in program().now.unfenced:
        unfenced[places] = False
    program().now.unfenced.clear()


@dataclass(eq=False)
class Product:
    """A product under way: its operands, and their bytes when it began."""

    a: Any
    b: Shared
    acc: Any
    use_acc: bool
    before: list[np.ndarray] = field(default_factory=list)
    result: Tensor | None = None

    def end(self) -> None:
        for operand, before in zip([one for one in (self.a, self.b) if isinstance(one, Shared)], self.before, strict=True):
            if not np.array_equal(operand.bits(), before):
                raise Hazard(f"{program().now.name}: an operand changed under a product")
        acc = self.acc.result if isinstance(self.acc, Product) else self.acc
        assert acc is not None
        kind = np.int64 if acc.dtype.name == "int32" else np.float32
        a, b = (_values(one).astype(kind) for one in (self.a, self.b))
        with np.errstate(all="ignore"):
            out = a @ b if kind == np.float32 else (a.astype(np.float64) @ b.astype(np.float64)).astype(np.int64)
            out = out + acc.a if self.use_acc else out
        self.result = Tensor(out.astype(acc.a.dtype), acc.dtype, acc.layout)


def _values(operand: Any) -> np.ndarray:
    if isinstance(operand, Tensor):
        return operand.a
    return from_bits(operand.bits(), operand.dtype)


def warpgroup_mma(
    a: Any, b: Shared, acc: Any, *, use_acc: Any = True, is_async: bool = False, max_num_imprecise_acc: int = 0
) -> Any:
    """Sums of 8-bit products keep fewer bits on the card than here, whatever `max_num_imprecise_acc`."""
    rows, depth, cols = a.shape[0], a.shape[1], b.shape[1]
    held = acc.acc if isinstance(acc, Product) else acc
    while isinstance(held, Product):
        held = held.acc
    assert b.shape[0] == depth, f"{a.shape} times {b.shape}"
    assert held.shape == [rows, cols], f"{[rows, cols]} added to {held.shape}"
    assert rows % 64 == 0, "a warpgroup multiplies 64 rows"
    assert a.dtype == b.dtype, f"{a.dtype} times {b.dtype}"
    made = Product(a, b, acc, bool(use_acc), [one.operand() for one in (a, b) if isinstance(one, Shared)])
    program().now.products.append(made)
    return made if is_async else warpgroup_mma_wait(0, [made])


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = ()) -> Any:
    own = program().now
    program().pause()
    while len(own.products) > num_outstanding:
        own.products.pop(0).end()
    made = []
    for one in deps:
        if isinstance(one, Product) and one.result is None:
            raise Hazard(f"{own.name}: takes the result of a product that is still under way")
        made.append(one.result if isinstance(one, Product) else one)
    return made[0] if len(made) == 1 else tuple(made)
