"""KVCache: the tensors of a paged cache, checked once, and views of the one-tensor layouts that engines use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from . import formats
from ._check import Contract, dtype_name, usable_device
from .errors import ArgumentError
from .formats import SCALE_BYTES, KVFormat

PAGE_AXES = {"NHD": "page_size num_kv_heads", "HND": "num_kv_heads page_size"}
ONE_PAGE = 2**31


@dataclass(frozen=True, eq=False)
class KVCache:
    """A paged cache of one layer: K, V and their scales. Holds tensors, owns nothing: any of them may be views.

    `verify_attention(q, *cache.kv, block_table, seq_lens, cu_seqlens_q, max_seqlen_q=8, **cache.options)` reads it,
    `write_kv(k, v, cache, slot_mapping)` writes it.

    Attributes:
        k, v: NHD [num_pages, page_size, num_kv_heads, row_elements] or HND [num_pages, num_kv_heads, page_size, row_elements];
            row_elements is head_dim, for int4 head_dim / 2. Any strides but 1 in the last axis, which may differ between the
            two; one page of one head spans fewer than 2^31 elements.
        k_scale, v_scale: None, or float32 on the same device: one element (fp8), [num_kv_heads] (fp8), or the axes of `k`
            without the last, in any strides (fp8, int8, int4). docs/formats.md has the formats.
        kv_layout: "NHD" or "HND".

    Raises:
        ArgumentError: listing every fault.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    kv_layout: str = "NHD"
    # Asked once: a graph that is being compiled cannot look at storages.
    _inline: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        contract = Contract("KVCache")
        _check_layout(contract, self.kv_layout)
        if not contract.faults:
            self._check(contract)
        contract.finish()
        object.__setattr__(self, "_inline", self.k_scale is not None and _share_storage(self.k, self.k_scale))

    def _check(self, contract: Contract) -> None:
        axes = f"num_pages {PAGE_AXES[self.kv_layout]}"
        dtypes = tuple(dict.fromkeys(kv_format.dtype for kv_format in formats.ALL))
        ok = contract.tensor("k", self.k, f"{axes} row_elements", dtypes, "see docs/formats.md", written=True)
        if not ok:
            return
        same = "K and V share a format and a shape"
        ok = contract.tensor("v", self.v, f"{axes} row_elements", (self.k.dtype,), same, device=self.k.device, written=True)
        kinds = []
        given: tuple[tuple[str, Any], ...] = ("k_scale", self.k_scale), ("v_scale", self.v_scale)
        for name, scale in given:
            if scale is not None and not isinstance(scale, torch.Tensor):
                contract.fault(
                    name, "None or a float32 tensor", type(scale).__name__, "pass torch.tensor([scale]) beside its cache"
                )
                continue
            try:
                kinds.append(formats.of(self.k.dtype, scale, name).scales)
            except ArgumentError as error:
                contract.faults += error.faults
            else:
                ok &= self._check_scale(contract, name, scale, kinds[-1], axes)
        if len(set(kinds)) > 1 and len(kinds) == 2:
            got = " and ".join(map(repr, kinds))
            contract.fault("v_scale", "scales of the same kind as k_scale", got, "K and V share a format")
        if ok and len(kinds) == 2:
            self._check_spans(contract)

    def _check_scale(self, contract: Contract, name: str, scale: torch.Tensor | None, kind: str, axes: str) -> bool:
        if scale is None:
            return True
        device, remedy = self.k.device, "keep scales in float32 beside their cache"
        if kind == "token_head":
            options: dict[str, Any] = {"device": device, "written": True, "any_strides": True}
            return contract.tensor(name, scale, axes, (torch.float32,), remedy, **options)
        if kind == "head":
            return contract.tensor(name, scale, "num_kv_heads", (torch.float32,), remedy, device=device)
        return contract.tensor(name, scale.reshape(1), "1", (torch.float32,), remedy, device=device)

    def _check_spans(self, contract: Contract) -> None:
        slot_axis = self._slot_axis
        contract.require(self.page_size > 0, "k", "page_size 1 or more", "0", "page_size counts the slots of a page")
        contract.require(0 < self.num_pages < 2**31, "k", "num_pages 1..2^31 - 1", f"{self.num_pages}", "page ids are int32")
        for name, tensor in (("k", self.k), ("v", self.v), ("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if tensor is not None and tensor.dim() >= 3:
                row = tensor.shape[3] if tensor.dim() == 4 else 1
                span = max(self.page_size - 1, 0) * tensor.stride(slot_axis) + row
                expected, remedy = "one page of one head within 2^31 elements", "make the slots of a page adjacent"
                contract.require(span < ONE_PAGE, name, expected, f"{span:,}", remedy)

    @property
    def format(self) -> KVFormat:
        return formats.of(self.k.dtype, self.k_scale)

    @property
    def _slot_axis(self) -> int:
        return 1 if self.kv_layout == "NHD" else 2

    @property
    def num_pages(self) -> int:
        return self.k.shape[0]

    @property
    def page_size(self) -> int:
        return self.k.shape[self._slot_axis]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[3 - self._slot_axis]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3] * self.format.packed

    @property
    def inline_scales(self) -> bool:
        """Whether scales lie in the same storage as the data."""
        return self._inline

    @property
    def nbytes(self) -> int:
        """Bytes of K, V and their scales; what lies between the rows of a view is not counted."""
        tensors = (*self.kv, self.k_scale, self.v_scale)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    @property
    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k, self.v

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the attention functions."""
        return {"kv_layout": self.kv_layout, "k_scale": self.k_scale, "v_scale": self.v_scale}

    def nhd(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """(k, v, k_scale, v_scale) with scales per token and head, and rows, in the order page, slot, head."""
        if self.kv_layout == "NHD":
            return self.k, self.v, self.k_scale, self.v_scale
        k_scale, v_scale = (
            scale.transpose(1, 2) if scale is not None and scale.dim() == 3 else scale for scale in (self.k_scale, self.v_scale)
        )
        return self.k.transpose(1, 2), self.v.transpose(1, 2), k_scale, v_scale

    @classmethod
    def empty(
        cls,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        format: str = "bf16",
        scales: str | None = None,
        kv_layout: str = "NHD",
        inline_scales: bool = False,
        device: torch.device | str = "cuda",
    ) -> KVCache:
        """A new cache with a tensor for K and one for V, rows uninitialised; scales of a tensor or of heads are 1.

        Args:
            format: "bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2", "int8" or "int4".
            scales: what a scale stands for: "tensor", "head" or "token_head"; None for the first kind that the format has.
            inline_scales: the fp32 scale follows the data of its row, which has to be a multiple of 4 bytes.

        Raises:
            ArgumentError: a format, size or layout out of contract.
        """
        kv_format = formats.named(format, scales)
        contract = Contract("KVCache.empty")
        counts = {"num_pages": num_pages, "page_size": page_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, count in counts.items():
            contract.require(_is_count(count), name, "an int of 1 or more", repr(count), "see help(bigpool.KVCache.empty)")
        _check_layout(contract, kv_layout)
        contract.finish()
        _check_row(contract, kv_format, head_dim, inline_scales)
        contract.finish()
        device = usable_device("KVCache.empty", device)
        page = (page_size, num_kv_heads) if kv_layout == "NHD" else (num_kv_heads, page_size)
        row = kv_format.row_bytes(head_dim) // kv_format.dtype.itemsize if inline_scales else kv_format.row_elements(head_dim)
        k, v = (torch.empty((num_pages, *page, row), dtype=kv_format.dtype, device=device) for _ in range(2))
        if inline_scales:
            (k, k_words), (v, v_words) = (_split_row(rows, kv_format, head_dim) for rows in (k, v))
            return cls(k, v, k_words, v_words, kv_layout)
        own = [_own_scales(kv_format, (num_pages, *page), num_kv_heads, device) for _ in range(2)]
        return cls(k, v, own[0], own[1], kv_layout)

    @classmethod
    def from_tensor(
        cls,
        tensor: torch.Tensor,
        *,
        format: str,
        head_dim: int,
        kv_layout: str,
        scales: str | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> KVCache:
        """Views of a tensor that holds K and V, as vLLM allocates it; nothing is copied.

        Args:
            tensor: [num_pages, num_kv_heads, page_size, 2 * row] (HND; NHD with the page axes swapped): in a slot K, its scale,
                V, its scale. Or, older, [num_pages, 2, page_size, num_kv_heads, row] (NHD) and [2, num_pages, ...]: K and V
                one after another; the axis of two is the second one if both could be. `row` is data, then the fp32 scale where
                scales are per token and head, then padding. Any 1-byte dtype for formats of 1 byte. Any strides.
            format, scales: see `empty`.
            k_scale, v_scale: scales of their own, for formats that take them; then no scale is looked for in the rows.

        Raises:
            ArgumentError: a shape, dtype or stride that has no such rows.
        """
        kv_format = formats.named(format, scales)
        contract = Contract("KVCache.from_tensor")
        _check_layout(contract, kv_layout)
        contract.require(_is_count(head_dim), "head_dim", "an int of 1 or more", repr(head_dim), "pass the values of a row of K")
        contract.finish()
        got = type(tensor).__name__
        contract.require(isinstance(tensor, torch.Tensor), "tensor", "a tensor", got, "pass what the engine allocated")
        contract.finish()
        inline = kv_format.scales == "token_head" and k_scale is None
        _check_row(contract, kv_format, head_dim, inline)
        rows = _halves(contract, tensor, kv_format, head_dim, inline)
        contract.finish()
        if inline:
            (k, k_scale), (v, v_scale) = (_split_row(half, kv_format, head_dim) for half in rows)
        else:
            k, v = (half[..., : kv_format.row_elements(head_dim)] for half in rows)
        return cls(k, v, k_scale, v_scale, kv_layout)


def _share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and not one.is_meta


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_layout(contract: Contract, kv_layout: str) -> None:
    if kv_layout not in PAGE_AXES:
        contract.fault("kv_layout", "'NHD' or 'HND'", repr(kv_layout), "name the order of the axes of a page")


def _check_row(contract: Contract, kv_format: KVFormat, head_dim: int, inline: bool) -> None:
    name, packed = kv_format.name, kv_format.packed
    remedy = "pad the heads"
    if head_dim % packed:
        contract.fault("head_dim", f"a multiple of {packed} for {name}", str(head_dim), remedy)
    elif inline and kv_format.scales != "token_head":
        kind = f"{name} with scales {kv_format.scales!r}"
        contract.fault("inline_scales", "scales per token and head", kind, "leave it out, or pass scales='token_head'")
    elif inline and kv_format.row_elements(head_dim) % SCALE_BYTES:
        expected = f"a multiple of {SCALE_BYTES * packed} for {name} with inline scales, which are fp32 and aligned"
        contract.fault("head_dim", expected, str(head_dim), remedy)


def _halves(
    contract: Contract, tensor: torch.Tensor, kv_format: KVFormat, head_dim: int, inline: bool
) -> tuple[torch.Tensor, ...]:
    """K and V rows of a one-tensor layout, in the dtype of the format."""
    dtype = kv_format.dtype
    if dtype.itemsize == 1 == tensor.element_size():
        tensor = tensor.view(dtype)
    if tensor.dtype != dtype:
        contract.fault("tensor", dtype_name(dtype), dtype_name(tensor.dtype), "pass the tensor that the cache is in")
    got = str(list(tensor.shape))
    if tensor.dim() == 5 and 2 in tensor.shape[:2]:
        halves, row = tensor.unbind(1 if tensor.shape[1] == 2 else 0), tensor.shape[-1]
    elif tensor.dim() == 4 and tensor.shape[-1] % 2 == 0:
        halves, row = tensor.chunk(2, -1), tensor.shape[-1] // 2
    else:
        expected = "4 axes, the last one of K and V, or 5 axes with one of 2 among the first two"
        contract.fault("tensor", expected, got, "see help(bigpool.KVCache.from_tensor)")
        return ()
    need = kv_format.row_elements(head_dim) + (SCALE_BYTES if inline else 0)
    what = "the data and a scale" if inline else "the data"
    contract.require(row >= need, "tensor", f"rows of {need} or more elements for {what}", f"{row} in {got}", "check head_dim")
    if inline:
        places = (*tensor.stride()[:-1], tensor.storage_offset(), *((row,) if tensor.dim() == 4 else ()))
        aligned = all(place % SCALE_BYTES == 0 for place in places) and tensor.stride(-1) == 1
        expected = "rows that begin at multiples of 4 bytes, which fp32 scales need"
        contract.require(aligned, "tensor", expected, f"strides {list(tensor.stride())}", "pad the rows")
    return tuple(halves)


def _split_row(rows: torch.Tensor, kv_format: KVFormat, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and fp32 scales of rows that hold both; views."""
    data = kv_format.row_elements(head_dim)
    scales = rows[..., data : data + SCALE_BYTES].view(torch.float32)
    return rows[..., :data], scales.squeeze(-1)


def _own_scales(kv_format: KVFormat, axes: tuple[int, ...], num_kv_heads: int, device: torch.device | str) -> torch.Tensor | None:
    if kv_format.scales == "none":
        return None
    if kv_format.scales == "token_head":
        return torch.empty(axes, dtype=torch.float32, device=device)
    return torch.ones(1 if kv_format.scales == "tensor" else num_kv_heads, dtype=torch.float32, device=device)
