"""What the arguments of verify attention have to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .. import formats
from .._check import Contract, dtype_name
from ..errors import ArgumentError
from ..tuning import (
    BATCH_SPLIT_TOKENS,
    MAX_GRID_YZ,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_NUM_SPLITS,
    MAX_SEQ_LEN,
    MAX_SEQLEN_Q,
    MIN_HEAD_DIM,
    cdiv,
)
from ..workspace import Workspace
from ._operator import require_backend

NAME = "verify_attention"
Q_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUANTISED = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
OUT_AXES = "num_tokens num_q_heads head_dim"


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call, as they came: of any type until they are checked."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    kv_layout: str
    k_scale: Any
    v_scale: Any
    causal: bool
    window_size: int | None
    num_sink_tokens: int
    chunk_size: int | None
    softcap: float | None
    alibi_slopes: Any
    sinks: Any
    tree_mask: Any
    out_scale: Any
    deterministic: str | None
    softmax_scale: float | None
    num_splits: int | None
    workspace: Any
    out: Any
    backend: str

    @property
    def page_axes(self) -> str:
        return "page_size num_kv_heads" if self.kv_layout == "NHD" else "num_kv_heads page_size"

    @property
    def slot_axis(self) -> int:
        return 1 if self.kv_layout == "NHD" else 2

    @property
    def as_nhd(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """k_cache, v_cache, k_scale and v_scale with the axes of NHD."""
        if self.kv_layout == "NHD":
            return self.k_cache, self.v_cache, self.k_scale, self.v_scale
        scales = (s.transpose(1, 2) if s is not None and s.dim() == 3 else s for s in (self.k_scale, self.v_scale))
        return self.k_cache.transpose(1, 2), self.v_cache.transpose(1, 2), *scales

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse): what the caller gave to write to, and new tensors."""
        out, dtype = self.out, self.q.dtype if self.out_scale is None else torch.float8_e4m3fn
        if out is None:
            out = torch.empty_like(self.q, dtype=dtype, memory_format=torch.contiguous_format)
        return out, torch.empty(self.q.shape[:2], dtype=torch.float32, device=self.q.device)


def check_arguments(a: Arguments) -> None:
    """Raises ArgumentError with every fault that can be seen without looking at values on a device."""
    contract = Contract(NAME)
    shape_ok = _check_tensors(contract, a)
    _check_scalars(contract, a)
    _check_rules(contract, a)
    _check_workspace(contract, a)
    if shape_ok:
        _check_shapes(contract, a)
        _check_scales(contract, a)
        _check_options(contract, a)
    contract.finish()


def _check_tensors(contract: Contract, a: Arguments) -> bool:
    """Dtypes, ranks, axes, devices and unit strides; False leaves the axes too unsure for more checks."""
    if a.kv_layout not in ("NHD", "HND"):
        contract.fault("kv_layout", "'NHD' or 'HND'", repr(a.kv_layout), "name the order of the axes of a page")
        return False
    ok = contract.tensor("q", a.q, OUT_AXES, Q_DTYPES, "flatten the tokens of all requests")
    device = a.q.device if ok else None
    cache_dtype = getattr(a.k_cache, "dtype", None)
    same = (cache_dtype,) if cache_dtype in QUANTISED else (a.q.dtype,) if ok else Q_DTYPES
    width, remedy = "head_dim", "caches share q's dtype, head_dim and shape"
    if cache_dtype == torch.uint8 and ok:
        # Two codes share a byte.
        width, contract.axes["head_dim/2"] = "head_dim/2", contract.axes["head_dim"] // 2
    for name, cache in (("k_cache", a.k_cache), ("v_cache", a.v_cache)):
        if width != "head_dim":
            remedy = f"uint8 is int4; if these are fp8 bytes, call {name}.view(torch.float8_e4m3fn)"
        elif cache_dtype in QUANTISED:
            remedy = "K and V share dtype and shape, and q's head_dim"
        ok &= contract.tensor(name, cache, f"num_pages {a.page_axes} {width}", same, remedy, device=device)
    for name, value, axes in (
        ("block_table", a.block_table, "num_reqs max_pages_per_req"),
        ("seq_lens", a.seq_lens, "num_reqs"),
        ("cu_seqlens_q", a.cu_seqlens_q, "num_reqs+1"),
    ):
        remedy = "pass one entry per request"
        if isinstance(value, torch.Tensor) and value.dtype != torch.int32:
            remedy = f"call {name}.int()"
        ok &= contract.tensor(name, value, axes, (torch.int32,), remedy, device=device)
    return ok


