"""Verify attention on Hopper: when its own kernel takes a call, and the launch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from .. import formats
from ..reference_logits import LOG2_E
from ..tuning import PART_EXTRA, cdiv
from ..tuning_sm90 import TRITON_VERSIONS, Sm90Plan, Sm90Shape, plan_sm90, sm90_supports
from ._tma import fits_tma, tma_descriptor

if TYPE_CHECKING:
    from ..tuning import DeviceProps, VerifySpec
    from ._verify_launch import Call


@cache
def has_gluon() -> bool:
    """Whether the installed Triton is one that the kernel was run with."""
    import triton

    major, minor = (int(part) for part in triton.__version__.split(".")[:2])
    return (major, minor) in TRITON_VERSIONS


def takes(props: DeviceProps, spec: VerifySpec, call: Call) -> bool:
    """Whether a Hopper kernel has this call."""
    q, k, v = call.q, call.k_pages, call.v_pages
    rows, page_size = call.max_seqlen_q * (q.shape[1] // k.shape[2]), k.shape[1]
    supported = sm90_supports(props, spec, itemsize=q.element_size(), head_dim=q.shape[2], rows=rows, page_size=page_size)
    return supported and has_gluon() and len(k) > 0 and fits_tma(k) and fits_tma(v)


def launch(props: DeviceProps, spec: VerifySpec, call: Call) -> None:
    """Plans and launches a call that `takes`; 8-bit float caches come as their bytes."""
    from ..kernels import merge_sm90, verify_sm90, verify_ws_sm90

    q, k, v, out, lse = call.q, call.k_pages, call.v_pages, call.out, call.lse
    num_reqs, (num_tokens, num_q_heads, head_dim) = len(call.block_table), q.shape
    num_pages, page_size, num_kv_heads, _ = k.shape
    group = num_q_heads // num_kv_heads
    plan = plan_sm90(
        props, kv_format=spec.kv_format, head_dim=head_dim, rows=call.max_seqlen_q * group, num_reqs=num_reqs,
        num_kv_heads=num_kv_heads, page_size=page_size, max_seq_len=call.max_seq_len, num_splits=call.num_splits or None,
    )  # fmt: skip
    splits = plan.num_splits
    if call.scratch is not None and not call.num_splits:
        rows = num_reqs * spec.longest if spec.longest else num_tokens
        splits = max(min(splits, _splits_that_fit(call.scratch, rows * num_q_heads * (head_dim + PART_EXTRA))), 1)
    dest, dest_strides = out, (*out.stride()[:2], 0)
    if splits > 1:
        dest = call.parts(splits, spec.longest)
        dest_strides = dest.stride()[:3]
    if spec.kv_format == "int4":
        q = rotate_queries(q)
    k_scale, v_scale = (_given(scale, spec, lse) for scale in (call.k_scale, call.v_scale))
    compiled_for = _shape(spec.kv_format, spec.scales, head_dim, group, page_size, replace(plan, num_splits=0), spec.longest)
    kernel = verify_ws_sm90.verify_partial_ws_sm90_kernel if plan.specialised else verify_sm90.verify_partial_sm90_kernel
    kernel[(num_reqs, splits, num_kv_heads)](
        q, _descriptor(k, plan), _descriptor(v, plan), k_scale, v_scale, dest, lse, *call.lengths,
        call.softmax_scale * LOG2_E, call.block_table.shape[1] - 1, call.max_seq_len, num_pages, 0,
        *q.stride()[:2], *_scale_strides(k_scale, spec), *_scale_strides(v_scale, spec), *dest_strides, lse.stride(0),
        call.block_table.stride(0), CFG=compiled_for, num_warps=plan.num_warps,
    )  # fmt: skip
    if splits > 1:
        block_d = min(head_dim, 64)
        merge_sm90.verify_merge_sm90_kernel[(num_reqs, call.max_seqlen_q * (head_dim // block_d), num_q_heads)](
            dest, out, lse, call.cu_seqlens_q, splits, *dest_strides, *out.stride()[:2], lse.stride(0),
            HEAD_DIM=head_dim, BLOCK_D=block_d, SPLIT_TILE=32 if splits <= 33 else 64, LONGEST=spec.longest, launch_pdl=True,
        )  # fmt: skip


@cache
def _shape(kv_format: str, scales: str, head_dim: int, group: int, page_size: int, plan: Sm90Plan, longest: int = 0) -> Sm90Shape:
    layouts = (None, None)
    if kv_format != "plain" and not plan.specialised:
        layouts = (_k_layout(plan.num_warps), _v_layout(plan.num_warps, kv_format == "int4"))
    return Sm90Shape(
        kv_format, scales, head_dim, group, page_size, plan.tiles_per_page, plan.tile, plan.rows, plan.stages, *layouts,
        plan.pages_per_tile, plan.buffers, decode_regs=plan.decode_regs, longest=longest,
    )  # fmt: skip


def _k_layout(warps: int) -> Any:
    """How threads hold [16 * warps keys, 128 columns] of K: 16 bytes twice of two keys each."""
    from triton.experimental.gluon.language import DistributedLinearLayout

    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]]
    lanes = [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]]
    return DistributedLinearLayout(registers, lanes, [[16 << i, 0] for i in range(warps.bit_length() - 1)], [], [16 * warps, 128])


def _v_layout(warps: int, is_int4: bool) -> Any:
    """How threads hold 64 keys of V: 4 bytes of key pairs. 4 warps cover 128 columns; 8 cover 256, or 128 and their nibbles."""
    from triton.experimental.gluon.language import DistributedLinearLayout

    registers = [[0, 1], [0, 2], [1, 0], [8, 0], [16, 0], [32, 0]]
    lanes = [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]]
    by_warp = [[0, 32], [0, 64]]
    if warps == 4:
        return DistributedLinearLayout(registers, lanes, by_warp, [], [64, 128])
    if not is_int4:
        return DistributedLinearLayout(registers, lanes, [*by_warp, [0, 128]], [], [64, 256])
    registers, lanes, by_warp = ([[*basis, 0] for basis in bases] for bases in (registers, lanes, by_warp))
    return DistributedLinearLayout(registers, lanes, [*by_warp, [0, 0, 1]], [], [64, 128, 2])


def _descriptor(pages: torch.Tensor, plan: Sm90Plan) -> Any:
    """Boxes of a tile, or of 128 bytes of a small page's rows."""
    in_page = plan.pages_per_tile == 1
    return tma_descriptor(pages, plan.tile if in_page else pages.shape[1], whole_rows=in_page)


