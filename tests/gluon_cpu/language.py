"""What stands for `gl`, `tl` and the names that kernels import from them."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter

from . import memory, ptx
from .threads import program
from .values import ROUNDED, STORED, Tensor, common, from_bits, layout_of, rounded, to_bits

TYPES = ("int1", "int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float8e4nv")
SliceLayout = namedtuple("SliceLayout", "dim parent")
BlockedLayout = namedtuple("BlockedLayout", "size_per_thread threads_per_warp warps_per_cta order")
MMALayout = namedtuple("MMALayout", "version warps_per_cta instr_shape")
DotOperandLayout = namedtuple("DotOperandLayout", "operand_index parent k_width")
NVMMASharedLayout = namedtuple("NVMMASharedLayout", "swizzle_byte_width element_bitwidth rank")
SwizzledSharedLayout = namedtuple("SwizzledSharedLayout", "vec per_phase max_phase order")


def numbers(value: Any) -> Any:
    return value.a if isinstance(value, Tensor) else value


def full(shape: list[int], value: Any, dtype: Any, layout: Any = None) -> Tensor:
    return Tensor(np.broadcast_to(rounded(numbers(value), dtype), [int(size) for size in shape]), dtype, layout)


def arange(start: int, end: int, layout: Any = None) -> Tensor:
    return Tensor(np.arange(start, end, dtype=np.int32), tl.int32, layout)


def turns(*bounds: Any) -> Any:
    """`range` of a kernel: its turns are int32."""
    return (Tensor(np.int32(turn), tl.int32) for turn in range(*(int(bound) for bound in bounds)))


def cdiv(a: Any, b: Any) -> Any:
    return (a + b - 1) // b


def where(condition: Any, x: Any, y: Any) -> Tensor:
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        dtype = common(x, y)
    else:
        dtype = tl.float32 if isinstance(x, float) or isinstance(y, float) else tl.int32
    chosen = np.where(numbers(condition), rounded(numbers(x), dtype), rounded(numbers(y), dtype))
    return Tensor(chosen, dtype, layout_of(condition, x, y))


def _least(apply: Any) -> Any:
    def pick(x: Any, y: Any) -> Any:
        if not isinstance(x, Tensor) and not isinstance(y, Tensor):
            return Tensor(apply(x, y), tl.float32 if isinstance(x, float) or isinstance(y, float) else tl.int32)
        dtype = common(x, y)
        return Tensor(apply(rounded(numbers(x), dtype), rounded(numbers(y), dtype)), dtype, layout_of(x, y))

    return pick


def _reduced(x: Tensor, out: np.ndarray, axis: int, dtype: Any) -> Tensor:
    return Tensor(out, dtype, SliceLayout(axis, x.layout) if out.ndim else None)


def reduce_max(x: Tensor, axis: int) -> Tensor:
    return _reduced(x, np.fmax.reduce(x.a, axis=axis), axis, x.dtype)


def reduce_sum(x: Tensor, axis: int) -> Tensor:
    dtype = x.dtype if x.dtype.is_floating() or x.dtype.primitive_bitwidth >= 32 else tl.int32
    with np.errstate(all="ignore"):
        return _reduced(x, rounded(np.sum(x.a, axis=axis, dtype=STORED[dtype.name]), dtype), axis, dtype)


def _function(apply: Any) -> Any:
    def of(x: Tensor) -> Tensor:
        with np.errstate(all="ignore"):
            return Tensor(rounded(apply(x.a), x.dtype), x.dtype, x.layout)

    return of


def broadcast(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    a, b = np.broadcast_arrays(x.a, y.a)
    layout = x.layout if x.shape == list(a.shape) else y.layout or x.layout
    return Tensor(a, x.dtype, layout), Tensor(b, y.dtype, layout)


def join(x: Tensor, y: Tensor) -> Tensor:
    return Tensor(np.stack([x.a, y.a], -1), x.dtype)


def convert_layout(x: Tensor, layout: Any, assert_trivial: bool = False) -> Tensor:
    return Tensor(x.a, x.dtype, layout)


def _flat(values: Any, shape: tuple[int, ...], kind: Any) -> np.ndarray:
    return np.ascontiguousarray(np.broadcast_to(values, shape)).reshape(-1).astype(kind)


def _bits_type(dtype: Any) -> Any:
    return np.dtype(f"uint{dtype.primitive_bitwidth}") if dtype.name in ROUNDED else np.dtype(STORED[dtype.name])


def _bits(values: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return to_bits(_flat(rounded(numbers(values), dtype), shape, STORED[dtype.name]), dtype).view(_bits_type(dtype))[..., 0]


def load(pointer: Tensor, mask: Any = None, other: Any = None) -> Tensor:
    dtype, given = pointer.dtype.element_ty, numbers(True if mask is None else mask)
    shape = np.broadcast_shapes(pointer.a.shape, np.shape(given))
    missing = _bits(0 if other is None else other, shape, dtype)
    data = interpreter.load(_flat(pointer.a, shape, np.uint64), _flat(given, shape, np.bool_), missing, _bits_type(dtype))
    values = from_bits(np.ascontiguousarray(data)[..., None].view(np.uint8), dtype)
    return Tensor(values.reshape(shape), dtype, layout_of(pointer, mask))


def store(pointer: Tensor, value: Any, mask: Any = None) -> None:
    dtype, given = pointer.dtype.element_ty, numbers(True if mask is None else mask)
    shape = np.broadcast_shapes(pointer.a.shape, np.shape(numbers(value)), np.shape(given))
    interpreter.store(_flat(pointer.a, shape, np.uint64), _bits(value, shape, dtype), _flat(given, shape, np.bool_))


def inline_asm_elementwise(text: str, constraints: str, arguments: list[Tensor], dtype: Any, is_pure: bool, pack: int) -> Any:
    several = isinstance(dtype, (tuple, list))
    made = ptx.elementwise(text, constraints, arguments, list(dtype) if several else [dtype], pack)
    return tuple(made) if several else made[0]


def warp_specialize(parts: list[tuple[Any, tuple[Any, ...]]], worker_warps: list[int], worker_registers: list[int]) -> None:
    running, own = program(), program().now
    assert len(parts) == len(worker_warps) + 1 == len(worker_registers) + 1
    started = [
        running.start(f"{body.__name__}, part {place}", lambda body=body, given=given: body(*given), warps)
        for place, ((body, given), warps) in enumerate(zip(parts, [own.warps, *worker_warps], strict=True))
    ]
    running.pause(lambda: all(one.done for one in started), "its parts")


def thread_barrier() -> None:
    program().now.reads.clear()


LANGUAGE = SimpleNamespace(
    SliceLayout=SliceLayout, BlockedLayout=BlockedLayout, NVMMADistributedLayout=MMALayout, DotOperandLayout=DotOperandLayout,
    NVMMASharedLayout=NVMMASharedLayout, SwizzledSharedLayout=SwizzledSharedLayout,
    full=full, arange=arange, where=where, maximum=_least(np.fmax), minimum=_least(np.fmin), max=reduce_max, sum=reduce_sum,
    abs=_function(np.abs), exp2=_function(np.exp2), log2=_function(np.log2), floor=_function(np.floor),
    zeros=lambda shape, dtype: full(shape, 0, dtype), cdiv=cdiv, broadcast=broadcast, join=join, convert_layout=convert_layout,
    load=load, store=store, inline_asm_elementwise=inline_asm_elementwise, range=turns, static_range=range,
    program_id=lambda axis: Tensor(np.int32(program().ids[axis]), tl.int32),
    num_programs=lambda axis: Tensor(np.int32(program().grid[axis]), tl.int32),
    allocate_shared_memory=memory.allocate, warp_specialize=warp_specialize, thread_barrier=thread_barrier, constexpr=lambda x: x,
    **{name: getattr(tl, name) for name in TYPES},
)  # fmt: skip
NAMES = {
    "gl": LANGUAGE, "tl": LANGUAGE, "mbarrier": memory.Barriers(), "tma": memory.CopyEngine(), "range": turns,
    "fence_async_shared": memory.fence_async_shared, "warpgroup_mma": memory.warpgroup_mma,
    "warpgroup_mma_wait": memory.warpgroup_mma_wait, "gdc_wait": lambda: None,
}  # fmt: skip
