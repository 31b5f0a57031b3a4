"""Verify attention behind its argument checks: the plan, the launch, the twin, and the torch operator that chooses one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import formats, reference
from .._device import device_props
from ..reference_logits import LOG2_E
from ..tuning import (
    INT4_BYTES,
    MAX_SEQ_LEN,
    PART_EXTRA,
    DeviceProps,
    VerifyPlan,
    VerifySpec,
    next_power_of_2,
    pick_convert,
    plan_verify,
)
from ..tuning_tables import in_force
from ..workspace import carve
from . import _verify_sm90
from ._operator import Operator

# The names that kernels have for formats; a cache in q's dtype is "plain".
KERNEL_FORMATS = {"int8": "int8", "int4": "int4", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
OUT_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
DETERMINISTIC_SPLIT_TILE = 16


@dataclass(frozen=True)
class Call:
    """The arguments of the torch operator, in its order. Caches and scales are seen as NHD. 0 is None: `num_splits` 0 chooses."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    scratch: torch.Tensor | None
    max_seqlen_q: int
    num_splits: int
    softmax_scale: float
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None
    causal: bool = True
    window_size: int = 0
    num_sink_tokens: int = 0
    chunk_size: int = 0
    softcap: float = 0.0
    batch: bool = False

    @property
    def max_seq_len(self) -> int:
        """Keys that a row of the table holds."""
        return min(self.block_table.shape[1] * self.k_pages.shape[1], MAX_SEQ_LEN)

    @property
    def lengths(self) -> tuple[torch.Tensor, ...]:
        return self.block_table, self.seq_lens, self.cu_seqlens_q

    def parts(self, num_splits: int, longest: int) -> torch.Tensor:
        """Of each split a row's sums, fp32 [rows, num_q_heads, num_splits, head_dim + PART_EXTRA], in the scratch or new."""
        rows = len(self.block_table) * longest if longest else len(self.q)
        shape = (rows, self.q.shape[1], num_splits, self.q.shape[2] + PART_EXTRA)
        if self.scratch is not None:
            return carve(self.scratch, shape)
        return torch.empty(shape, dtype=torch.float32, device=self.q.device)


SCHEMA = (
    "Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, "
    "Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? scratch, SymInt max_seqlen_q, int num_splits, float softmax_scale, "
    "Tensor? k_scale=None, Tensor? v_scale=None, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? tree_mask=None, "
    "Tensor? out_scale=None, bool causal=True, int window_size=0, int num_sink_tokens=0, int chunk_size=0, "
    "float softcap=0., bool batch=False"
)


def launch(*arguments: Any, longest: int = 0, kernels: Any = None) -> None:
    """`run` of a Call of these arguments."""
    run(Call(*arguments), longest=longest, kernels=kernels)


@torch.no_grad()
def run(call: Call, *, longest: int = 0, kernels: Any = None) -> None:
    """Plans and launches. `longest`: see VerifySpec.

    `kernels`: a version of bigpool.kernels.verify, which gets the call whatever the card; what it has no parameter for is off.
    """
    is_ours = kernels is None
    if is_ours:
        from ..kernels import verify

        kernels = verify

    if len(call.block_table) == 0 or len(call.q) == 0 or call.max_seqlen_q == 0:
        return
    props, kv_format = device_props(call.q.device), formats.of(call.k_pages.dtype, call.k_scale)
    spec = _spec(props, call, kv_format, longest)
    if kv_format.name in ("fp8_e4m3", "fp8_e5m2"):
        call = replace(call, k_pages=call.k_pages.view(torch.uint8), v_pages=call.v_pages.view(torch.uint8))
    # What a spec does not say: fixed splits, learned sinks, a table without columns.
    is_bare = is_ours and not call.batch and call.sinks is None and call.block_table.shape[1] > 0
    if is_bare and _verify_sm90.takes(props, spec, call):
        _verify_sm90.launch(props, spec, call)
        return
    plan = _plan(props, call, kv_format)
    spec = replace(spec, tiles_per_split=plan.tiles_per_split)
    if kv_format.rotates_k:
        q = _verify_sm90.rotate_queries(call.q) if call.q.is_cuda else formats.rotate(call.q)
        call = replace(call, q=q.to(call.q.dtype))
    if call.out_scale is not None:
        call = replace(call, out=call.out.view(torch.uint8))
    parts = None
    dest, dest_strides = call.out, (*call.out.stride()[:2], 0)
    if plan.num_splits > 1:
        dest = parts = call.parts(plan.num_splits, longest)
        dest_strides = parts.stride()[:3]
    q, k, v, config = call.q, call.k_pages, call.v_pages, plan.config
    kernels.verify_partial_kernel[(len(call.block_table), plan.num_splits * plan.row_tiles, k.shape[2])](
        q, k, v, dest, call.lse, *call.lengths, call.softmax_scale * LOG2_E, len(k), call.max_seq_len,
        *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], *dest_strides, call.lse.stride(0), call.block_table.stride(0),
        GROUP=q.shape[1] // k.shape[2], HEAD_DIM=q.shape[2], HEAD_DIM_PAD=plan.head_dim_pad, PAGE_SIZE=k.shape[1],
        TILE=config.tile, TILES_PER_PAGE=plan.tiles_per_page, BLOCK_M=config.block_m, ROW_TILES=plan.row_tiles,
        **_known(kernels.verify_partial_kernel, _extras(spec, call)), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if parts is not None:
        _merge(kernels.verify_merge_kernel, plan, spec, parts, call)


