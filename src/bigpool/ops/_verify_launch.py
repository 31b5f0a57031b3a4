"""Verify attention behind its argument checks: the plan, the launch, the twin, and the torch operator that chooses one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .. import formats, reference
from .._device import device_props
from ..tuning import (
    INT4_BYTES,
    MAX_SEQ_LEN,
    PART_EXTRA,
    VerifyPlan,
    VerifySpec,
    next_power_of_2,
    pick_convert,
    plan_verify,
)
from ..workspace import carve
from . import _verify_sm90

# The names that kernels have for formats; a cache in q's dtype is "plain".
KERNEL_FORMATS = {"int8": "int8", "int4": "int4", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
OUT_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
DETERMINISTIC_SPLIT_TILE = 16


@torch.no_grad()
def launch(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scratch: torch.Tensor | None,
    max_seqlen_q: int,
    num_splits: int,
    softmax_scale: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    causal: bool = True,
    window_size: int = 0,
    num_sink_tokens: int = 0,
    chunk_size: int = 0,
    softcap: float = 0.0,
    batch: bool = False,
    *,
    longest: int = 0,
    kernels: Any = None,
) -> None:
    """Plans and launches; caches and scales are seen as NHD. 0 is None: `num_splits` 0 chooses. `longest`: see VerifySpec.

    `kernels`: a version of bigpool.kernels.verify; what it has no parameter for must be off.
    """
    is_ours = kernels is None
    if kernels is None:
        from ..kernels import verify

        kernels = verify

    num_tokens, num_q_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, _ = k_pages.shape
    num_reqs, max_pages = block_table.shape
    if num_reqs == 0 or num_tokens == 0 or max_seqlen_q == 0:
        return
    max_seq_len = min(max_pages * page_size, MAX_SEQ_LEN)
    kv_format = formats.of(k_pages.dtype, k_scale)
    props, kernel_format = device_props(q.device), KERNEL_FORMATS.get(kv_format.name, "plain")
    spec = VerifySpec(
        causal=causal, window=window_size, sink_tokens=num_sink_tokens if window_size or chunk_size else 0, chunk=chunk_size,
        softcap=softcap, alibi=alibi_slopes is not None, tree_words=0 if tree_mask is None else tree_mask.shape[1],
        kv_format=kernel_format, scales=scales_kind(k_scale, v_scale),
        convert=pick_convert(props, itemsize=q.element_size(), kv_format=kernel_format),
        out_format="" if out_scale is None else OUT_FORMATS[out.dtype], longest=longest,
    )  # fmt: skip
    if kv_format.name in ("fp8_e4m3", "fp8_e5m2"):
        k_pages, v_pages = k_pages.view(torch.uint8), v_pages.view(torch.uint8)
    # What a spec does not say: fixed splits, learned sinks, a table without columns.
    is_bare = is_ours and not batch and sinks is None and max_pages > 0
    if is_bare and _verify_sm90.takes(props, spec, q, k_pages, v_pages, max_seqlen_q):
        _verify_sm90.launch(
            props, spec, q, k_pages, v_pages, block_table, seq_lens, cu_seqlens_q, out, lse, scratch, max_seqlen_q, num_splits,
            softmax_scale, k_scale, v_scale,
        )  # fmt: skip
        return
    plan = plan_verify(
        props, num_reqs=num_reqs, max_seqlen_q=max_seqlen_q, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, itemsize=q.element_size(), page_size=page_size, max_seq_len=max_seq_len, num_splits=num_splits or None,
        kv_bytes=kv_bytes_of(kv_format), batch=batch,
        max_visible=max_visible(max_seqlen_q, window_size, num_sink_tokens, chunk_size, page_size),
        heavy=bool(window_size or chunk_size or softcap or alibi_slopes is not None or tree_mask is not None),
    )  # fmt: skip
    spec = replace(spec, tiles_per_split=plan.tiles_per_split)
    if kv_format.rotates_k:
        q = (_verify_sm90.rotate_queries(q) if q.is_cuda else formats.rotate(q)).to(q.dtype)
    if out_scale is not None:
        out = out.view(torch.uint8)
    config, splits = plan.config, plan.num_splits
    dest, dest_strides = out, (*out.stride()[:2], 0)
    if splits > 1:
        shape = (num_reqs * longest if longest else num_tokens, num_q_heads, splits, head_dim + PART_EXTRA)
        dest = torch.empty(shape, dtype=torch.float32, device=q.device) if scratch is None else carve(scratch, shape)
        dest_strides = dest.stride()[:3]
    extras = _extras(spec, k_scale, v_scale, alibi_slopes, sinks, tree_mask, out_scale)
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    kernels.verify_partial_kernel[(num_reqs, splits * plan.row_tiles, num_kv_heads)](
        q, k_pages, v_pages, dest, lse, block_table, seq_lens, cu_seqlens_q,
        softmax_scale * reference.LOG2_E, num_pages, max_seq_len,
        *q.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3], *dest_strides, lse.stride(0), block_table.stride(0),
        GROUP=num_q_heads // num_kv_heads, HEAD_DIM=head_dim, HEAD_DIM_PAD=plan.head_dim_pad, PAGE_SIZE=page_size,
        TILE=config.tile, TILES_PER_PAGE=plan.tiles_per_page, BLOCK_M=config.block_m, ROW_TILES=plan.row_tiles,
        **_known(kernels.verify_partial_kernel, extras), **options,
    )  # fmt: skip
    if splits > 1:
        _merge(kernels.verify_merge_kernel, plan, spec, dest, out, lse, cu_seqlens_q, max_seqlen_q, out_scale)


def _merge(
    kernel: Any,
    plan: VerifyPlan,
    spec: VerifySpec,
    parts: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    out_scale: torch.Tensor | None,
) -> None:
    splits_pad = min(next_power_of_2(plan.num_splits), 128)
    split_tile = DETERMINISTIC_SPLIT_TILE if plan.tiles_per_split else min(splits_pad, 16)
    extras = {"SPEC": spec} if out_scale is None else {"SPEC": spec, "out_scale_ptr": out_scale}
    kernel[(len(cu_seqlens_q) - 1, max_seqlen_q, out.shape[1])](
        parts, out, lse, cu_seqlens_q, plan.num_splits, *parts.stride()[:3], *out.stride()[:2], lse.stride(0),
        HEAD_DIM=out.shape[2], HEAD_DIM_PAD=next_power_of_2(out.shape[2]), SPLITS_PAD=splits_pad, SPLIT_TILE=split_tile,
        **_known(kernel, extras),
    )  # fmt: skip


def _extras(
    spec: VerifySpec,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    out_scale: torch.Tensor | None,
) -> dict[str, Any]:
    """What a launch passes besides the arguments that every version of the kernel has; nothing that is off."""
    extras: dict[str, Any] = {"SPEC": spec}
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            strides = scale_strides(scale)
            extras |= {f"{name}_ptr": scale}
            extras |= {f"stride_{name}_{axis}": stride for axis, stride in zip(("page", "slot", "head"), strides, strict=True)}
    if tree_mask is not None:
        extras |= {"tree_ptr": tree_mask, "stride_tree_token": tree_mask.stride(0)}
    named = {"alibi_ptr": alibi_slopes, "sinks_ptr": sinks, "out_scale_ptr": out_scale}
    return extras | {name: tensor for name, tensor in named.items() if tensor is not None}


def _known(kernel: Any, extras: dict[str, Any]) -> dict[str, Any]:
    """`extras`, less SPEC for a kernel from before it had one."""
    if "SPEC" in kernel.arg_names:
        return extras
    return {name: value for name, value in extras.items() if name != "SPEC"}


def kv_bytes_of(kv_format: formats.KVFormat) -> float | None:
    """Bytes of an element of a quantised cache; None for a cache in q's dtype."""
    if kv_format.name not in KERNEL_FORMATS:
        return None
    return INT4_BYTES if kv_format.packed == 2 else 1.0


