"""What the arguments of prefill attention have to be: those of verify attention, with its own bounds."""

from __future__ import annotations

from typing import Any

import torch

from .._check import Contract
from ..errors import WorkspaceError
from ..tuning import MAX_HEADS, MAX_SEQ_LEN, MIN_HEAD_DIM
from ._prefill_plan import MAX_HEAD_DIM, MAX_REQS, MAX_ROWS, SUM_SHARES, PrefillWorkspace
from ._verify_check import (
    BACKENDS,
    QUANTISED,
    Arguments,
    _check_out,
    _check_rules,
    _check_span,
    _check_tensors,
    _is_int,
    _is_number,
)

NAME = "prefill_attention"
MODES = ("exact", "int8")


def check_arguments(a: Arguments, qk: str, workspace: Any) -> None:
    """Raises ArgumentError with every fault that can be seen without looking at values on a device."""
    contract = Contract(NAME)
    shape_ok = _check_tensors(contract, a)
    _check_scalars(contract, a, qk)
    _check_rules(contract, a)
    if shape_ok:
        _check_shapes(contract, a)
        _check_out(contract, a)
    if workspace is not None:
        _check_workspace(contract, a, qk, workspace)
    contract.finish()


def _check_scalars(contract: Contract, a: Arguments, qk: str) -> None:
    require = contract.require
    scale_ok = a.softmax_scale is None or _is_number(a.softmax_scale)
    seqlen_ok = _is_int(a.max_seqlen_q, 0, MAX_ROWS)
    require(seqlen_ok, "max_seqlen_q", f"an int 0..{MAX_ROWS}", f"{a.max_seqlen_q}", "pass the largest q_len")
    require(scale_ok, "softmax_scale", "None or a number", f"{a.softmax_scale!r}", "None is head_dim ** -0.5")
    require(a.backend in BACKENDS, "backend", " or ".join(map(repr, BACKENDS)), repr(a.backend), "'auto' chooses")
    require(qk in MODES, "qk", " or ".join(map(repr, MODES)), repr(qk), "see docs/prefill.md for when to choose which")


def _check_shapes(contract: Contract, a: Arguments) -> None:
    axes, require = contract.axes, contract.require
    head_dim, q_heads, kv_heads, page_size = (axes[axis] for axis in ("head_dim", "num_q_heads", "num_kv_heads", "page_size"))
    if a.k_cache.dtype in QUANTISED:
        got = str(a.k_cache.dtype).removeprefix("torch.")
        contract.fault("k_cache", "q's dtype", got, "quantised caches are for verify_attention; gather_kv gives their values")
    dim_ok = MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM
    require(dim_ok, "q", f"head_dim {MIN_HEAD_DIM}..{MAX_HEAD_DIM}", str(head_dim), "split or pad the heads")
    heads_ok = 0 < kv_heads <= MAX_HEADS and q_heads % max(kv_heads, 1) == 0 and q_heads <= MAX_HEADS
    expected = f"num_q_heads a multiple of num_kv_heads, at most {MAX_HEADS}"
    require(heads_ok, "q", expected, f"{q_heads} and {kv_heads}", "repeat or drop heads, or split them over calls")
    if heads_ok and isinstance(a.max_seqlen_q, int):
        rows = a.max_seqlen_q * (q_heads // kv_heads)
        require(
            rows <= MAX_ROWS, "max_seqlen_q", f"at most {MAX_ROWS * kv_heads // q_heads}", str(a.max_seqlen_q), "split chunks"
        )
    reqs = axes["num_reqs"]
    require(reqs <= MAX_REQS, "block_table", f"at most {MAX_REQS} requests", str(reqs), "split the batch")
    require(0 < page_size < 2**31, "k_cache", "page_size 1..2^31 - 1", f"{page_size}", "page_size counts the slots of a page")
    require(axes["num_pages"] < 2**31, "k_cache", "num_pages below 2^31", str(axes["num_pages"]), "page ids are int32")
    for name, cache in (("k_cache", a.k_cache), ("v_cache", a.v_cache)):
        _check_span(contract, name, cache, a.slot_axis, cache.shape[-1])


def _check_workspace(contract: Contract, a: Arguments, qk: str, workspace: Any) -> None:
    made_by = "make one with PrefillWorkspace.empty"
    if not isinstance(workspace, PrefillWorkspace):
        contract.fault("workspace", "a bigpool.PrefillWorkspace", type(workspace).__name__, made_by)
        return
    require = contract.require
    require(qk == "int8", "workspace", "None for qk='exact'", "a PrefillWorkspace", "exact prefill needs no scratch")
    device = a.q.device if isinstance(a.q, torch.Tensor) else None
    for name, tensor, axes, dtype in (
        ("workspace.codes", workspace.codes, "max_keys num_kv_heads head_dim", torch.int8),
        ("workspace.scales", workspace.scales, "max_keys num_kv_heads", torch.float32),
        ("workspace.sums", workspace.sums, "max_reqs shares num_kv_heads head_dim", torch.float32),
        ("workspace.means", workspace.means, "max_reqs num_kv_heads head_dim", torch.float32),
    ):
        contract.axes.setdefault("shares", SUM_SHARES)
        if contract.tensor(name, tensor, axes, (dtype,), made_by, device=device):
            require(tensor.is_contiguous(), name, "a contiguous tensor", f"strides {list(tensor.stride())}", made_by)
    keys, reqs = contract.axes.get("max_keys", 1), contract.axes.get("max_reqs", 1)
    require(0 < keys < 2**31, "workspace.codes", "max_keys 1..2^31 - 1", str(keys), made_by)
    need = contract.axes.get("num_reqs", 0)
    require(need <= reqs, "workspace.sums", f"room for {need} requests", str(reqs), "state a larger max_num_reqs")


def check_room(a: Arguments, workspace: PrefillWorkspace) -> None:
    """The checked mode: whether the keys of a batch fit the scratch. Syncs the host."""
    capacity = min(a.block_table.shape[1] * a.k_cache.shape[a.slot_axis], MAX_SEQ_LEN)
    keys = int((a.seq_lens.long().clamp(0, capacity) * (a.cu_seqlens_q.diff() > 0)).sum())
    held = len(workspace.codes)
    if keys > held:
        raise WorkspaceError(
            f"workspace: expected room for {keys:,} keys, got {held:,}, {keys - held:,} too few; "
            "state a larger max_num_keys in PrefillWorkspace.empty"
        )