def _is_int(value: Any, low: int, high: int) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool) and bool(low <= value <= high)


def _is_number(value: Any) -> bool:
    return isinstance(value, (float, torch.SymFloat)) or (type(value) is int and abs(value) < 2**63)


def _check_scalars(contract: Contract, a: Arguments) -> None:
    require = contract.require
    splits_ok = a.num_splits is None or _is_int(a.num_splits, 1, MAX_NUM_SPLITS)
    scale_ok = a.softmax_scale is None or _is_number(a.softmax_scale)
    seqlen_ok = _is_int(a.max_seqlen_q, 0, MAX_SEQLEN_Q)
    long = "verify is for a few tokens; split longer queries"
    require(seqlen_ok, "max_seqlen_q", f"an int 0..{MAX_SEQLEN_Q}", f"{a.max_seqlen_q}", long)
    require(splits_ok, "num_splits", f"None or an int 1..{MAX_NUM_SPLITS}", f"{a.num_splits}", "None chooses")
    require(scale_ok, "softmax_scale", "None or a number", f"{a.softmax_scale!r}", "None is head_dim ** -0.5")
    require_backend(contract, a.backend)
    mode_ok = a.deterministic in (None, "batch")
    require(mode_ok, "deterministic", "None or 'batch'", repr(a.deterministic), "every mode gives the same bits run to run")
    if a.deterministic == "batch":
        fixed = "splits have fixed bounds in deterministic='batch'"
        require(a.num_splits is None, "num_splits", "None", f"{a.num_splits}", fixed)


def _check_rules(contract: Contract, a: Arguments) -> None:
    require = contract.require
    require(isinstance(a.causal, bool), "causal", "a bool", repr(a.causal), "False lets every token see every key")
    for name, value in (("window_size", a.window_size), ("chunk_size", a.chunk_size)):
        ok = value is None or _is_int(value, 1, MAX_SEQ_LEN)
        require(ok, name, f"None or an int 1..{MAX_SEQ_LEN}", f"{value!r}", "None is unbounded")
    sinks_ok = _is_int(a.num_sink_tokens, 0, MAX_SEQ_LEN)
    expected = f"an int 0..{MAX_SEQ_LEN}"
    require(sinks_ok, "num_sink_tokens", expected, f"{a.num_sink_tokens!r}", "it counts the first keys of a request")
    cap_ok = a.softcap is None or (_is_number(a.softcap) and 0 < a.softcap < float("inf"))
    require(cap_ok, "softcap", "None or a number above 0", f"{a.softcap!r}", "None is off")


def _check_workspace(contract: Contract, a: Arguments) -> None:
    if a.workspace is None:
        return
    if not isinstance(a.workspace, Workspace):
        got = type(a.workspace).__name__
        contract.fault("workspace", "a bigpool.Workspace", got, "make one with Workspace.for_verify")
    elif isinstance(a.q, torch.Tensor) and a.workspace.part.device != a.q.device:
        remedy = f"make one with Workspace.for_verify(device={str(a.q.device)!r})"
        contract.fault("workspace", f"device {a.q.device}", str(a.workspace.part.device), remedy)


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
    require(0 < page_size < 2**31, "k_cache", "page_size 1..2^31 - 1", f"{page_size}", "page_size counts the slots of a page")
    require(axes["num_pages"] < 2**31, "k_cache", "num_pages below 2^31", f"{axes['num_pages']}", "page ids are int32")
    for name, cache in (("k_cache", a.k_cache), ("v_cache", a.v_cache)):
        _check_span(contract, name, cache, a.slot_axis, cache.shape[-1])