def _given(scale: torch.Tensor | None, spec: VerifySpec, unread: torch.Tensor) -> torch.Tensor:
    """A scale that the kernel may read: 1 where K or V alone has one; where neither has, nothing is read."""
    if scale is not None:
        return scale
    return torch.ones(1, device=unread.device) if spec.scales else unread


def _scale_strides(scale: torch.Tensor, spec: VerifySpec) -> tuple[int, int, int]:
    if spec.scales == "token_head":
        return scale.stride(0), scale.stride(1), scale.stride(2)
    return 0, 0, scale.stride(0) if spec.scales == "head" and scale.numel() > 1 else 0


def _splits_that_fit(scratch: torch.Tensor, floats: int) -> int:
    return scratch.numel() // floats if scratch.dim() == 1 else scratch.shape[2]


def rotate_queries(q: torch.Tensor) -> torch.Tensor:
    """`formats.rotate` in one launch: q [num_tokens, num_q_heads, head_dim] on a CUDA device, rotated, fp32."""
    from ..kernels import rotate

    num_tokens, num_heads, head_dim = q.shape
    block = formats.rotation_block(head_dim)
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    rotate.rotate_rows_kernel[(num_tokens, head_dim // block, cdiv(num_heads, 4))](
        q, out, num_heads, *q.stride()[:2], *out.stride()[:2],
        HEAD_DIM=head_dim, BLOCK=block, STAGES=block.bit_length() - 1, HEADS=4,
    )  # fmt: skip
    return out
