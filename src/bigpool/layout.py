"""KV layouts as plain integers: axes, strides, bytes, and the first index that fails 32 bits.

Nothing here needs torch: a layout can be judged before anything is allocated, on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

from .errors import ArgumentError

INT32_MAX = 2**31 - 1
SCALE_BYTES = 4

Form = Literal["separate", "summed"]
Unit = Literal["element", "byte"]

# Bytes of a stored element, and how many values it packs. Kernels count offsets in stored elements.
DTYPES: Mapping[str, tuple[int, int]] = {
    "bf16": (2, 1),
    "fp16": (2, 1),
    "fp32": (4, 1),
    "fp8_e4m3": (1, 1),
    "fp8_e5m2": (1, 1),
    "int8": (1, 1),
    "int4": (1, 2),
}
_DTYPE_HINTS: Mapping[str, str] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "fp8": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "e4m3": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "e5m2": "fp8_e5m2",
}


def fault(name: str, expected: str, got: object, remedy: str) -> str:
    """A broken contract in the error grammar."""
    return f"{name}: expected {expected}, got {got!r}; {remedy}"


def first_bad_index(stride: int, span: int = 1, limit: int = INT32_MAX) -> int:
    """The smallest index `i >= 0` for which `i * stride + span - 1 > limit`.

    `span` is the number of elements that a kernel can add to the product before it leaves 32 bits: 1 when each
    product is added to the pointer on its own, the length of a row when the column is added first.

    Raises:
        ArgumentError: `stride` or `span` is below 1.
    """
    _require_counts("first_bad_index", 1, stride=stride, span=span)
    return max(0, (limit - (span - 1)) // stride + 1)


@dataclass(frozen=True)
class Wall:
    """The first element that 32-bit offsets cannot reach, ordered by page, then slot, head and dim.

    Attributes:
        form: "separate" when each product is added to the pointer on its own (each wraps on its own), "summed" when the
            offsets are added up in int32 first.
        unit: what the kernel counts in, stored elements or bytes.
        page, slot, head, dim: where the element is. `dim` counts stored elements of a row; where bytes are counted and
            scales are inline, the dim after the last one is the scale.
        token: `page * page_size + slot`.
        element: its exact offset in elements, from the first element of the K (or V) view.
        byte: its exact offset in bytes.
    """

    form: Form
    unit: Unit
    page: int
    slot: int
    head: int
    dim: int
    token: int
    element: int
    byte: int

    @property
    def num_pages(self) -> int:
        """Pages of the smallest pool that holds the element."""
        return self.page + 1


@dataclass(frozen=True)
class KVLayout:
    """How a paged KV cache lies in memory. Strides and offsets are exact integers.

    A row is what one (token, head) stores for K or for V: `head_dim` values, then the fp32 scale if scales are inline,
    then `pad` stored elements that hold nothing. int4 packs two values in a stored element of one byte.

    Args:
        page_size: tokens in a page (any, not only powers of two).
        num_kv_heads: KV heads.
        head_dim: values in a row.
        dtype: "bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2", "int8" or "int4".
        kv_layout: "NHD": a page is `[page_size, num_kv_heads, row]`. "HND": `[num_kv_heads, page_size, row]`.
        interleaved: False, K and V have a pool each. "page" (or True): a page holds K for all its tokens, then V.
            "row": a row of K is followed by the row of V. V is addressed from a pointer of its own in either case.
        pad: stored elements after each row that hold nothing.
        inline_scales: an fp32 scale follows the data of each row (8-bit and 4-bit dtypes).

    Raises:
        ArgumentError: listing every argument that is out of contract. A page of 2^31 bytes or more is: there Triton
            types the page stride as int64, and no product with it wraps.
    """

    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bf16"
    kv_layout: Literal["NHD", "HND"] = "NHD"
    interleaved: bool | Literal["page", "row"] = False
    pad: int = 0
    inline_scales: bool = False

    def __post_init__(self) -> None:
        faults = _own_faults({field.name: getattr(self, field.name) for field in fields(self)})
        if not faults:
            if self.interleaved != "row":
                object.__setattr__(self, "interleaved", "page" if self.interleaved else False)
            faults = _joint_faults(self)
        if faults:
            raise ArgumentError("KVLayout", *faults)

    @property
    def item_bytes(self) -> int:
        """Bytes of a stored element."""
        return DTYPES[self.dtype][0]

    @property
    def data_elements(self) -> int:
        """Stored elements of a row that hold values."""
        return self.head_dim // DTYPES[self.dtype][1]

    @property
    def row_elements(self) -> int:
        """Stored elements of a row: data, inline scale, padding."""
        scale = SCALE_BYTES // self.item_bytes if self.inline_scales else 0
        return self.data_elements + scale + self.pad

    @property
    def _row_step(self) -> int:
        return self.row_elements * (2 if self.interleaved == "row" else 1)

    @property
    def stride_slot(self) -> int:
        """Elements from a token of a page to the next."""
        return self._row_step * (self.num_kv_heads if self.kv_layout == "NHD" else 1)

    @property
    def stride_head(self) -> int:
        """Elements from a head of a token to the next."""
        return self._row_step * (self.page_size if self.kv_layout == "HND" else 1)

    @property
    def stride_page(self) -> int:
        """Elements from a page to the next."""
        return self.page_size * self.num_kv_heads * self.row_elements * (2 if self.interleaved else 1)

    @property
    def v_offset(self) -> int:
        """Elements from K to V of the same token and head; 0 where V has a pool of its own."""
        if self.interleaved == "page":
            return self.stride_page // 2
        return self.row_elements if self.interleaved else 0

    @property
    def axes(self) -> tuple[str, str, str, str]:
        """Names of the axes of `shape` and `strides`."""
        if self.kv_layout == "NHD":
            return ("num_pages", "page_size", "num_kv_heads", "head_dim")
        return ("num_pages", "num_kv_heads", "page_size", "head_dim")

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Strides in elements of a K or V view, in the order of `axes`."""
        if self.kv_layout == "NHD":
            return (self.stride_page, self.stride_slot, self.stride_head, 1)
        return (self.stride_page, self.stride_head, self.stride_slot, 1)

    def shape(self, num_pages: int) -> tuple[int, int, int, int]:
        """Shape of a K or V view of `num_pages` pages, in stored elements and in the order of `axes`."""
        if self.kv_layout == "NHD":
            return (num_pages, self.page_size, self.num_kv_heads, self.data_elements)
        return (num_pages, self.num_kv_heads, self.page_size, self.data_elements)

    @property
    def page_bytes(self) -> int:
        """Bytes from a page to the next: of K alone where V has a pool of its own, else of K and V."""
        return self.stride_page * self.item_bytes

    @property
    def kv_page_bytes(self) -> int:
        """Bytes that one page of one layer costs, K and V."""
        return self.page_bytes * (1 if self.interleaved else 2)

    def pool_bytes(self, num_pages: int, group_size: int = 1) -> int:
        """Bytes of K and V of `num_pages` pages in each of `group_size` layers that share one space of page ids."""
        _require_counts("KVLayout.pool_bytes", 0, num_pages=num_pages)
        _require_counts("KVLayout.pool_bytes", 1, group_size=group_size)
        return num_pages * group_size * self.kv_page_bytes

    def pages_in(self, pool_bytes: int, group_size: int = 1) -> int:
        """Pages that `pool_bytes` bytes hold when `group_size` layers share one space of page ids."""
        _require_counts("KVLayout.pages_in", 0, pool_bytes=pool_bytes)
        _require_counts("KVLayout.pages_in", 1, group_size=group_size)
        return pool_bytes // (group_size * self.kv_page_bytes)

    def offset(self, page: int, slot: int = 0, head: int = 0, dim: int = 0) -> int:
        """Exact offset in elements, from the first element of the K (or V) view."""
        return page * self.stride_page + slot * self.stride_slot + head * self.stride_head + dim

    def max_offset(self, num_pages: int) -> int:
        """The largest element offset of a value in a pool of `num_pages` pages (1 or more)."""
        _require_counts("KVLayout.max_offset", 1, num_pages=num_pages)
        return self.offset(num_pages - 1, self.page_size - 1, self.num_kv_heads - 1, self.data_elements - 1)

    def wall(self, form: Form = "separate", unit: Unit = "element") -> Wall:
        """The first element whose offset leaves signed 32 bits.

        Args:
            form: "separate": `ptr + page * stride_page + slot * stride_slot + ...`, where each product is added to the
                pointer on its own. "summed": `ptr + (page * stride_page + slot * stride_slot + ...)`.
            unit: "element", or "byte" for kernels that compute byte offsets in 32 bits.

        Raises:
            ArgumentError: another form or unit.
        """
        faults = [
            fault(name, f"one of {', '.join(known)}", value, "pass one of them")
            for name, value, known in (("form", form, get_args(Form)), ("unit", unit, get_args(Unit)))
            if value not in known
        ]
        if faults:
            raise ArgumentError("KVLayout.wall", *faults)
        step = 1 if unit == "element" else self.item_bytes
        stride_page, stride_slot, stride_head = (
            stride * step for stride in (self.stride_page, self.stride_slot, self.stride_head)
        )
        row_reach = head_reach = page_reach = 0
        if form == "summed":
            with_scale = unit == "byte" and self.inline_scales
            row_reach = (self.data_elements - 1 + with_scale) * step
            head_reach = (self.num_kv_heads - 1) * stride_head + row_reach
            page_reach = (self.page_size - 1) * stride_slot + head_reach
        page = first_bad_index(stride_page, page_reach + 1)
        rest = INT32_MAX - page * stride_page
        slot = first_bad_index(stride_slot, head_reach + 1, rest)
        rest -= slot * stride_slot
        head = first_bad_index(stride_head, row_reach + 1, rest)
        rest -= head * stride_head
        dim = first_bad_index(step, 1, rest)
        element = self.offset(page, slot, head, dim)
        return Wall(
            form=form,
            unit=unit,
            page=page,
            slot=slot,
            head=head,
            dim=dim,
            token=page * self.page_size + slot,
            element=element,
            byte=element * self.item_bytes,
        )

    def crosses(self, num_pages: int, form: Form = "separate", unit: Unit = "element") -> bool:
        """Whether a pool of `num_pages` pages holds an element that 32-bit offsets cannot reach."""
        _require_counts("KVLayout.crosses", 0, num_pages=num_pages)
        return num_pages > self.wall(form, unit).page