def _check_span(contract: Contract, name: str, tensor: torch.Tensor, slot_axis: int, row: int) -> None:
    span = max(contract.axes["page_size"] - 1, 0) * tensor.stride(slot_axis) + row
    expected, remedy = "one page of one head within 2^31 elements", "make the slots of a page adjacent"
    contract.require(span < 2**31, name, expected, f"{span:,}", remedy)


def _check_scales(contract: Contract, a: Arguments) -> None:
    """Scales of the format: present or absent, fp32, of the right axes, and of one kind for K and V."""
    kinds = []
    for name, scale in (("k_scale", a.k_scale), ("v_scale", a.v_scale)):
        if scale is not None and not isinstance(scale, torch.Tensor):
            contract.fault(name, "None or a tensor", type(scale).__name__, "pass a float32 tensor on q's device")
            continue
        try:
            kind = formats.of(a.k_cache.dtype, scale, name).scales
        except ArgumentError as error:
            contract.faults += error.faults
            continue
        kinds.append("token_head" if kind == "token_head" else "head")
        if scale is not None:
            axes = {"token_head": f"num_pages {a.page_axes}", "head": "num_kv_heads"}.get(kind, "1")
            if _check_scale(contract, name, scale, axes, a.q.device) and kind == "token_head":
                _check_span(contract, name, scale, a.slot_axis, 1)
    if len(set(kinds)) == 2:
        given = ("a scale per token and head" if kind == "token_head" else "none, one, or one per head" for kind in kinds)
        contract.fault("v_scale", "scales of the same kind as k_scale", " and ".join(given), "K and V share a format")


def _check_scale(contract: Contract, name: str, scale: torch.Tensor, axes: str, device: torch.device) -> bool:
    """Dtype, axes and device. Strides are free, also the last one."""
    shape = (1,) if axes == "1" else scale.shape
    bare = torch.empty(shape, dtype=scale.dtype, device="meta")
    remedy = "see docs/formats.md" if scale.dtype == torch.float32 else f"call {name}.float()"
    if not contract.tensor(name, bare, axes, (torch.float32,), remedy):
        return False
    remedy = f"call {name}.to({str(device)!r})"
    return contract.require(scale.device == device, name, f"device {device}", str(scale.device), remedy)


