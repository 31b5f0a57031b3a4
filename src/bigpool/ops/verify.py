"""Verify attention: a few query tokens per request over a paged KV cache."""

from __future__ import annotations

from typing import Any

import torch

from .. import reference
from .._check import Contract
from .._device import device_props
from ..errors import BackendError
from ..tuning import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_NUM_SPLITS,
    MAX_SEQ_LEN,
    MAX_SEQLEN_Q,
    MIN_HEAD_DIM,
    PART_EXTRA,
    next_power_of_2,
    plan_verify,
)
from ..workspace import Workspace, carve

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BACKENDS = ("auto", "triton", "torch")
NAME = "verify_attention"


def verify_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    max_seqlen_q: int,
    kv_layout: str = "NHD",
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    check: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last few tokens of each request over its paged KV cache, the keys of one request split over programs.

    Query token i of a request with q_len query tokens sits at position `seq_len - q_len + i` and sees positions up to its
    own (causal, bottom-right aligned). q_len 1 is decode. The keys of the query tokens must be in the cache already.

    Args:
        q: [num_tokens, num_q_heads, head_dim], bf16, fp16 or fp32; requests one after another; any strides between tokens
            and heads. head_dim 16..512, padded inside to a power of two.
        k_cache, v_cache: NHD [num_pages, page_size, num_kv_heads, head_dim] or HND [num_pages, num_kv_heads, page_size,
            head_dim], q's dtype. Any page size, any strides but 1 in the last axis, which may differ between the two; one page
            of one head spans fewer than 2^31 elements. The number of pages has no limit below 2^31.
        block_table: int32 [num_reqs, max_pages_per_req], page ids. Entries past the end of a request are not read.
        seq_lens: int32 [num_reqs], the length of each request *including* its new tokens, at most 2^31 - 2^16.
        cu_seqlens_q: int32 [num_reqs + 1], exclusive prefix sums of the q_lens; non-decreasing.
        max_seqlen_q: the largest q_len, a host integer up to 256; what lies beyond it in a longer request is undefined.
        softmax_scale: head_dim ** -0.5 if None.
        num_splits: programs per request and kv head; None chooses from sizes alone, so that a captured graph stays valid.
        workspace: scratch, see Workspace.for_verify; None allocates per call.
        out: written in place if given, like q, no element twice; rows that belong to no request are not written.
        return_lse: also return the natural log of the sum of exponentials, fp32 [num_tokens, num_q_heads].
        check: look at the values of block_table, seq_lens and cu_seqlens_q too. Syncs the host.
        backend: "auto": Triton for CUDA tensors, the plain-torch twin for CPU tensors. "triton" takes CPU tensors when Triton
            runs its interpreter (TRITON_INTERPRET=1; fp16 and fp32 only, since its bf16 arithmetic is wrong). "torch": the twin.

    Returns:
        out like q, or (out, lse). A query token that sees no key (seq_len 0, or seq_len < q_len) gives 0 and lse -inf. A
        token that sees a key whose page id is outside the pool gives NaN; such a page is never read. A longer seq_len than
        the table holds counts as what it holds. Rows of `out` and `lse` that belong to no request are undefined.

    Deterministic run to run for given sizes. Does not sync the host unless `check`; CUDA-graph capturable. NaN or infinity in
    keys or values that a token does not see never reaches its row; in values of the newest keys it makes all of a row that
    sees them NaN.

    Not differentiable: out and lse carry no gradient.

    Raises:
        ArgumentError: listing every fault.  WorkspaceError: the workspace is too small, and by how much.
        BackendError: the backend cannot run here.

    Source: online softmax, Milakov and Gimelshein 2018 (arXiv 1805.02867); split-KV merge, FlashDecoding (2023).
    """
    contract = Contract(NAME)
    shape_ok = _check_tensors(contract, q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, kv_layout)
    _check_scalars(contract, max_seqlen_q, num_splits, softmax_scale, backend)
    _check_workspace(contract, workspace, q)
    if shape_ok:
        _check_shapes(contract, q, k_cache, v_cache, kv_layout, out)
    contract.finish()
    if check:
        _check_values(q, k_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, kv_layout)

    k_pages, v_pages = (k_cache, v_cache) if kv_layout == "NHD" else (k_cache.transpose(1, 2), v_cache.transpose(1, 2))
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    part = None if workspace is None else workspace.part
    tensors = (q, k_pages, v_pages, block_table, seq_lens, cu_seqlens_q, out, lse, part)
    arguments = (*tensors, max_seqlen_q, num_splits or 0, scale)
    if backend == "torch":
        _run_twin(*arguments)
    elif backend == "triton" and q.device.type == "cpu":
        require_interpreter(q.dtype)
        _launch(*arguments)
    else:
        torch.ops.bigpool.verify_attention(*arguments)
    return (out, lse) if return_lse else out


def require_interpreter(dtype: torch.dtype) -> None:
    """Raises BackendError unless Triton's interpreter is on and computes `dtype` rightly."""
    try:
        import triton
    except ImportError as error:
        raise BackendError("backend: expected triton to be installed, got none; pip install 'bigpool[kernels]'") from error
    if not triton.knobs.runtime.interpret:
        raise BackendError(
            "backend: expected CUDA tensors or Triton's interpreter, got CPU tensors; "
            "set TRITON_INTERPRET=1 before triton is imported, or pass backend='torch'"
        )
    if dtype == torch.bfloat16:
        raise BackendError(
            "backend: expected float16|float32 in Triton's interpreter, got bfloat16, which it computes wrongly; call .half()"
        )