def _spec(props: DeviceProps, call: Call, kv_format: formats.KVFormat, longest: int) -> VerifySpec:
    kernel_format = KERNEL_FORMATS.get(kv_format.name, "plain")
    return VerifySpec(
        causal=call.causal, window=call.window_size, chunk=call.chunk_size, softcap=call.softcap,
        sink_tokens=call.num_sink_tokens if call.window_size or call.chunk_size else 0, alibi=call.alibi_slopes is not None,
        tree_words=0 if call.tree_mask is None else call.tree_mask.shape[1], kv_format=kernel_format,
        scales=scales_kind(call.k_scale, call.v_scale),
        convert=pick_convert(props, itemsize=call.q.element_size(), kv_format=kernel_format),
        out_format="" if call.out_scale is None else OUT_FORMATS[call.out.dtype], longest=longest,
    )  # fmt: skip


def _plan(props: DeviceProps, call: Call, kv_format: formats.KVFormat) -> VerifyPlan:
    window, chunk, page_size = call.window_size, call.chunk_size, call.k_pages.shape[1]
    return plan_verify(
        props, num_reqs=len(call.block_table), max_seqlen_q=call.max_seqlen_q, num_q_heads=call.q.shape[1],
        num_kv_heads=call.k_pages.shape[2], head_dim=call.q.shape[2], itemsize=call.q.element_size(), page_size=page_size,
        max_seq_len=call.max_seq_len, num_splits=call.num_splits or None, kv_bytes=kv_bytes_of(kv_format), batch=call.batch,
        max_visible=max_visible(call.max_seqlen_q, window, call.num_sink_tokens, chunk, page_size),
        heavy=bool(window or chunk or call.softcap or call.alibi_slopes is not None or call.tree_mask is not None),
        tuned=in_force(props),
    )  # fmt: skip


def _merge(kernel: Any, plan: VerifyPlan, spec: VerifySpec, parts: torch.Tensor, call: Call) -> None:
    out, lse = call.out, call.lse
    splits_pad = min(next_power_of_2(plan.num_splits), 128)
    split_tile = DETERMINISTIC_SPLIT_TILE if plan.tiles_per_split else min(splits_pad, 16)
    extras = {"SPEC": spec} if call.out_scale is None else {"SPEC": spec, "out_scale_ptr": call.out_scale}
    kernel[(len(call.block_table), call.max_seqlen_q, out.shape[1])](
        parts, out, lse, call.cu_seqlens_q, plan.num_splits, *parts.stride()[:3], *out.stride()[:2], lse.stride(0),
        HEAD_DIM=out.shape[2], HEAD_DIM_PAD=next_power_of_2(out.shape[2]), SPLITS_PAD=splits_pad, SPLIT_TILE=split_tile,
        **_known(kernel, extras),
    )  # fmt: skip


def _extras(spec: VerifySpec, call: Call) -> dict[str, Any]:
    """What a launch passes besides the arguments that every version of the kernel has; nothing that is off."""
    extras: dict[str, Any] = {"SPEC": spec}
    for name, scale in (("k_scale", call.k_scale), ("v_scale", call.v_scale)):
        if scale is not None:
            strides = scale_strides(scale)
            extras |= {f"{name}_ptr": scale}
            extras |= {f"stride_{name}_{axis}": stride for axis, stride in zip(("page", "slot", "head"), strides, strict=True)}
    if call.tree_mask is not None:
        extras |= {"tree_ptr": call.tree_mask, "stride_tree_token": call.tree_mask.stride(0)}
    named = {"alibi_ptr": call.alibi_slopes, "sinks_ptr": call.sinks, "out_scale_ptr": call.out_scale}
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


def run_twin(*arguments: Any) -> None:
    """`twin` of a Call of these arguments."""
    twin(Call(*arguments))


@torch.no_grad()
def twin(call: Call) -> None:
    """`run` by plain torch."""
    call.lse.copy_(
        reference.verify_attention(
            call.q, call.k_pages, call.v_pages, *call.lengths, softmax_scale=call.softmax_scale, out=call.out,
            k_scale=call.k_scale, v_scale=call.v_scale, causal=call.causal, window_size=call.window_size or None,
            num_sink_tokens=call.num_sink_tokens, chunk_size=call.chunk_size or None, softcap=call.softcap or None,
            alibi_slopes=call.alibi_slopes, sinks=call.sinks, tree_mask=call.tree_mask, out_scale=call.out_scale,
        )[1]
    )  # fmt: skip


def _launch_plain(*arguments: Any) -> None:
    from ..kernels import verify

    launch(*arguments, kernels=verify)


OPERATOR = Operator("verify_attention", SCHEMA, launch=launch, twin=run_twin, plain=_launch_plain)
