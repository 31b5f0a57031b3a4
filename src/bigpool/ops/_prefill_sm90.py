"""Prefill attention on Hopper: when its own kernel takes a call, its launch configuration, and the launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from .. import reference_prefill
from ..tuning import DeviceProps, cdiv
from ._verify_sm90 import TMA_ALIGNMENT, has_gluon

if TYPE_CHECKING:
    from ._prefill_launch import Call

HEAD_DIMS, INT8_HEAD_DIMS, ROWS = (64, 128, 256), (128, 256), 128
# Rows of a box that TMA spreads over the banks as the matrix units read them.
MIN_BOX = 8


@dataclass(frozen=True)
class PrefillSm90Shape:
    """What the kernel is compiled for. `tiles_per_page` 0: tiles of `tile` keys cross pages, and are copied in boxes of `box`
    keys; else they end at page ends. `k_stages`, `v_stages`: tiles of K and of V in shared memory."""

    head_dim: int
    group: int
    page_size: int
    tile: int
    box: int
    tiles_per_page: int
    k_stages: int
    v_stages: int
    int8: bool
    causal: bool
    window: int
    softcap: float


@cache
def prefill_shape_sm90(
    head_dim: int, group: int, page_size: int, int8: bool, causal: bool, window: int, softcap: float
) -> PrefillSm90Shape | None:
    """The launch configuration; None if tiles cannot be copied from such pages. Chosen by times on an H200."""
    tile = 64 if head_dim == 256 else 128
    box = min(page_size & -page_size, tile)
    # int8 scores are cheap enough for the lanes past the end of a page to tell.
    in_page = page_size % tile == 0 or (page_size >= 4 * tile and not (int8 and box >= 16))
    if not in_page and box < MIN_BOX:
        return None
    stages = (2, 4) if int8 else (3, 2)
    if head_dim < 256:
        stages = (3, 4) if int8 else (3, 3)
    pages = (tile, cdiv(page_size, tile)) if in_page else (box, 0)
    return PrefillSm90Shape(head_dim, group, page_size, tile, *pages, *stages, int8, causal, window, softcap)


def shape_of(props: DeviceProps, call: Call, is_plain: bool) -> PrefillSm90Shape | None:
    """The launch configuration of a call; None if the Hopper kernel does not take it."""
    head_dim, int8 = call.q.shape[2], call.qk == "int8"
    if not (props.sm == 90 and not props.interpreted and has_gluon() and is_plain and call.pv == "exact"):
        return None
    if call.qk == "kept" or call.sinks is not None or call.num_sink_tokens or call.softmax_scale <= 0:
        return None
    if call.q.dtype not in (torch.bfloat16, torch.float16) or head_dim not in (INT8_HEAD_DIMS if int8 else HEAD_DIMS):
        return None
    if not (len(call.k_pages) and _fits_tma(call.v_pages) and (int8 or _fits_tma(call.k_pages))):
        return None
    group, page_size = call.q.shape[1] // call.k_pages.shape[2], call.k_pages.shape[1]
    return prefill_shape_sm90(head_dim, group, page_size, int8, call.causal, call.window_size, call.softcap)


def _fits_tma(pages: torch.Tensor) -> bool:
    aligned = (pages.stride(axis) * pages.element_size() % TMA_ALIGNMENT == 0 for axis in range(3) if pages.shape[axis] > 1)
    return pages.data_ptr() % TMA_ALIGNMENT == 0 and all(aligned)


def launch(call: Call, shape: PrefillSm90Shape) -> None:
    """Launches a call of `shape_of`, after the passes over its keys."""
    from ..kernels import prefill_sm90

    num_kv_heads = call.k_pages.shape[2]
    keys, scales, means = _descriptor(call.k_pages, shape, "nan"), call.lse, call.lse
    if shape.int8:
        assert call.codes is not None
        assert call.scales is not None
        assert call.means is not None
        keys, scales, means = _descriptor(call.codes.unsqueeze(0), shape, "zero"), call.scales, call.means
    prefill_sm90.prefill_sm90_kernel[(cdiv(call.max_seqlen_q * shape.group, ROWS), num_kv_heads, len(call.block_table))](
        call.q, keys, _descriptor(call.v_pages, shape, "zero"), call.out, call.lse, *call.lengths, scales, means,
        call.softmax_scale * reference_prefill.LOG2_E, call.max_seq_len, call.max_keys, *call.q.stride()[:2],
        *call.out.stride()[:2], call.block_table.stride(0), CFG=shape, num_warps=4,
    )  # fmt: skip


def _descriptor(pages: torch.Tensor, shape: PrefillSm90Shape, padding: str) -> Any:
    """A TMA descriptor [page, kv head, part of a row, slot, column] whose box is a tile, or 128 bytes of a small page's rows."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    num_pages, page_size, num_kv_heads, cols = pages.shape
    width = 128 // pages.element_size()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * pages.element_size(), rank=5)
    whole = shape.tiles_per_page != 0 or pages.element_size() == 1
    box = [1, 1, cols // width, shape.tile, width] if whole else [1, 1, 1, shape.box, width]
    # The stride of an axis of one is never used, and need not be a multiple of 16 bytes.
    page, slot, head = (stride if size > 1 else width for stride, size in zip(pages.stride()[:3], pages.shape[:3], strict=True))
    return TensorDescriptor(
        pages, [num_pages, num_kv_heads, cols // width, page_size, width], [page, head, width, slot, 1], box, layout, padding
    )
