"""The plain-torch twin of every op: what CPU tensors run, and in float64 the oracle that kernels are judged by."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .tuning import MAX_SEQ_LEN

if TYPE_CHECKING:
    from collections.abc import Iterator

LOG2_E, LN2 = 1.4426950408889634, 0.6931471805599453
# (dims of a step, from the last dim on, rounding sums toward zero): the orders of the baseline. Each costs time, and few
# keys need them most. NVIDIA's matrix units round toward zero: Fasi, Higham, Mikaitis and Pranesh 2021 (PeerJ CS 7:e330).
ORDERS = ((4, False, False), (16, True, False))
ORDERS_OF_FEW_KEYS = (*ORDERS, (1, False, False), (1, True, False), (16, False, True), (16, True, True))
FEW_KEYS = 1_024


class _Row(NamedTuple):
    """One query token: its index, and the keys and values [visible, num_kv_heads, head_dim] that it sees."""

    token: int
    k: torch.Tensor
    v: torch.Tensor


def gather_kv(cache: torch.Tensor, block_table_row: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` rows of one request, [length, num_kv_heads, head_dim], from an NHD cache.

    `cache` [num_pages, page_size, num_kv_heads, head_dim], any strides; `block_table_row` int32 [max_pages]. Rows of a page
    id outside the pool are NaN. Syncs the host where the table is on a device.
    """
    num_pages, page_size = cache.shape[:2]
    rows = cache.new_zeros((length, *cache.shape[2:]))
    for col in range((length + page_size - 1) // page_size):
        begin, end = col * page_size, min((col + 1) * page_size, length)
        page_idx = int(block_table_row[col])
        if 0 <= page_idx < num_pages:
            rows[begin:end] = cache[page_idx, : end - begin]
        else:
            rows[begin:end] = float("nan")
    return rows


def verify_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    kv_layout: str = "NHD",
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `bigpool.verify_attention`: same arguments, same meaning, no input changed; syncs the host.

    `compute_dtype` float64 makes it the oracle: the output is then float64 too. Returns (out, lse).
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if out is None:
        dtype = torch.float64 if compute_dtype == torch.float64 else q.dtype
        out = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.promote_types(torch.float32, compute_dtype), device=q.device)
    for row in _visible_rows(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, kv_layout):
        if not len(row.k):
            out[row.token] = 0
            continue
        heads = q[row.token].to(compute_dtype).view(row.k.shape[1], -1, q.shape[-1])
        sums, logs = _attend(heads, row.k.to(compute_dtype), row.v.to(compute_dtype), scale)
        out[row.token] = sums.flatten(0, 1).to(out.dtype)
        lse[row.token] = logs.flatten()
    return out, lse


def verify_attention_baseline(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    kv_layout: str = "NHD",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same-dtype reordered reference of the error rule, (out, lse).

    What a right kernel of that dtype may do, in other orders: keys last to first, dot products summed in fp32 in steps of 16,
    of 4 (as the narrowest matrix units do) or one by one, from either end, to nearest or toward zero, exponentials in base 2,
    probabilities rounded to the cache's dtype before they meet V. Each row is that of the order that comes out farthest from
    float64, since few numbers in one order can be right by luck. Its distance from the float64 oracle is the measure of a
    kernel's.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    for row in _visible_rows(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, kv_layout):
        if not len(row.k):
            continue
        heads = q[row.token].view(row.k.shape[1], -1, q.shape[-1])
        exact = _attend(heads.double(), row.k.double(), row.v.double(), scale)
        orders = ORDERS_OF_FEW_KEYS if len(row.k) <= FEW_KEYS else ORDERS
        tries = [_attend_rounded(heads, row.k.flip(0), row.v.flip(0), scale, *order) for order in orders]
        out[row.token] = max((sums for sums, _ in tries), key=lambda sums: _distance(sums, exact[0])).flatten(0, 1)
        lse[row.token] = max((logs for _, logs in tries), key=lambda logs: _distance(logs, exact[1])).flatten()
    return out, lse


def _attend(heads: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [kv_heads, group, head_dim], lse [kv_heads, group]) of one token in the dtype of its arguments."""
    scores = torch.einsum("hgd,nhd->hgn", heads, k) * scale
    return torch.einsum("hgn,nhd->hgd", torch.softmax(scores, -1), v), torch.logsumexp(scores, -1)


def _attend_rounded(
    heads: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, step: int, flip: bool, toward_zero: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_attend` with the roundings of a kernel whose dot products advance `step` dims at a time."""
    queries, keys = heads.float(), k.float()
    if flip:
        queries, keys = queries.flip(-1), keys.flip(-1)
    scores = queries.new_zeros(*queries.shape[:2], len(keys))
    for part_q, part_k in zip(torch.split(queries, step, -1), torch.split(keys, step, -1), strict=True):
        if toward_zero:
            scores = _add_toward_zero(scores, torch.einsum("hgd,nhd->hgn", part_q.double(), part_k.double()))
        else:
            scores += torch.einsum("hgd,nhd->hgn", part_q, part_k)
    scores *= scale * LOG2_E
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp2(scores - top)
    total = weights.sum(-1, keepdim=True)
    sums = torch.einsum("hgn,nhd->hgd", weights.to(v.dtype).float(), v.float())
    return (sums / total).to(heads.dtype), ((top + torch.log2(total)) * LN2).squeeze(-1)


def _add_toward_zero(sums: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    exact = sums.double() + terms
    rounded = exact.float()
    too_far = rounded.double().abs() > exact.abs()
    return torch.where(too_far, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)


def _distance(values: torch.Tensor, exact: torch.Tensor) -> float:
    return float((values.double() - exact).abs().max())


def _visible_rows(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kv_layout: str,
) -> Iterator[_Row]:
    if kv_layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    capacity = min(block_table.shape[1] * k_cache.shape[1], MAX_SEQ_LEN)
    starts = cu_seqlens_q.tolist()
    table = block_table.cpu()
    for req, seq_len in enumerate(seq_lens.tolist()):
        q_len = starts[req + 1] - starts[req]
        if q_len <= 0:
            continue
        length = min(max(seq_len, 0), capacity)
        k = gather_kv(k_cache, table[req], length)
        v = gather_kv(v_cache, table[req], length)
        for i in range(q_len):
            visible = max(length - q_len + i + 1, 0)
            yield _Row(starts[req] + i, k[:visible], v[:visible])
