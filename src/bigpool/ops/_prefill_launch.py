"""Prefill attention behind its argument checks: the launches, the twin, and the torch operator that chooses one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import formats, reference_prefill
from .._device import device_props
from ..reference_logits import LOG2_E
from ..tuning import MAX_SEQ_LEN, DeviceProps, VerifySpec, cdiv, pick_convert, pick_tiles_per_page
from . import _prefill_sm90, _verify_sm90
from ._operator import Operator
from ._prefill_plan import (
    PrefillConfig,
    PrefillShape,
    pick_key_passes,
    pick_prefill_config,
    prefill_head_dim_pad,
)
from ._prefill_scratch import PrefillWorkspace
from ._verify_launch import KERNEL_FORMATS, kv_bytes_of, scale_strides, scales_kind


@dataclass(frozen=True)
class Call:
    """The arguments of the torch operator, in its order. Caches and scales are seen as NHD; 0 is None.

    `sums` and what follows are of a PrefillWorkspace; with qk="kept", `codes`, `scales` and `means` are of a KeyCodes.
    """

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    sums: torch.Tensor | None
    codes: torch.Tensor | None
    scales: torch.Tensor | None
    means: torch.Tensor | None
    value_codes: torch.Tensor | None
    value_scales: torch.Tensor | None
    max_keys: int
    max_seqlen_q: int
    softmax_scale: float
    qk: str = "exact"
    pv: str = "exact"
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    causal: bool = True
    window_size: int = 0
    num_sink_tokens: int = 0
    softcap: float = 0.0

    @property
    def max_seq_len(self) -> int:
        """Keys that a row of the table holds."""
        return min(self.block_table.shape[1] * self.k_pages.shape[1], MAX_SEQ_LEN)

    @property
    def lengths(self) -> tuple[torch.Tensor, ...]:
        return self.block_table, self.seq_lens, self.cu_seqlens_q


SCHEMA = (
    "Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, "
    "Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? sums, Tensor(d!)? codes, Tensor(e!)? scales, Tensor(f!)? means, "
    "Tensor(g!)? value_codes, Tensor(h!)? value_scales, SymInt max_keys, SymInt max_seqlen_q, float softmax_scale, "
    "str qk='exact', str pv='exact', Tensor? k_scale=None, Tensor? v_scale=None, Tensor? sinks=None, bool causal=True, "
    "int window_size=0, int num_sink_tokens=0, float softcap=0."
)


def launch(*arguments: Any, kernels: Any = None) -> None:
    """`run` of a Call of these arguments."""
    run(Call(*arguments), kernels)


@torch.no_grad()
def run(call: Call, kernels: Any = None) -> None:
    """Launches. Without scratch that a mode needs, it is allocated for what the table could hold.

    `kernels`: a version of bigpool.kernels.prefill, which gets the call whatever the card.
    """
    is_ours = kernels is None
    if is_ours:
        from ..kernels import prefill

        kernels = prefill

    if len(call.block_table) == 0 or len(call.q) == 0 or call.max_seqlen_q == 0:
        return
    props, kv_format = device_props(call.q.device), formats.of(call.k_pages.dtype, call.k_scale)
    call = _with_scratch(call)
    if kv_format.name in ("fp8_e4m3", "fp8_e5m2"):
        call = replace(call, k_pages=call.k_pages.view(torch.uint8), v_pages=call.v_pages.view(torch.uint8))
    if kv_format.rotates_k:
        q = _verify_sm90.rotate_queries(call.q) if call.q.is_cuda else formats.rotate(call.q)
        call = replace(call, q=q.to(call.q.dtype))
    hopper_shape = _prefill_sm90.shape_of(props, call) if is_ours and kv_format.name not in KERNEL_FORMATS else None
    if call.qk == "int8":
        _quantise_keys(kernels, props, call)
    elif call.qk == "kept":
        _keep_keys(kernels, props, call)
    if call.pv == "fp8":
        _quantise_values(kernels, props, call, {} if hopper_shape is None else {"OPERAND_ORDER": True})
    if hopper_shape is not None:
        _prefill_sm90.launch(call, hopper_shape)
        return
    shape, config = _plan(props, call, kv_format)
    values = call.v_pages if call.value_codes is None else call.value_codes
    grid = cdiv(call.max_seqlen_q * shape.group, config.block_m), call.k_pages.shape[2], len(call.block_table)
    kernels.prefill_attention_kernel[grid](
        call.q, call.k_pages, values, call.out, call.lse, *call.lengths,
        call.softmax_scale * LOG2_E, len(call.k_pages), call.max_seq_len, call.max_keys,
        *call.q.stride()[:2], *call.k_pages.stride()[:3], *call.v_pages.stride()[:3], *call.out.stride()[:2],
        call.block_table.stride(0), CFG=shape, **_extras(call), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def _with_scratch(call: Call) -> Call:
    """`call` with the scratch of its modes, allocated where the caller gave none, and with none of other modes."""
    if call.qk == "exact":
        call = replace(call, codes=None, scales=None, means=None)
    if call.pv == "exact":
        call = replace(call, value_codes=None, value_scales=None)
    lacks_keys, lacks_values = call.qk == "int8" and call.codes is None, call.pv == "fp8" and call.value_codes is None
    if not lacks_keys and not lacks_values:
        return call
    num_reqs = len(call.block_table)
    made = PrefillWorkspace.empty(
        max_num_reqs=num_reqs, max_num_keys=max(min(num_reqs * call.max_seq_len, 2**31 - 1), 1),
        num_kv_heads=call.k_pages.shape[2], head_dim=call.q.shape[2], qk="int8" if call.qk == "int8" else "exact", pv=call.pv,
        page_size=call.k_pages.shape[1], device=call.q.device,
    )  # fmt: skip
    call = replace(call, sums=made.sums, value_codes=made.value_codes, value_scales=made.value_scales, max_keys=made.max_num_keys)
    return replace(call, codes=made.codes, scales=made.scales, means=made.means) if call.qk == "int8" else call


def _plan(props: DeviceProps, call: Call, kv_format: formats.KVFormat) -> tuple[PrefillShape, PrefillConfig]:
    head_dim, page_size = call.q.shape[2], call.k_pages.shape[1]
    coded, itemsize, kv_bytes = call.qk != "exact", call.q.element_size(), kv_bytes_of(kv_format)
    head_dim_pad = prefill_head_dim_pad(head_dim, coded, kv_format.packed == 2)
    config = pick_prefill_config(
        props, head_dim_pad=head_dim_pad, itemsize=itemsize, int8=coded, kv_bytes=kv_bytes, fp8=call.pv == "fp8"
    )
    kernel_format = KERNEL_FORMATS.get(kv_format.name, "plain")
    spec = VerifySpec(
        causal=call.causal, window=call.window_size, sink_tokens=_sink_tokens(call),
        softcap=call.softcap, kv_format=kernel_format, scales=scales_kind(call.k_scale, call.v_scale),
        convert=pick_convert(props, itemsize=itemsize, kv_format=kernel_format),
    )  # fmt: skip
    k_strides, v_strides = ((0, 0, 0) if s is None else scale_strides(s) for s in (call.k_scale, call.v_scale))
    return PrefillShape(
        call.q.shape[1] // call.k_pages.shape[2], head_dim, head_dim_pad, page_size, config.tile,
        pick_tiles_per_page(page_size, config.tile), config.block_m, spec, call.qk,
        "fp8 plain" if call.pv == "fp8" and props.interpreted else call.pv, k_strides, v_strides,
    ), config  # fmt: skip


def _extras(call: Call) -> dict[str, Any]:
    """What the attention kernel is passed by name; nothing that is off."""
    extras = {"k_scale_ptr": call.k_scale, "v_scale_ptr": call.v_scale, "sinks_ptr": call.sinks}
    if call.qk != "exact":
        extras |= {"codes_ptr": call.codes, "code_scale_ptr": call.scales, "mean_ptr": call.means}
    if call.pv == "fp8":
        extras["v_scale_ptr"] = call.value_scales
    return {name: tensor for name, tensor in extras.items() if tensor is not None}


def _quantise_keys(kernels: Any, props: DeviceProps, call: Call) -> None:
    """Codes and scales of all keys that a query token sees, in two launches."""
    k, passes, num_kv_heads = call.k_pages, pick_key_passes(props), call.k_pages.shape[2]
    shape, num_reqs = _shape_of_pass(call, passes.tile), len(call.block_table)
    numbers = len(k), call.max_seq_len
    strides = *k.stride()[:3], call.block_table.stride(0)
    kernels.prefill_sum_keys_kernel[(num_reqs, passes.shares, num_kv_heads)](
        k, call.sums, *call.lengths, *numbers, *strides, CFG=shape, num_warps=passes.num_warps
    )
    kernels.prefill_quantise_kernel[(num_reqs, passes.programs, num_kv_heads)](
        k, call.sums, call.means, call.codes, call.scales, *call.lengths, *numbers, call.max_keys, *strides,
        SHARES=passes.shares, CFG=shape, num_warps=passes.num_warps,
    )  # fmt: skip


def _keep_keys(kernels: Any, props: DeviceProps, call: Call) -> None:
    """Codes and scales of the new keys, in one launch."""
    k, passes, num_kv_heads = call.k_pages, pick_key_passes(props), call.k_pages.shape[2]
    programs = max(min(cdiv(call.max_seqlen_q, passes.tile) + 1, passes.programs), 1)
    kernels.prefill_keep_kernel[(len(call.block_table), programs, num_kv_heads)](
        k, call.means, call.codes, call.scales, *call.lengths, len(k), call.max_seq_len, *k.stride()[:3],
        call.block_table.stride(0), CFG=_shape_of_pass(call, passes.tile), num_warps=passes.num_warps,
    )  # fmt: skip


def _quantise_values(kernels: Any, props: DeviceProps, call: Call, order: dict[str, bool]) -> None:
    """Codes and scales of all values that a query token sees, in two launches."""
    v, passes, num_kv_heads = call.v_pages, pick_key_passes(props, call.pv), call.k_pages.shape[2]
    shape, num_reqs = _shape_of_pass(call, passes.tile), len(call.block_table)
    numbers = len(v), call.max_seq_len
    strides = *v.stride()[:3], call.block_table.stride(0)
    kernels.prefill_max_values_kernel[(num_reqs, passes.shares, num_kv_heads)](
        v, call.sums, *call.lengths, *numbers, *strides, CFG=shape, num_warps=passes.num_warps
    )
    kernels.prefill_quantise_values_kernel[(num_reqs, passes.programs, num_kv_heads)](
        v, call.sums, call.value_scales, call.value_codes, *call.lengths, *numbers, call.max_keys, *strides,
        SHARES=passes.shares, CFG=shape, **order, num_warps=passes.num_warps,
    )  # fmt: skip


def _shape_of_pass(call: Call, tile: int) -> PrefillShape:
    """What a pass over keys or values is compiled for: the same for calls that differ in other things."""
    head_dim, page_size = call.q.shape[2], call.k_pages.shape[1]
    spec = VerifySpec(causal=call.causal, window=call.window_size, sink_tokens=_sink_tokens(call))
    head_dim_pad = prefill_head_dim_pad(head_dim, call.qk != "exact")
    return PrefillShape(1, head_dim, head_dim_pad, page_size, tile, pick_tiles_per_page(page_size, tile), 1, spec)


def _sink_tokens(call: Call) -> int:
    """Nothing is hidden without a window."""
    return call.num_sink_tokens if call.window_size else 0


@torch.no_grad()
def run_twin(*arguments: Any) -> None:
    """A Call of these arguments by plain torch, which needs no scratch."""
    call = Call(*arguments)
    kept = None
    if call.qk == "kept":
        assert call.codes is not None
        assert call.scales is not None
        kept = call.codes, call.scales
    call.lse.copy_(
        reference_prefill.prefill_attention(
            call.q, call.k_pages, call.v_pages, *call.lengths, softmax_scale=call.softmax_scale, out=call.out, qk=call.qk,
            pv=call.pv, kept=kept, k_scale=call.k_scale, v_scale=call.v_scale, sinks=call.sinks, causal=call.causal,
            window_size=call.window_size or None, num_sink_tokens=call.num_sink_tokens, softcap=call.softcap or None,
        )[1]
    )  # fmt: skip


def _launch_plain(*arguments: Any) -> None:
    from ..kernels import prefill

    launch(*arguments, kernels=prefill)


OPERATOR = Operator("prefill_attention", SCHEMA, launch=launch, twin=run_twin, plain=_launch_plain)
