"""What the arguments of prefill attention have to be: those of verify attention, with its own bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .._check import Contract
from .._device import device_props
from ..errors import BackendError, WorkspaceError
from ..tuning import MAX_HEAD_DIM, MAX_HEADS, MAX_SEQ_LEN, MIN_HEAD_DIM
from ._operator import require_backend
from ._prefill_plan import MAX_REQS, MAX_ROWS, OLDEST_FP8, SUM_SHARES, VALUE_TILE, value_tiles
from ._prefill_scratch import KeyCodes, PrefillWorkspace
from ._verify_check import (
    QUANTISED,
    Arguments,
    _check_out,
    _check_rules,
    _check_scales,
    _check_span,
    _check_tensors,
    _is_int,
    _is_number,
)

NAME = "prefill_attention"
QK_MODES, PV_MODES = ("exact", "int8"), ("exact", "fp8")
MADE_BY = "make one with PrefillWorkspace.empty"


@dataclass(frozen=True)
class Modes:
    """What prefill attention takes besides the arguments of verify attention, of any type until checked."""

    qk: str
    pv: str
    workspace: Any
    key_codes: Any


def check_arguments(a: Arguments, modes: Modes) -> None:
    """Raises ArgumentError with every fault that can be seen without looking at values on a device."""
    contract = Contract(NAME)
    shape_ok = _check_tensors(contract, a)
    _check_scalars(contract, a, modes)
    _check_rules(contract, a)
    if shape_ok:
        _check_shapes(contract, a)
        _check_scales(contract, a)
        _check_modes(contract, a, modes)
        _check_sinks(contract, a)
        _check_out(contract, a)
    if modes.key_codes is not None:
        _check_key_codes(contract, a, modes)
    if modes.workspace is not None:
        _check_workspace(contract, a, modes)
    contract.finish()


def _check_scalars(contract: Contract, a: Arguments, modes: Modes) -> None:
    require = contract.require
    scale_ok = a.softmax_scale is None or _is_number(a.softmax_scale)
    seqlen_ok = _is_int(a.max_seqlen_q, 0, MAX_ROWS)
    when = "see docs/prefill.md for when to choose which"
    require(seqlen_ok, "max_seqlen_q", f"an int 0..{MAX_ROWS}", f"{a.max_seqlen_q}", "pass the largest q_len")
    require(scale_ok, "softmax_scale", "None or a number", f"{a.softmax_scale!r}", "None is head_dim ** -0.5")
    require_backend(contract, a.backend)
    require(modes.qk in QK_MODES, "qk", " or ".join(map(repr, QK_MODES)), repr(modes.qk), when)
    require(modes.pv in PV_MODES, "pv", " or ".join(map(repr, PV_MODES)), repr(modes.pv), when)


def _check_shapes(contract: Contract, a: Arguments) -> None:
    axes, require = contract.axes, contract.require
    head_dim, q_heads, kv_heads, page_size = (axes[axis] for axis in ("head_dim", "num_q_heads", "num_kv_heads", "page_size"))
    dim_ok = MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM
    require(dim_ok, "q", f"head_dim {MIN_HEAD_DIM}..{MAX_HEAD_DIM}", f"{head_dim}", "split or pad the heads")
    if a.k_cache.dtype == torch.uint8:
        require(head_dim % 2 == 0, "q", "an even head_dim for int4", f"{head_dim}", "two codes share a byte; pad the heads")
    heads_ok = 0 < kv_heads <= MAX_HEADS and q_heads % max(kv_heads, 1) == 0 and q_heads <= MAX_HEADS
    expected = f"num_q_heads a multiple of num_kv_heads, at most {MAX_HEADS}"
    require(heads_ok, "q", expected, f"{q_heads} and {kv_heads}", "repeat or drop heads, or split them over calls")
    if heads_ok and isinstance(a.max_seqlen_q, int):
        rows = a.max_seqlen_q * (q_heads // kv_heads)
        expected = f"at most {MAX_ROWS * kv_heads // q_heads}" if q_heads else ""
        require(rows <= MAX_ROWS, "max_seqlen_q", expected, f"{a.max_seqlen_q}", "split chunks")
    reqs = axes["num_reqs"]
    require(reqs <= MAX_REQS, "block_table", f"at most {MAX_REQS} requests", f"{reqs}", "split the batch")
    require(0 < page_size < 2**31, "k_cache", "page_size 1..2^31 - 1", f"{page_size}", "page_size counts the slots of a page")
    require(axes["num_pages"] < 2**31, "k_cache", "num_pages below 2^31", f"{axes['num_pages']}", "page ids are int32")
    for name, cache in (("k_cache", a.k_cache), ("v_cache", a.v_cache)):
        _check_span(contract, name, cache, a.slot_axis, cache.shape[-1])


def _check_modes(contract: Contract, a: Arguments, modes: Modes) -> None:
    """What the modes of 8 bits do not take together."""
    if (modes.qk, modes.pv) != ("exact", "exact") and a.k_cache.dtype in QUANTISED:
        got = str(a.k_cache.dtype).removeprefix("torch.")
        remedy = "a quantised cache is for qk='exact', pv='exact'"
        contract.fault("k_cache", f"q's dtype for qk={modes.qk!r}, pv={modes.pv!r}", got, remedy)


def _check_sinks(contract: Contract, a: Arguments) -> None:
    if a.sinks is not None:
        remedy = "pass one fp32 logit per query head"
        contract.tensor("sinks", a.sinks, "num_q_heads", (torch.float32,), remedy, device=a.q.device)


def _check_key_codes(contract: Contract, a: Arguments, modes: Modes) -> None:
    codes, require = modes.key_codes, contract.require
    made_by = "make one with KeyCodes.empty"
    if not isinstance(codes, KeyCodes):
        contract.fault("key_codes", "a bigpool.KeyCodes", type(codes).__name__, made_by)
        return
    require(modes.qk == "int8", "key_codes", "None for qk='exact'", "a KeyCodes", "exact scores need no codes")
    later = "what a token sees besides the keys before it depends on the chunk; leave key_codes out"
    require(a.causal is True, "key_codes", "causal=True", f"causal={a.causal!r}", later)
    few = "a window has few keys, and its pages may lack the head of the request; leave key_codes out"
    require(a.window_size is None, "key_codes", "window_size=None", f"window_size={a.window_size!r}", few)
    device = a.q.device if isinstance(a.q, torch.Tensor) else None
    for name, tensor, axes, dtype in (
        ("key_codes.codes", codes.codes, "num_pages page_size num_kv_heads head_dim", torch.int8),
        ("key_codes.scales", codes.scales, "num_pages page_size num_kv_heads", torch.float32),
        ("key_codes.means", codes.means, "max_reqs num_kv_heads head_dim", torch.float32),
    ):
        if contract.tensor(name, tensor, axes, (dtype,), made_by, device=device):
            require(tensor.is_contiguous(), name, "a contiguous tensor", f"strides {list(tensor.stride())}", made_by)
    need, reqs = contract.axes.get("num_reqs", 0), contract.axes.pop("max_reqs", 1)
    require(need <= reqs, "key_codes.means", f"room for {need} requests", f"{reqs}", "state a larger max_num_reqs")
    page = codes.codes[:1].numel()
    require(page < 2**31, "key_codes.codes", "pages of fewer than 2^31 elements", f"{page:,}", "pass smaller pages")


def _check_workspace(contract: Contract, a: Arguments, modes: Modes) -> None:
    workspace, require = modes.workspace, contract.require
    if not isinstance(workspace, PrefillWorkspace):
        contract.fault("workspace", "a bigpool.PrefillWorkspace", type(workspace).__name__, MADE_BY)
        return
    wants_keys, wants_values = modes.qk == "int8" and modes.key_codes is None, modes.pv == "fp8"
    if not wants_keys and not wants_values:
        what = f"qk={modes.qk!r}, pv={modes.pv!r}" + (" with key_codes" if modes.key_codes is not None else "")
        contract.fault("workspace", f"None for {what}", "a PrefillWorkspace", "these modes need no scratch")
        return
    device = a.q.device if isinstance(a.q, torch.Tensor) else None
    contract.axes |= {"shares": SUM_SHARES, "tile": VALUE_TILE}
    parts = [("sums", "max_reqs shares num_kv_heads head_dim", torch.float32)]
    if wants_keys:
        parts.append(("codes", "max_keys num_kv_heads head_dim", torch.int8))
        parts.append(("scales", "max_keys num_kv_heads", torch.float32))
        parts.append(("means", "max_reqs num_kv_heads head_dim", torch.float32))
    if wants_values:
        parts.append(("value_codes", "max_tiles num_kv_heads head_dim tile", torch.uint8))
        parts.append(("value_scales", "max_reqs num_kv_heads head_dim", torch.float32))
    for part, axes, dtype in parts:
        name, tensor = f"workspace.{part}", getattr(workspace, part)
        if tensor is None:
            mode = "qk='int8'" if part in ("codes", "scales", "means") else "pv='fp8'"
            contract.fault(name, f"a tensor for {mode}", "None", f"pass {mode} to PrefillWorkspace.empty")
        elif contract.tensor(name, tensor, axes, (dtype,), MADE_BY, device=device):
            require(tensor.is_contiguous(), name, "a contiguous tensor", f"strides {list(tensor.stride())}", MADE_BY)
    _check_room(contract, workspace)


def _check_room(contract: Contract, workspace: PrefillWorkspace) -> None:
    axes, require = contract.axes, contract.require
    keys, reqs, held = axes.get("max_keys", workspace.max_num_keys), axes.get("max_reqs", 1), workspace.max_num_keys
    require(0 < held < 2**31, "workspace.max_num_keys", "an int 1..2^31 - 1", f"{held}", MADE_BY)
    require(held <= keys, "workspace.codes", f"room for max_num_keys={held}", f"{keys}", MADE_BY)
    need = axes.get("num_reqs", 0)
    require(need <= reqs, "workspace.sums", f"room for {need} requests", f"{reqs}", "state a larger max_num_reqs")
    if "max_tiles" in axes and axes.get("page_size", 0) > 0:
        page_size = axes["page_size"]
        tiles = value_tiles(held, need, page_size)
        remedy = f"pass page_size={page_size} to PrefillWorkspace.empty"
        require(tiles <= axes["max_tiles"], "workspace.value_codes", f"{tiles} tiles", f"{axes['max_tiles']}", remedy)


def require_fp8(device: torch.device) -> None:
    """Raises BackendError on a card whose matrix units do not take fp8."""
    props = device_props(device)
    if not props.interpreted and props.sm < OLDEST_FP8:
        raise BackendError(
            f"pv: expected a card of compute capability 8.9 or later for 'fp8', got {props.sm / 10:.1f} ({props.name}); "
            "pass pv='exact'"
        )


def check_room(a: Arguments, workspace: PrefillWorkspace) -> None:
    """The checked mode: whether the keys of a batch fit the scratch. Syncs the host."""
    capacity = min(a.block_table.shape[1] * a.k_cache.shape[a.slot_axis], MAX_SEQ_LEN)
    keys = int((a.seq_lens.long().clamp(0, capacity) * (a.cu_seqlens_q.diff() > 0)).sum())
    held = workspace.max_num_keys
    if keys > held:
        raise WorkspaceError(
            f"workspace: expected room for {keys:,} keys, got {held:,}, {keys - held:,} too few; "
            "state a larger max_num_keys in PrefillWorkspace.empty"
        )