def _check_tensors(
    contract: Contract,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kv_layout: str,
) -> bool:
    """Dtypes, ranks, axes, devices and unit strides; False leaves the axes too unsure for more checks."""
    if kv_layout not in ("NHD", "HND"):
        contract.fault("kv_layout", "'NHD' or 'HND'", repr(kv_layout), "name the order of the axes of a page")
        return False
    page_axes = "page_size num_kv_heads" if kv_layout == "NHD" else "num_kv_heads page_size"
    cache_axes = f"num_pages {page_axes} head_dim"
    ok = contract.tensor("q", q, "num_tokens num_q_heads head_dim", CACHE_DTYPES, "flatten the tokens of all requests")
    device = q.device if ok else None
    same = (q.dtype,) if ok else CACHE_DTYPES
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        ok &= contract.tensor(name, cache, cache_axes, same, "caches share q's dtype, head_dim and shape", device=device)
    for name, value, axes in (
        ("block_table", block_table, "num_reqs max_pages_per_req"),
        ("seq_lens", seq_lens, "num_reqs"),
        ("cu_seqlens_q", cu_seqlens_q, "num_reqs+1"),
    ):
        remedy = "pass one entry per request"
        if isinstance(value, torch.Tensor) and value.dtype != torch.int32:
            remedy = f"call {name}.int()"
        ok &= contract.tensor(name, value, axes, (torch.int32,), remedy, device=device)
    return ok


def _check_scalars(
    contract: Contract, max_seqlen_q: int, num_splits: int | None, softmax_scale: float | None, backend: str
) -> None:
    require = contract.require
    seqlen_ok = isinstance(max_seqlen_q, (int, torch.SymInt)) and 0 <= max_seqlen_q <= MAX_SEQLEN_Q
    splits_ok = num_splits is None or (isinstance(num_splits, int) and 1 <= num_splits <= MAX_NUM_SPLITS)
    scale_ok = softmax_scale is None or isinstance(softmax_scale, (int, float, torch.SymFloat))
    long = "verify is for a few tokens; split longer queries"
    require(seqlen_ok, "max_seqlen_q", f"an int 0..{MAX_SEQLEN_Q}", f"{max_seqlen_q}", long)
    require(splits_ok, "num_splits", f"None or an int 1..{MAX_NUM_SPLITS}", f"{num_splits}", "None chooses")
    require(scale_ok, "softmax_scale", "None or a number", f"{softmax_scale!r}", "None is head_dim ** -0.5")
    require(backend in BACKENDS, "backend", " or ".join(map(repr, BACKENDS)), repr(backend), "'auto' chooses")