def _check_options(contract: Contract, a: Arguments) -> None:
    device = a.q.device
    for name, value, what in (
        ("alibi_slopes", a.alibi_slopes, "slope"),
        ("sinks", a.sinks, "logit"),
    ):
        if value is not None:
            contract.tensor(name, value, "num_q_heads", (torch.float32,), f"pass one fp32 {what} per query head", device=device)
    if a.tree_mask is not None:
        words = cdiv(a.max_seqlen_q, 32) if isinstance(a.max_seqlen_q, int) else 0
        contract.axes["ceil(max_seqlen_q/32)"] = words
        remedy = "pack bools with bigpool.pack_tree_mask"
        contract.tensor("tree_mask", a.tree_mask, "num_tokens ceil(max_seqlen_q/32)", (torch.int32,), remedy, device=device)
        contract.require(a.causal is True, "tree_mask", "causal=True", f"causal={a.causal!r}", "a tree is a causal order")
    _check_out(contract, a)
    if a.deterministic == "batch" and isinstance(a.max_seqlen_q, int):
        # Tiles that end at page ends leave at most a quarter of a split unused.
        row_tiles = max(cdiv(a.max_seqlen_q * contract.axes["num_q_heads"] // max(contract.axes["num_kv_heads"], 1), 16), 1)
        most = MAX_GRID_YZ // row_tiles * (BATCH_SPLIT_TOKENS * 3 // 4)
        held = contract.axes["max_pages_per_req"] * contract.axes["page_size"]
        expected = f"at most {most} tokens a request in deterministic='batch'"
        contract.require(min(held, MAX_SEQ_LEN) <= most, "block_table", expected, f"{held}", "pass fewer columns or query tokens")


def _check_out(contract: Contract, a: Arguments) -> None:
    device = a.q.device
    if a.out_scale is not None:
        remedy = "pass torch.tensor([scale], device=q.device)"
        if isinstance(a.out_scale, torch.Tensor) and a.out_scale.numel() == 1 and a.out_scale.dtype == torch.float32:
            contract.tensor("out_scale", a.out_scale.reshape(1), "1", (torch.float32,), remedy, device=device)
        else:
            is_tensor = isinstance(a.out_scale, torch.Tensor)
            got = f"{dtype_name(a.out_scale.dtype)} {list(a.out_scale.shape)}" if is_tensor else type(a.out_scale).__name__
            contract.fault("out_scale", "float32 [1]", got, remedy)
    if a.out is None:
        return
    dtypes, remedy = ((a.q.dtype,), "pass torch.empty_like(q)") if a.out_scale is None else (
        FP8_DTYPES, "pass torch.empty_like(q, dtype=torch.float8_e4m3fn)",
    )  # fmt: skip
    contract.tensor("out", a.out, OUT_AXES, dtypes, remedy, device=device, written=True)


def _pages_seen(a: Arguments, count: int, page_size: int, first: int) -> torch.Tensor:
    """Which of the first `count` pages of a request hold a key that a query token sees, the first of which is at `first`."""
    low = 0
    if a.window_size is not None:
        low = first - a.window_size + 1
    if a.chunk_size is not None:
        low = max(low, max(first, 0) // a.chunk_size * a.chunk_size)
    last_key = (torch.arange(count) + 1) * page_size - 1
    return (last_key >= low) | (last_key - page_size + 1 < a.num_sink_tokens)


def check_values(a: Arguments, function: str = NAME) -> None:
    """The checked mode: everything that depends on the contents of the index tensors. Syncs the host."""
    contract = Contract(function)
    require = contract.require
    page_size, num_pages = a.k_cache.shape[a.slot_axis], len(a.k_cache)
    capacity = min(a.block_table.shape[1] * page_size, MAX_SEQ_LEN)
    starts, table = a.cu_seqlens_q.tolist(), a.block_table.cpu()
    require(starts[0] == 0, "cu_seqlens_q", "to start at 0", str(starts[0]), "use exclusive prefix sums of the q_lens")
    expected = f"at most num_tokens={len(a.q)}"
    require(starts[-1] <= len(a.q), "cu_seqlens_q", expected, str(starts[-1]), "pass all query tokens in q")
    for req, seq_len in enumerate(a.seq_lens.tolist()):
        q_len, where = starts[req + 1] - starts[req], f"at request {req}"
        require(q_len >= 0, "cu_seqlens_q", "non-decreasing values", f"{starts[req : req + 2]} {where}", "use prefix sums")
        short = f"{a.max_seqlen_q} {where}"
        require(q_len <= a.max_seqlen_q, "max_seqlen_q", f"at least {q_len}", short, "pass the largest q_len")
        if q_len <= 0:
            continue
        require(seq_len >= q_len, "seq_lens", f"at least q_len={q_len}", f"{seq_len} {where}", "count the new tokens too")
        expected = f"at most {capacity}, which the table holds"
        require(seq_len <= capacity, "seq_lens", expected, f"{seq_len} {where}", "widen block_table")
        used = table[req, : -(-min(max(seq_len, 0), capacity) // page_size)]
        bad = (((used < 0) | (used >= num_pages)) & _pages_seen(a, len(used), page_size, seq_len - q_len)).nonzero()
        if len(bad):
            col, expected = int(bad[0]), f"page ids in [0, num_pages={num_pages})"
            contract.fault("block_table", expected, f"{int(used[col])} at [{req}, {col}]", "allocate the page or fix the table")
    contract.finish()
