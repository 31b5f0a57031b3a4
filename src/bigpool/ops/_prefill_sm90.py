"""Prefill attention on Hopper: when its own kernel takes a call, its launch configuration, and the launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from ..reference_logits import LOG2_E
from ..tuning import DeviceProps, cdiv, pick_tiles_per_page
from ._prefill_plan import VALUE_TILE
from ._tma import fits_tma, tile_descriptor, tma_descriptor
from ._verify_sm90 import has_gluon

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
    head_dim: int, group: int, page_size: int, int8: bool, causal: bool, window: int, softcap: float, fp8: bool = False
) -> PrefillSm90Shape | None:
    """The launch configuration; None if tiles cannot be copied from such pages. Chosen by times on an H200, but of fp8."""
    if fp8:
        # Tiles and pages are those of scratch.
        stages = (3, 4) if head_dim == 256 else (4, 4)
        tiles_per_page = pick_tiles_per_page(page_size, VALUE_TILE)
        return PrefillSm90Shape(
            head_dim, group, page_size, VALUE_TILE, VALUE_TILE, tiles_per_page, *stages, int8, causal, window, softcap
        )
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


def shape_of(props: DeviceProps, call: Call) -> PrefillSm90Shape | None:
    """The launch configuration of a call whose cache is in q's dtype; None if no Hopper kernel takes it."""
    head_dim, int8, fp8 = call.q.shape[2], call.qk == "int8", call.pv == "fp8"
    if not (props.sm == 90 and not props.interpreted and has_gluon()):
        return None
    if call.qk == "kept" or call.sinks is not None or call.num_sink_tokens or call.softmax_scale <= 0:
        return None
    if call.q.dtype not in (torch.bfloat16, torch.float16) or head_dim not in (INT8_HEAD_DIMS if int8 else HEAD_DIMS):
        return None
    if fp8 and not int8:
        return None
    if not (len(call.k_pages) and (fp8 or fits_tma(call.v_pages)) and (int8 or fits_tma(call.k_pages))):
        return None
    group, page_size = call.q.shape[1] // call.k_pages.shape[2], call.k_pages.shape[1]
    return prefill_shape_sm90(head_dim, group, page_size, int8, call.causal, call.window_size, call.softcap, fp8)


def launch(call: Call, shape: PrefillSm90Shape) -> None:
    """Launches a call of `shape_of`, after the passes over its keys and values."""
    from ..kernels import prefill_fp8_sm90, prefill_sm90

    num_kv_heads, in_page = call.k_pages.shape[2], shape.tiles_per_page != 0
    grid = cdiv(call.max_seqlen_q * shape.group, ROWS), num_kv_heads, len(call.block_table)
    if shape.int8:
        assert call.codes is not None
        # Scratch is one page for all.
        keys, scales, means = tma_descriptor(call.codes.unsqueeze(0), shape.tile, whole_rows=True), call.scales, call.means
    if call.pv == "fp8":
        assert call.value_codes is not None
        prefill_fp8_sm90.prefill_fp8_sm90_kernel[grid](
            call.q, keys, tile_descriptor(call.value_codes.view(torch.float8_e4m3fn)), call.out, call.lse, *call.lengths[1:],
            scales, means, call.value_scales, call.softmax_scale * LOG2_E, call.max_seq_len, call.max_keys,
            *call.q.stride()[:2], *call.out.stride()[:2], CFG=shape, num_warps=4,
        )  # fmt: skip
        return
    slots = shape.tile if in_page else shape.box
    values = tma_descriptor(call.v_pages, slots, whole_rows=in_page)
    if not shape.int8:
        # Scales and means are not read: lse stands for pointers.
        keys, scales, means = tma_descriptor(call.k_pages, slots, whole_rows=in_page, padding="nan"), call.lse, call.lse
    prefill_sm90.prefill_sm90_kernel[grid](
        call.q, keys, values, call.out, call.lse, *call.lengths, scales, means,
        call.softmax_scale * LOG2_E, call.max_seq_len, call.max_keys, *call.q.stride()[:2],
        *call.out.stride()[:2], call.block_table.stride(0), CFG=shape, num_warps=4,
    )  # fmt: skip