def _check_workspace(contract: Contract, workspace: Any, q: Any) -> None:
    if workspace is None:
        return
    if not isinstance(workspace, Workspace):
        contract.fault("workspace", "a bigpool.Workspace", type(workspace).__name__, "make one with Workspace.for_verify")
    elif isinstance(q, torch.Tensor) and workspace.part.device != q.device:
        remedy = f"make one with Workspace.for_verify(device={str(q.device)!r})"
        contract.fault("workspace", f"device {q.device}", str(workspace.part.device), remedy)


def _check_shapes(
    contract: Contract, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_layout: str, out: torch.Tensor | None
) -> None:
    axes, require = contract.axes, contract.require
    head_dim, q_heads, kv_heads, page_size = (axes[axis] for axis in ("head_dim", "num_q_heads", "num_kv_heads", "page_size"))
    dim_ok = MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM
    require(dim_ok, "q", f"head_dim {MIN_HEAD_DIM}..{MAX_HEAD_DIM}", str(head_dim), "split or pad the heads")
    heads_ok = 0 < kv_heads <= MAX_HEADS and q_heads % max(kv_heads, 1) == 0 and q_heads <= MAX_HEADS
    expected = f"num_q_heads a multiple of num_kv_heads, at most {MAX_HEADS}"
    require(heads_ok, "q", expected, f"{q_heads} and {kv_heads}", "repeat or drop heads, or split them over calls")
    require(0 < page_size < 2**31, "k_cache", "page_size 1..2^31 - 1", f"{page_size}", "page_size counts the slots of a page")
    require(axes["num_pages"] < 2**31, "k_cache", "num_pages below 2^31", str(axes["num_pages"]), "page ids are int32")
    slot_axis = 1 if kv_layout == "NHD" else 2
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        span = max(page_size - 1, 0) * cache.stride(slot_axis) + head_dim
        require(span < 2**31, name, "one page of one head within 2^31 elements", f"{span:,}", "make the slots of a page adjacent")
    if out is not None:
        out_axes = "num_tokens num_q_heads head_dim"
        contract.tensor("out", out, out_axes, (q.dtype,), "pass torch.empty_like(q)", device=q.device, written=True)


