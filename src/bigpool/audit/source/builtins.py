"""What the functions of triton.language make of integers and pointers. What is missing here is a float or not understood."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ..expr import MAX_COUNT, MAX_GRID, MAX_TILE, Node, Origin, Sink, Var, binary, const, extend, select, unary, variable
from . import types
from .conditions import bounded
from .evaluate import cast, operate
from .frame import Frame, constexpr
from .lanes import length, of_pointer
from .values import Block, DType, Float, Opaque, Plain, Pointer, Tuple, Value, as_node, merge

if TYPE_CHECKING:
    from .calls import Arguments

_SAME = """
reshape view broadcast_to expand_dims trans permute ravel flatten flip multiple_of max_contiguous max_constancy sort gather
item squeeze unsqueeze convert_layout set_auto_layout assume_enforce_multiple_of to_tensor bitcast_like topk
"""
SAME = frozenset(_SAME.split())
_FLOATS = """
exp exp2 log log2 log1p expm1 sqrt rsqrt sqrt_rn sigmoid softmax sin cos tan tanh sinh cosh asin acos atan atan2 erf erfc fma
dot dot_scaled rand randn rand4x randn4x div_rn fdiv fmod pow ceil floor round trunc rint gelu silu fast_expf fast_logf
fast_dividef exp10 gelu_tanh log_add_exp tanh_fast dot_product isnan isinf finitef lgamma hypot nearbyint copysign sum_combine
fast_exp isnand isinfd nextafter cbrt j0 j1 warp_shuffle libdevice_div safe_exp safe_dot uint_to_uniform_float
"""
FLOATS = frozenset(_FLOATS.split())
_NOTHING = """
static_assert static_print device_print device_assert debug_barrier assume inline_asm arrive wait prefetch sync barrier
thread_barrier fence_async_shared warpgroup_fence dependency_wait extra_wait gdc_wait gdc_launch_dependents
"""
NOTHING = frozenset(_NOTHING.split())


def call(frame: Frame, name: str, arguments: Arguments) -> Value:
    """A function of triton.language by its last name."""
    handler = _HANDLERS.get(name)
    if handler is not None:
        return handler(frame, name, arguments)
    if name in SAME:
        value = arguments.get(0, "input")
        if value is None:
            value = arguments.get(0, "x")
        return value if value is not None else Opaque(f"tl.{name} without an argument")
    if name in FLOATS:
        return Float()
    if name in NOTHING:
        return Plain(None)
    used(frame, arguments)
    return Opaque(f"tl.{name}", 32)


def used(frame: Frame, arguments: Arguments) -> None:
    """A function that is not known may load from every pointer that it gets."""
    for value in (*arguments.by_place, *arguments.by_name.values()):
        if isinstance(value, Pointer) and value.decided:
            frame.state.address("address", value, frame.span(arguments.node), types.item_bytes(value.dtype))


def flag(frame: Frame, arguments: Arguments) -> Node:
    return constexpr("flag", frame.span(arguments.node), 1)


def _grid(frame: Frame, name: str, arguments: Arguments) -> Value:
    axis = arguments.get(0, "axis")
    place = axis.value if isinstance(axis, Node) and axis.op == "const" and 0 <= axis.value < 3 else 0
    origin = Origin.PROGRAM_ID if name == "program_id" else Origin.NUM_PROGRAMS
    key = f"{name}({place})"
    high = MAX_GRID[place] - (1 if origin is Origin.PROGRAM_ID else 0)
    var = Var(key, origin, 32, 0 if origin is Origin.PROGRAM_ID else 1, high, "physics", frame.span(arguments.node), axis=place)
    most = frame.state.facts.host.programs(place)
    if most is not None and 0 < most <= high:
        var.maximum, var.bound_from = most - (origin is Origin.PROGRAM_ID), "launcher"
    return variable(var)


def _arange(frame: Frame, name: str, arguments: Arguments) -> Value:
    span = frame.span(arguments.node)
    first, second = arguments.get(0, "start"), arguments.get(1, "end")
    start = as_node(first, span) if first is not None else None
    stop = as_node(second, span) if second is not None else None
    if stop is None:
        start, stop = const(0), start
    low = start if start is not None else const(0)
    high = binary("sub", stop, const(1)) if stop is not None else None
    var = Var("arange", Origin.ARANGE, 32, 0, MAX_TILE - 1, "constexpr", span, low, high)
    if high is not None and high.op == "const":
        var.maximum = max(high.value, 0)
    return variable(var)


def pointer_of(value: Value | None) -> Pointer | None:
    return replace(value, decided=True) if isinstance(value, Pointer) else None


def _load(frame: Frame, name: str, arguments: Arguments) -> Value:
    frame.state.accesses += 1
    target = arguments.get(0, "pointer")
    guard = _mask(frame, arguments.get(1, "mask") if name == "load" else arguments.by_name.get("mask"), arguments)
    span = frame.span(arguments.node)
    if isinstance(target, Block):
        return loaded(target.pointer.name if target.pointer else "", DType(), span)
    pointer = pointer_of(target)
    if pointer is None:
        if isinstance(target, Opaque):
            frame.state.sink(Sink("address", (), span, "", 0, False, target.reason))
            return loaded("", DType(), span)
        if isinstance(target, Node):
            frame.state.sink(Sink("address", (target,), span, "", 0))
        return loaded("", DType(), span)
    frame.state.address("address", pointer, span, types.item_bytes(pointer.dtype), guard)
    value = loaded(pointer.name, pointer.dtype, span)
    if isinstance(value, Node) and value.var is not None:
        value.var.lanes = of_pointer(pointer)
    return value


def loaded(name: str, dtype: DType, span: object) -> Value:
    """What a load gives: any non-negative int32 where nothing else is known."""
    if dtype.kind == "float":
        return Float()
    if dtype.kind == "pointer":
        return Pointer("a loaded address", (), dtype.element or DType())
    typed = dtype.kind in ("int", "uint")
    width = dtype.bits if typed else 32
    high = 2 ** (width - (dtype.kind != "uint")) - 1 if typed and width < 32 else MAX_COUNT if width <= 32 else 2**63 - 1
    var = Var(f"{name}[...]" if name else "load", Origin.LOAD, width, 0, high, "type", None, pointer=name, typed=typed)
    var.span = span  # type: ignore[assignment]
    return variable(var, dtype.kind != "uint")


def _store(frame: Frame, name: str, arguments: Arguments) -> Value:
    frame.state.accesses += 1
    mask = arguments.get(2, "mask") if name == "store" else arguments.by_name.get("mask")
    if name.startswith("atomic") and name != "atomic_cas" and mask is None:
        mask = arguments.get(2, "mask")
    guard = _mask(frame, mask, arguments)
    target = arguments.get(0, "pointer")
    pointer = pointer_of(target)
    span = frame.span(arguments.node)
    kind = "atomic" if name.startswith("atomic") else "address"
    if pointer is not None:
        frame.state.address(kind, pointer, span, types.item_bytes(pointer.dtype), guard)
    elif isinstance(target, Opaque):
        frame.state.sink(Sink(kind, (), span, "", 0, False, target.reason))
    elif isinstance(target, Node):
        frame.state.sink(Sink(kind, (target,), span, "", 0))
    return (
        loaded(pointer.name if pointer else "", pointer.dtype if pointer else DType(), span) if kind == "atomic" else Plain(None)
    )


def _mask(frame: Frame, mask: Value | None, arguments: Arguments) -> Node | None:
    """Notes a mask; it is the guard of what is accessed under it."""
    if not isinstance(mask, Node) or mask.op == "const":
        return None
    frame.state.sink(Sink("mask", (mask,), frame.span(arguments.node)))
    return mask


def _buffer(frame: Frame, name: str, arguments: Arguments) -> Value:
    """AMD buffer operations: a scalar pointer and 32-bit offsets, which count bytes in the hardware."""
    frame.state.accesses += 1
    store = "store" in name or "atomic" in name
    place = 1 if name in ("buffer_store", "buffer_load_to_shared") else 0
    pointer = pointer_of(arguments.get(place, "ptr"))
    offsets = as_node(arguments.get(place + 1, "offsets") or Plain(None))
    _mask(frame, arguments.by_name.get("mask"), arguments)
    if pointer is not None and offsets is not None:
        terms = (*(term.node for term in pointer.terms), offsets)
        frame.state.sink(Sink("address", terms, frame.span(arguments.node), pointer.name, types.item_bytes(pointer.dtype), True))
    if store or pointer is None:
        return Plain(None)
    return loaded(pointer.name, pointer.dtype, frame.span(arguments.node))


def _block(frame: Frame, name: str, arguments: Arguments) -> Value:
    pointer = pointer_of(arguments.get(0, "base"))
    _coordinates(frame, arguments.get(3, "offsets") if name == "make_block_ptr" else None, arguments)
    if pointer is not None:
        frame.state.address("base", pointer, frame.span(arguments.node), types.item_bytes(pointer.dtype))
    return Block(pointer)


def _coordinates(frame: Frame, value: Value | None, arguments: Arguments) -> None:
    """Offsets of blocks: multiplied in 64 bits, but a coordinate itself has 32."""
    for item in value.items if isinstance(value, Tuple) else ():
        node = as_node(item)
        if node is not None and node.narrow:
            frame.state.sink(Sink("coordinate", (node,), frame.span(arguments.node)))


def _advance(frame: Frame, name: str, arguments: Arguments) -> Value:
    _coordinates(frame, arguments.get(1, "offsets"), arguments)
    return arguments.get(0, "base") or Block(None)


def shared(frame: Frame, name: str, arguments: Arguments) -> Value:
    """A load from shared memory, or a store: what was copied there is not followed."""
    frame.state.accesses += 1
    return Plain(None) if name == "store" else loaded("", DType(), frame.span(arguments.node))


def _to_shared(frame: Frame, name: str, arguments: Arguments) -> Value:
    frame.state.accesses += 1
    _mask(frame, arguments.get(2, "mask"), arguments)
    pointer = pointer_of(arguments.get(1, "pointer") or arguments.by_name.get("ptr"))
    if pointer is not None:
        frame.state.address("address", pointer, frame.span(arguments.node), types.item_bytes(pointer.dtype))
    return Plain(None)


def block_method(frame: Frame, block: Block, name: str, arguments: Arguments) -> Value:
    frame.state.accesses += 1
    _coordinates(frame, arguments.get(0, "offsets"), arguments)
    if name in ("load", "gather"):
        return loaded(block.pointer.name if block.pointer else "", block.pointer.dtype if block.pointer else DType(), None)
    return block if name == "advance" else Plain(None)


def _pair(arguments: Arguments, first: str = "x", second: str = "y") -> tuple[Value | None, Value | None]:
    return arguments.get(0, first), arguments.get(1, second)


def _cdiv(frame: Frame, name: str, arguments: Arguments) -> Value:
    first, second = _pair(arguments, "x", "div")
    if first is None or second is None:
        return Opaque("tl.cdiv without arguments")
    node = arguments.node
    rounded = operate(frame, "add", _plain(first), operate(frame, "sub", _plain(second), const(1), node), node)
    return operate(frame, "floordiv", _plain(rounded), second, node)


def _plain(value: Value) -> Value:
    return as_node(value) or value


def _min_max(frame: Frame, name: str, arguments: Arguments) -> Value:
    first, second = _pair(arguments)
    if name in ("min", "max") and (second is None or arguments.by_name or not isinstance(second, Node) or second.op == "const"):
        return _reduce(frame, name, arguments)
    if first is None or second is None:
        return Opaque(f"tl.{name} without arguments")
    return operate(frame, {"minimum": "min", "maximum": "max"}.get(name, name), _plain(first), _plain(second), arguments.node)


def _clamp(frame: Frame, name: str, arguments: Arguments) -> Value:
    value, low, high = arguments.get(0, "x"), arguments.get(1, "min"), arguments.get(2, "max")
    if value is None or low is None or high is None:
        return Opaque("tl.clamp without arguments")
    return operate(frame, "max", operate(frame, "min", _plain(value), _plain(high), arguments.node), _plain(low), arguments.node)


def _where(frame: Frame, name: str, arguments: Arguments) -> Value:
    condition = arguments.get(0, "condition")
    left, right = arguments.get(1, "x"), arguments.get(2, "y")
    if left is None or right is None:
        return Opaque("tl.where without arguments")
    if isinstance(left, Float) or isinstance(right, Float):
        return Float()
    first, second = as_node(left), as_node(right)
    if first is None or second is None or (isinstance(left, Pointer) and left.decided):
        return merge(left, right)
    number = as_node(condition) if condition is not None else None
    if number is not None:
        first = bounded(number, first, True)
        second = bounded(number, second, False)
    return select(number, first, second, frame.span(arguments.node))


def _reduce(frame: Frame, name: str, arguments: Arguments) -> Value:
    value = arguments.get(0, "input")
    number = as_node(value) if value is not None else None
    if number is None:
        return value if isinstance(value, (Opaque, Float)) else Float()
    kind = "scan" if name.startswith("cum") else "reduce"
    if name in ("sum", "cumsum", "cumprod", "reduce", "associative_scan") and number.width and number.width < 32:
        number = extend(number, 32, number.signed)
    detail = name if name in ("sum", "cumsum", "max", "min") else "other"
    return Node(kind, (number, *length(number)), number.width or 32, number.signed, frame.span(arguments.node), detail=detail)


def _tile(frame: Frame, name: str, arguments: Arguments) -> Value:
    """An index into a tile."""
    return variable(Var(name, Origin.ARANGE, 32, 0, MAX_TILE - 1, "constexpr", frame.span(arguments.node)))


def _full(frame: Frame, name: str, arguments: Arguments) -> Value:
    place = 1 if name in ("zeros", "zeros_like", "empty") else 2
    dtype = arguments.get(place, "dtype")
    value = arguments.get(1, "value") if name in ("full", "full_like") else const(0)
    if name.endswith("_like"):
        like = arguments.get(0, "input")
        number = as_node(like) if like is not None else None
        return extend(const(0), number.width or 32) if number is not None else Float()
    if isinstance(dtype, Plain) and isinstance(dtype.value, str):
        dtype = types.named(dtype.value)
    number = as_node(value) if value is not None else None
    if isinstance(dtype, DType) and dtype.kind in ("int", "uint") and number is not None:
        return extend(number, dtype.bits, dtype.kind == "int", frame.span(arguments.node), explicit=dtype.bits == 64)
    return Float()


def _cast(frame: Frame, name: str, arguments: Arguments) -> Value:
    value, dtype = arguments.get(0, "input"), arguments.get(1, "dtype")
    return (
        cast(frame, value, dtype, arguments.node)
        if value is not None and dtype is not None
        else Opaque("tl.cast without arguments")
    )


def _abs(frame: Frame, name: str, arguments: Arguments) -> Value:
    value = arguments.get(0, "x")
    number = as_node(value) if value is not None else None
    return unary("abs", number, frame.span(arguments.node)) if number is not None else Float()


def _swizzle(frame: Frame, name: str, arguments: Arguments) -> Value:
    row, col = arguments.get(0, "i"), arguments.get(1, "j")
    return Tuple((_plain(row or Opaque(name)), _plain(col or Opaque(name))))


def _number(frame: Frame, name: str, arguments: Arguments) -> Value:
    """An integer of which nothing is known, and which no address should be made of: random bits, clocks, lanes."""
    return variable(Var(name, Origin.UNKNOWN, 32, 0, MAX_COUNT, "type", frame.span(arguments.node), reason=f"tl.{name}"))


def _logical(frame: Frame, name: str, arguments: Arguments) -> Value:
    first, second = _pair(arguments)
    if first is None or second is None:
        return first or Opaque(name)
    return operate(frame, "and" if "and" in name else "or", first, second, arguments.node)


def _join(frame: Frame, name: str, arguments: Arguments) -> Value:
    first, second = arguments.get(0, "a"), arguments.get(1, "b")
    return merge(first, second) if first is not None and second is not None else Opaque(name)


def _split(frame: Frame, name: str, arguments: Arguments) -> Value:
    value = arguments.get(0, "a") or Opaque(name)
    return Tuple((value, value))


def _range(frame: Frame, name: str, arguments: Arguments) -> Value:
    return Tuple(tuple(arguments.by_place))


def _python_name(frame: Frame, name: str, arguments: Arguments) -> Value:
    return arguments.get(0, "value") or Opaque(name)


def _next_power(frame: Frame, name: str, arguments: Arguments) -> Value:
    return constexpr("next_power_of_2", frame.span(arguments.node))


def _pointer_type(frame: Frame, name: str, arguments: Arguments) -> Value:
    element = arguments.get(0, "element_ty")
    return DType("pointer", 64, element if isinstance(element, DType) else DType())


_Handler = Callable[[Frame, str, "Arguments"], Value]
_HANDLERS: dict[str, _Handler] = {
    **dict.fromkeys(("program_id", "num_programs"), _grid),
    **dict.fromkeys(("load", "load_tensor_descriptor"), _load),
    **dict.fromkeys(("store", *(f"atomic_{op}" for op in ["add", "max", "min", "and", "or", "xor", "xchg", "cas"])), _store),
    **dict.fromkeys(("buffer_load", "buffer_store", "buffer_load_to_shared", "buffer_atomic_add"), _buffer),
    **dict.fromkeys(("make_block_ptr", "make_tensor_descriptor", "_experimental_make_tensor_descriptor"), _block),
    **dict.fromkeys(("minimum", "maximum", "min", "max"), _min_max),
    **dict.fromkeys(("sum", "cumsum", "cumprod", "xor_sum", "reduce", "associative_scan", "reduce_or"), _reduce),
    **dict.fromkeys(("argmax", "argmin", "argsort", "histogram", "lane_id", "globaltimer", "smid"), _tile),
    **dict.fromkeys(("zeros", "full", "zeros_like", "full_like", "empty"), _full),
    **dict.fromkeys(("randint", "randint4x", "philox", "umulhi", "clock", "inline_asm_elementwise"), _number),
    **dict.fromkeys(("logical_and", "logical_or"), _logical),
    **dict.fromkeys(("join", "interleave", "cat"), _join),
    "load_shared_relaxed": shared,
    **dict.fromkeys(("global_load_to_shared", "async_copy_global_to_shared", "async_load_to_shared"), _to_shared),
    "pointer_type": _pointer_type,
    "arange": _arange,
    "advance": _advance,
    "cdiv": _cdiv,
    "clamp": _clamp,
    "where": _where,
    "cast": _cast,
    "abs": _abs,
    "swizzle2d": _swizzle,
    "split": _split,
    "range": _range,
    "static_range": _range,
    "constexpr": _python_name,
    "next_power_of_2": _next_power,
    "bitcast": _cast,
}
