"""The plain-torch twin of prefill attention, blocks of query tokens at a time; in float64 the oracle of its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from . import formats
from .tuning import MAX_SEQ_LEN

LOG2_E, LN2 = 1.4426950408889634, 0.6931471805599453
# Scores that are held at a time.
MAX_SCORES = 1 << 23
# (dims of a step, from the last dim on, rounding sums toward zero): the orders of the baseline, as in verify attention.
ORDERS = ((4, False, False), (16, True, False))
ORDERS_OF_FEW_KEYS = (*ORDERS, (1, False, False), (1, True, False), (16, False, True), (16, True, True))
FEW_KEYS = 1_024


@dataclass(frozen=True)
class _Block:
    """Query tokens `rows` of one request, and the keys that they see.

    `q` [num_kv_heads, tokens * group, head_dim] in `dtype`; `k` [keys, num_kv_heads, head_dim]: codes where there are scales,
    which are q_scale [num_kv_heads, tokens * group, 1] and k_scale [num_kv_heads, 1, keys], and then `dot_mean` [num_kv_heads,
    tokens * group, 1] is what the mean of K took from the products; `seen` [tokens * group, keys].
    """

    rows: slice
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_scale: torch.Tensor | None
    k_scale: torch.Tensor | None
    dot_mean: torch.Tensor
    seen: torch.Tensor


@torch.no_grad()
def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    kv_layout: str = "NHD",
    softmax_scale: float | None = None,
    qk: str = "exact",
    causal: bool = True,
    window_size: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `bigpool.prefill_attention`: same meaning, no input changed; syncs the host. Returns (out, lse).

    `compute_dtype` float64 makes it the oracle, whose output is float64 too; with qk="int8" an oracle of what follows after the
    rounding to codes, with qk="exact" also the truth that int8 is compared with.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    wide = compute_dtype == torch.float64
    if out is None:
        out = torch.zeros(q.shape, dtype=torch.float64 if wide else q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64 if wide else torch.float32, device=q.device)
    rules = (causal, window_size)
    for block in _blocks(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, kv_layout, qk, rules, compute_dtype):
        scores = block.q @ block.k.permute(1, 2, 0)
        sums, logs = _softmax(_capped(_scaled(scores, block, scale), softcap), block)
        out[block.rows] = _by_token(sums, block).to(out.dtype)
        lse[block.rows] = _by_token(logs, block).squeeze(-1)
    return out, lse


@torch.no_grad()
def prefill_attention_baseline(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    kv_layout: str = "NHD",
    softmax_scale: float | None = None,
    qk: str = "exact",
    causal: bool = True,
    window_size: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same-dtype reordered reference of the error rule, (out, lse).

    What a right kernel of that dtype may do, in other orders: dot products summed in fp32 in steps of 16, of 4 or one by one,
    from either end, to nearest or toward zero, exponentials in base 2, weights rounded to q's dtype before they meet V. Each
    row is that of the order that comes out farthest from float64.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    rules = (causal, window_size)
    for block in _blocks(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, kv_layout, qk, rules, torch.float32):
        exact = _scaled(block.q.double() @ block.k.double().permute(1, 2, 0), block, scale)
        want, want_logs = _softmax(_capped(exact, softcap), block)
        far, far_logs = want.to(q.dtype).double(), want_logs.float().double()
        for order in _orders(block):
            scores = _capped(_scaled(_rounded_scores(block.q, block.k, *order), block, scale), softcap)
            got, logs = _softmax(scores, block, rounded_to=q.dtype)
            far = _farther(got.to(q.dtype).double(), far, want)
            far_logs = _farther(logs.double(), far_logs, want_logs)
        out[block.rows] = _by_token(far, block).to(q.dtype)
        lse[block.rows] = _by_token(far_logs, block).squeeze(-1).float()
    return out, lse


def quantise_keys(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [keys, num_kv_heads, head_dim] in int8, scales [keys, num_kv_heads], mean) of keys less their mean, fp32.

    The mean counts what is not finite as 0. A key with NaN or infinity has scale NaN.
    """
    x = k.float()
    mean = (x.double().masked_fill(~x.isfinite(), 0.0).sum(0) / max(len(x), 1)).float()
    return *_int8(x - mean), mean


def _int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = formats.named("int8").quantize(rows)
    assert scales is not None
    return codes, scales