def _check_values(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    kv_layout: str,
) -> None:
    """The checked mode: everything that depends on the contents of the index tensors."""
    contract = Contract(NAME)
    require = contract.require
    page_size = k_cache.shape[1 if kv_layout == "NHD" else 2]
    capacity = min(block_table.shape[1] * page_size, MAX_SEQ_LEN)
    starts, table = cu_seqlens_q.tolist(), block_table.cpu()
    require(starts[0] == 0, "cu_seqlens_q", "to start at 0", str(starts[0]), "use exclusive prefix sums of the q_lens")
    require(starts[-1] <= len(q), "cu_seqlens_q", f"at most num_tokens={len(q)}", str(starts[-1]), "pass all query tokens in q")
    for req, seq_len in enumerate(seq_lens.tolist()):
        q_len, where = starts[req + 1] - starts[req], f"at request {req}"
        require(q_len >= 0, "cu_seqlens_q", "non-decreasing values", f"{starts[req : req + 2]} {where}", "use prefix sums")
        require(q_len <= max_seqlen_q, "max_seqlen_q", f"at least {q_len}", f"{max_seqlen_q} {where}", "pass the largest q_len")
        if q_len <= 0:
            continue
        require(seq_len >= q_len, "seq_lens", f"at least q_len={q_len}", f"{seq_len} {where}", "count the new tokens too")
        require(
            seq_len <= capacity,
            "seq_lens",
            f"at most {capacity}, which the table holds",
            f"{seq_len} {where}",
            "widen block_table",
        )
        used = table[req, : -(-min(max(seq_len, 0), capacity) // page_size)]
        bad = ((used < 0) | (used >= len(k_cache))).nonzero()
        if len(bad):
            col, expected = int(bad[0]), f"page ids in [0, num_pages={len(k_cache)})"
            contract.fault("block_table", expected, f"{int(used[col])} at [{req}, {col}]", "allocate the page or fix the table")
    contract.finish()


@torch.no_grad()
def _launch(
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
    kernels: Any = None,
) -> None:
    """Plans and launches; caches are seen as NHD. `num_splits` 0 chooses. `kernels`: a version of bigpool.kernels.verify."""
    if kernels is None:
        from ..kernels import verify

        kernels = verify

    num_tokens, num_q_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, _ = k_pages.shape
    num_reqs, max_pages = block_table.shape
    if num_reqs == 0 or num_tokens == 0 or max_seqlen_q == 0:
        return
    max_seq_len = min(max_pages * page_size, MAX_SEQ_LEN)
    plan = plan_verify(
        device_props(q.device), num_reqs=num_reqs, max_seqlen_q=max_seqlen_q, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, itemsize=q.element_size(), page_size=page_size, max_seq_len=max_seq_len, num_splits=num_splits or None,
    )  # fmt: skip
    config, splits = plan.config, plan.num_splits
    dest, dest_strides = out, (*out.stride()[:2], 0)
    if splits > 1:
        shape = (num_tokens, num_q_heads, splits, head_dim + PART_EXTRA)
        dest = torch.empty(shape, dtype=torch.float32, device=q.device) if scratch is None else carve(scratch, shape)
        dest_strides = dest.stride()[:3]
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    kernels.verify_partial_kernel[(num_reqs, splits * plan.row_tiles, num_kv_heads)](
        q, k_pages, v_pages, dest, lse, block_table, seq_lens, cu_seqlens_q,
        softmax_scale * reference.LOG2_E, num_pages, max_seq_len,
        *q.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3], *dest_strides, lse.stride(0), block_table.stride(0),
        GROUP=num_q_heads // num_kv_heads, HEAD_DIM=head_dim, HEAD_DIM_PAD=plan.head_dim_pad, PAGE_SIZE=page_size,
        TILE=config.tile, TILES_PER_PAGE=plan.tiles_per_page, BLOCK_M=config.block_m, ROW_TILES=plan.row_tiles, **options,
    )  # fmt: skip
    if splits > 1:
        kernels.verify_merge_kernel[(num_reqs, max_seqlen_q, num_q_heads)](
            dest, out, lse, cu_seqlens_q, splits, *dest_strides, *out.stride()[:2], lse.stride(0),
            HEAD_DIM=head_dim, HEAD_DIM_PAD=plan.head_dim_pad,
            SPLITS_PAD=next_power_of_2(splits), SPLIT_TILE=min(next_power_of_2(splits), 16),
        )  # fmt: skip


@torch.no_grad()
def _run_twin(
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
) -> None:
    tensors = (q, k_pages, v_pages, block_table, seq_lens, cu_seqlens_q)
    lse.copy_(reference.verify_attention(*tensors, softmax_scale=softmax_scale, out=out)[1])


def _fake(*_arguments: Any) -> None:
    """Writes in place and returns nothing: there is no shape to infer."""


def _register() -> Any:
    """The torch operator behind `verify_attention`: what torch.compile sees, and where CPU tensors meet the twin."""
    library: Any = torch.library.Library("bigpool", "DEF")  # type: ignore[no-untyped-call]
    library.define(
        "verify_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, "
        "Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? scratch, int max_seqlen_q, int num_splits, float softmax_scale) -> ()",
        tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag),
    )
    library.impl("verify_attention", _launch, "CUDA")
    library.impl("verify_attention", _run_twin, "CPU")
    torch.library.register_fake("bigpool::verify_attention", _fake, lib=library)
    return library


_library = _register()