def _is_int(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _require_counts(function: str, minimum: int, **counts: int) -> None:
    faults = [
        fault(name, f"an integer of {minimum} or more", value, f"pass {minimum} or more")
        for name, value in counts.items()
        if not _is_int(value, minimum)
    ]
    if faults:
        raise ArgumentError(function, *faults)


def _own_faults(values: Mapping[str, object]) -> list[str]:
    """What is wrong with each argument of a KVLayout on its own, whatever the types of the values."""
    faults = []
    for name, remedy in (
        ("page_size", "pass the tokens in a page, such as 16"),
        ("num_kv_heads", "pass the KV heads on one device, such as 8"),
        ("head_dim", "pass the values in a row of K, such as 128"),
    ):
        if not _is_int(values[name], 1):
            faults.append(fault(name, "an integer of 1 or more", values[name], remedy))
    dtype = values["dtype"]
    if not (isinstance(dtype, str) and dtype in DTYPES):
        hint = _DTYPE_HINTS.get(str(dtype).removeprefix("torch.").lower(), "one of them")
        faults.append(fault("dtype", f"one of {', '.join(DTYPES)}", dtype, f"pass {hint}"))
    if values["kv_layout"] not in ("NHD", "HND"):
        remedy = "pass NHD for [page_size, num_kv_heads, head_dim] pages, HND for [num_kv_heads, page_size, head_dim]"
        faults.append(fault("kv_layout", "NHD or HND", values["kv_layout"], remedy))
    if values["interleaved"] not in (False, True, "page", "row"):
        remedy = "pass page if a page holds K then V, row if a row of K is followed by the row of V"
        faults.append(fault("interleaved", "page, row or nothing", values["interleaved"], remedy))
    if not _is_int(values["pad"], 0):
        remedy = "pass the stored elements after each row that hold nothing"
        faults.append(fault("pad", "an integer of 0 or more", values["pad"], remedy))
    return faults


def _joint_faults(layout: KVLayout) -> list[str]:
    """What is wrong with arguments together. Each is within its own contract."""
    faults = []
    item_bytes, packed = DTYPES[layout.dtype]
    if layout.head_dim % packed:
        remedy = f"pass {layout.head_dim + 1} and mask the last value"
        faults.append(fault("head_dim", f"a multiple of {packed} for {layout.dtype}", layout.head_dim, remedy))
    elif layout.inline_scales and item_bytes > 1:
        remedy = "leave it out, or pass a dtype that has scales, such as int8"
        faults.append(fault("inline_scales", f"False for {layout.dtype}", layout.inline_scales, remedy))
    elif layout.inline_scales:
        for name, elements in (("head_dim", layout.data_elements), ("pad", layout.pad)):
            if elements % SCALE_BYTES:
                remedy = f"pass a multiple of {SCALE_BYTES * (packed if name == 'head_dim' else 1)}"
                expected = f"a multiple of {SCALE_BYTES} bytes with inline scales, which are fp32 and aligned"
                faults.append(fault(name, expected, getattr(layout, name), remedy))
    if layout.page_bytes > INT32_MAX:
        expected = f"a page of fewer than 2^31 bytes (it has {layout.page_bytes:,})"
        faults.append(fault("page_size", expected, layout.page_size, "pass fewer tokens to a page"))
    return faults
