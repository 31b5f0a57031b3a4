"""Paged caches as Hopper's TMA copies them: what it can address, and its descriptors."""

from __future__ import annotations

from typing import Any

import torch

ALIGNMENT = 16


def fits_tma(pages: torch.Tensor) -> bool:
    """Whether base and strides of pages [num_pages, page_size, num_kv_heads, columns] are aligned as TMA wants them."""
    aligned = (pages.stride(axis) * pages.element_size() % ALIGNMENT == 0 for axis in range(3) if pages.shape[axis] > 1)
    return pages.data_ptr() % ALIGNMENT == 0 and all(aligned)


def tma_descriptor(pages: torch.Tensor, slots: int, *, whole_rows: bool, padding: str = "zero") -> Any:
    """A descriptor [page, kv head, part of a row, slot, column] of pages that `fits_tma`, for boxes of `slots` rows of one head,
    whole or 128 bytes of each. What a box has outside the pages reads as `padding`, "zero" or "nan"."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    num_pages, page_size, num_kv_heads, cols = pages.shape
    itemsize = pages.element_size()
    width = min(128 // itemsize, cols)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=width * itemsize, element_bitwidth=8 * itemsize, rank=5)
    sizes = [num_pages, num_kv_heads, cols // width, page_size, width]
    # The stride of an axis of one is never used, and need not be a multiple of 16 bytes.
    page, slot, head = (stride if size > 1 else width for stride, size in zip(pages.stride()[:3], pages.shape[:3], strict=True))
    box = [1, 1, cols // width if whole_rows else 1, slots, width]
    return TensorDescriptor(pages, sizes, [page, head, width, slot, 1], box, layout, padding)


def tile_descriptor(tiles: torch.Tensor) -> Any:
    """A descriptor of contiguous tiles [num_tiles, num_kv_heads, rows, columns] for boxes of one tile of one head."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    rows, cols = tiles.shape[2:]
    itemsize = tiles.element_size()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=cols * itemsize, element_bitwidth=8 * itemsize, rank=4)
    return TensorDescriptor(tiles, list(tiles.shape), list(tiles.stride()), [1, 1, rows, cols], layout)