def _blocks(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kv_layout: str,
    qk: str,
    rules: tuple[bool, int | None],
    dtype: torch.dtype,
) -> Iterator[_Block]:
    if kv_layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    causal, window_size = rules
    kv_heads = k_cache.shape[2]
    capacity = min(block_table.shape[1] * k_cache.shape[1], MAX_SEQ_LEN)
    starts, table = cu_seqlens_q.tolist(), block_table.cpu()
    for req, seq_len in enumerate(seq_lens.tolist()):
        q_len, length = starts[req + 1] - starts[req], min(max(seq_len, 0), capacity)
        if q_len <= 0:
            continue
        chunk_start = length - q_len
        low = 0 if window_size is None else max(max(chunk_start, 0) - window_size + 1, 0)
        k, v = (_gather(cache, table[req], low, length) for cache in (k_cache, v_cache))
        q_rows = q[starts[req] : starts[req + 1]]
        k_scale, mean = None, k.new_zeros(k.shape[1:])
        if qk == "int8":
            k, k_scale, mean = quantise_keys(k)
            k_scale = k_scale.T.unsqueeze(1).to(dtype)
        k, v = k.to(dtype), v.to(dtype)
        step = max(MAX_SCORES // max(q.shape[1] * (length - low), 1), 1)
        positions = torch.arange(low, length, device=q.device)
        for first in range(0, q_len, step):
            tokens = q_rows[first : first + step]
            at = torch.arange(chunk_start + first, chunk_start + first + len(tokens), device=q.device)
            seen = _seen(positions, at, causal, window_size).repeat_interleave(q.shape[1] // kv_heads, 0)
            rows = slice(starts[req] + first, starts[req] + first + len(tokens))
            heads = tokens.reshape(len(tokens), kv_heads, -1, q.shape[-1]).transpose(0, 1).flatten(1, 2)
            dot_mean, q_scale = heads.to(dtype) @ mean.to(dtype).unsqueeze(-1), None
            if qk == "int8":
                heads, q_scale = _int8(heads.float())
                q_scale = q_scale.unsqueeze(-1).to(dtype)
            yield _Block(rows, heads.to(dtype), k, v, q_scale, k_scale, dot_mean, seen)


def _seen(positions: torch.Tensor, at: torch.Tensor, causal: bool, window_size: int | None) -> torch.Tensor:
    """[tokens, keys]"""
    seen = torch.ones(len(at), len(positions), dtype=torch.bool, device=at.device)
    if causal:
        seen &= positions <= at[:, None]
    if window_size is not None:
        seen &= positions > at.clamp(min=0)[:, None] - window_size
    return seen


def _gather(cache: torch.Tensor, block_table_row: torch.Tensor, low: int, length: int) -> torch.Tensor:
    """Rows low..length of one request of an NHD cache; NaN where the page is not in the pool."""
    num_pages, page_size = cache.shape[:2]
    rows = cache.new_full((length - low, *cache.shape[2:]), float("nan"))
    for col in range(low // page_size, (length + page_size - 1) // page_size):
        begin, end = max(col * page_size, low), min((col + 1) * page_size, length)
        page_idx = int(block_table_row[col])
        if 0 <= page_idx < num_pages:
            rows[begin - low : end - low] = cache[page_idx, begin - col * page_size : end - col * page_size]
    return rows


def _scaled(scores: torch.Tensor, block: _Block, scale: float) -> torch.Tensor:
    """In units of log2."""
    if block.q_scale is None or block.k_scale is None:
        return scores * (scale * LOG2_E)
    return scores * block.k_scale * (block.q_scale * (scale * LOG2_E)) + block.dot_mean * (scale * LOG2_E)


def _capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """c tanh(s / c), by exp2."""
    return scores if softcap is None else softcap * LOG2_E * (1 - 2 / (1 + torch.exp2(scores * (2 / softcap))))


def _softmax(scores: torch.Tensor, block: _Block, rounded_to: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [num_kv_heads, rows, head_dim], lse [num_kv_heads, rows, 1]); weights rounded if asked, before they meet V."""
    scores = scores.masked_fill(~block.seen, float("-inf"))
    if not scores.shape[-1]:
        return scores.new_zeros(*scores.shape[:2], block.v.shape[-1]), scores.new_full((*scores.shape[:2], 1), float("-inf"))
    top = scores.amax(-1, keepdim=True)
    shift = torch.where(top == float("-inf"), 0.0, top)
    weights = torch.exp2(scores - shift)
    total = weights.sum(-1, keepdim=True)
    if rounded_to is not None:
        weights = weights.to(rounded_to).to(scores.dtype)
    v = block.v.transpose(0, 1).to(scores.dtype)
    sums = weights @ v.nan_to_num(0.0, 0.0, 0.0)
    finite = v.isfinite()
    if not finite.all():
        # 0 * NaN is NaN: only the rows that see a bad value get it.
        sees_bad = block.seen.to(scores.dtype) @ (~finite).to(scores.dtype) > 0
        sums = sums.masked_fill(sees_bad, float("nan"))
    return sums / torch.where(total == 0, 1.0, total), (top + torch.log2(total)) * LN2


def _by_token(rows: torch.Tensor, block: _Block) -> torch.Tensor:
    """[num_kv_heads, tokens * group, n] -> [tokens, num_q_heads, n]"""
    tokens = block.rows.stop - block.rows.start
    return rows.reshape(len(rows), tokens, -1, rows.shape[-1]).transpose(0, 1).flatten(1, 2)


def _orders(block: _Block) -> tuple[tuple[int, bool, bool], ...]:
    """Products of codes are exact in every order."""
    if block.q_scale is not None:
        return ((block.q.shape[-1], False, False),)
    return ORDERS_OF_FEW_KEYS if len(block.k) <= FEW_KEYS else ORDERS


def _rounded_scores(q: torch.Tensor, k: torch.Tensor, step: int, flip: bool, toward_zero: bool) -> torch.Tensor:
    if flip:
        q, k = q.flip(-1), k.flip(-1)
    scores = q.new_zeros(*q.shape[:2], len(k))
    for part_q, part_k in zip(torch.split(q, step, -1), torch.split(k, step, -1), strict=True):
        if not toward_zero:
            scores += part_q @ part_k.permute(1, 2, 0)
            continue
        exact = scores.double() + part_q.double() @ part_k.double().permute(1, 2, 0)
        scores = exact.float()
        too_far = scores.double().abs() > exact.abs()
        scores = torch.where(too_far, torch.nextafter(scores, torch.zeros_like(scores)), scores)
    return scores


def _farther(a: torch.Tensor, b: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Row by row, whichever of `a` and `b` has the largest error."""
    errors = ((x - want).abs().nan_to_num(nan=0.0).amax(-1, keepdim=True) for x in (a, b))
    return torch.where(torch.gt(*errors), a, b)