def scales_kind(k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> str:
    """What kernels call the scales: "" none, "head" one factor a head, "token_head"."""
    given = [scale for scale in (k_scale, v_scale) if scale is not None]
    if not given:
        return ""
    return "token_head" if given[0].dim() == 3 else "head"


def scale_strides(scale: torch.Tensor) -> tuple[int, int, int]:
    """Strides of a scale between pages, slots and heads; 0 along what one scale stands for."""
    if scale.dim() == 3:
        return scale.stride(0), scale.stride(1), scale.stride(2)
    return 0, 0, scale.stride(0) if scale.numel() > 1 else 0


def max_visible(max_seqlen_q: int, window_size: int, num_sink_tokens: int, chunk_size: int, page_size: int) -> int | None:
    """Keys that the tokens of a request see at most, with room for tiles and pages in part; None: all of them."""
    if not window_size and not chunk_size:
        return None
    spans = [span for span in (window_size, chunk_size) if span]
    return min(spans) + max_seqlen_q + num_sink_tokens + 2 * min(page_size, 64)


@torch.no_grad()
def run_twin(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scratch: torch.Tensor | None,
    max_seqlen_q: int,
    num_splits: int,
    softmax_scale: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    causal: bool = True,
    window_size: int = 0,
    num_sink_tokens: int = 0,
    chunk_size: int = 0,
    softcap: float = 0.0,
    batch: bool = False,
) -> None:
    """`launch` on the plain-torch twin."""
    lse.copy_(
        reference.verify_attention(
            q, k_pages, v_pages, block_table, seq_lens, cu_seqlens_q, softmax_scale=softmax_scale, out=out, k_scale=k_scale,
            v_scale=v_scale, causal=causal, window_size=window_size or None, num_sink_tokens=num_sink_tokens,
            chunk_size=chunk_size or None, softcap=softcap or None, alibi_slopes=alibi_slopes, sinks=sinks, tree_mask=tree_mask,
            out_scale=out_scale,
        )[1]
    )  # fmt: skip


def _fake(*_arguments: Any) -> None:
    """Writes in place and returns nothing: there is no shape to infer."""


def _register() -> Any:
    """The torch operator behind `verify_attention`: what torch.compile sees, and where CPU tensors meet the twin."""
    library: Any = torch.library.Library("bigpool", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(
        "verify_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, "
        "Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? scratch, int max_seqlen_q, int num_splits, float softmax_scale, "
        "Tensor? k_scale=None, Tensor? v_scale=None, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? tree_mask=None, "
        "Tensor? out_scale=None, bool causal=True, int window_size=0, int num_sink_tokens=0, int chunk_size=0, "
        "float softcap=0., bool batch=False) -> ()",
        tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag),
    )
    library.impl("verify_attention", launch, "CUDA")
    library.impl("verify_attention", run_twin, "CPU")
    torch.library.register_fake("bigpool::verify_attention", _fake, lib=library)
    return library


_library = _register()
