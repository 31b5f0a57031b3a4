"""The plain-torch twin of prefill attention, blocks of query tokens at a time; in float64 the oracle of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import formats
from .reference_logits import LOG2_E, soft_capped
from .reference_prefill_keys import EXACT_KEYS, Keys, Values, gather, keep_keys, round_rows, rounded_values, stored_rows
from .tuning import MAX_SEQ_LEN

LN2 = 0.6931471805599453
# Scores that are held at a time.
MAX_SCORES = 1 << 23
# (dims of a step, from the last dim on, rounding sums toward zero): the orders of the baseline, as in verify attention.
ORDERS = ((4, False, False), (16, True, False))
ORDERS_OF_FEW_KEYS = (*ORDERS, (1, False, False), (1, True, False), (16, False, True), (16, True, True))
FEW_KEYS = 1_024
# Weights of fp8 are 2^8 times the exponential.
FP8_SHIFT = 8
Dot = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Block:
    """Query tokens `rows` of one request: q [num_kv_heads, tokens * group, head_dim] in its dtype, the keys and values of the
    request, and which of these each row sees, [tokens * group, keys]; `sinks` [num_kv_heads, tokens * group, 1] or None."""

    rows: slice
    q: torch.Tensor
    keys: Keys
    values: Values
    seen: torch.Tensor
    sinks: torch.Tensor | None


@torch.no_grad()
def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `bigpool.prefill_attention`: same meaning, no input changed; syncs the host. Returns (out, lse).

    `options`: kv_layout, qk, pv, k_scale, v_scale, sinks, causal, window_size, num_sink_tokens; `kept`: codes and scales of a
    KeyCodes, whose new keys are written; `means`: fp32 [num_reqs, num_kv_heads, head_dim], what qk="int8" takes from the keys of
    each request, for a kernel's own: it sums in another order, and a code whose key is half way between two comes out either way.
    `compute_dtype` float64 makes it the oracle, whose output is float64 too: in modes of 8 bits of what follows after the
    rounding of q, K and V to codes, with both modes exact also the truth that these are compared with.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    wide = compute_dtype == torch.float64
    if out is None:
        out = torch.zeros(q.shape, dtype=torch.float64 if wide else q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64 if wide else torch.float32, device=q.device)
    for block in _blocks(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, **options):
        scores = _true_scores(block, scale, compute_dtype)
        sums, logs = _softmax(_capped(scores, softcap), block)
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
    softmax_scale: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same-dtype reordered reference of the error rule, (out, lse).

    What a right kernel of that dtype may do, in other orders: dot products summed in fp32 in steps of 16, of 4 or one by one,
    from either end, to nearest or toward zero, exponentials in base 2, weights rounded to q's dtype, or to e4m3, before they meet
    V. Codes of a quantised cache enter the products as they are, scales of V go into the exponent. Each row is that of the order
    that comes out farthest from float64.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    for block in _blocks(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, **options):
        want, want_logs = _softmax(_capped(_true_scores(block, scale, torch.float64), softcap), block)
        far, far_logs = want.to(q.dtype).double(), want_logs.float().double()
        for order in _orders(block):
            scores = _stored_scores(block, scale, lambda a, b, order=order: _rounded_scores(a, b, *order))  # type: ignore[misc]
            got, logs = _rounded_softmax(_capped(scores, softcap), block, q.dtype)
            far = _farther(got.to(q.dtype).double(), far, want)
            far_logs = _farther(logs.double(), far_logs, want_logs)
        out[block.rows] = _by_token(far, block).to(q.dtype)
        lse[block.rows] = _by_token(far_logs, block).squeeze(-1).float()
    return out, lse


def _blocks(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    kv_layout: str = "NHD",
    qk: str = "exact",
    pv: str = "exact",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
    means: torch.Tensor | None = None,
    causal: bool = True,
    window_size: int | None = None,
    num_sink_tokens: int = 0,
) -> Iterator[_Block]:
    if kv_layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        k_scale, v_scale = (s.transpose(1, 2) if s is not None and s.dim() == 3 else s for s in (k_scale, v_scale))
    kv_heads = k_cache.shape[2]
    capacity = min(block_table.shape[1] * k_cache.shape[1], MAX_SEQ_LEN)
    starts, table = cu_seqlens_q.tolist(), block_table.to(q.device)
    for req, seq_len in enumerate(seq_lens.tolist()):
        q_len, length = starts[req + 1] - starts[req], min(max(seq_len, 0), capacity)
        if q_len <= 0:
            continue
        chunk_start = length - q_len
        low = 0 if window_size is None else max(max(chunk_start, 0) - window_size + 1, 0)
        positions = torch.arange(low, length, device=q.device)
        if low:
            positions = torch.cat((torch.arange(min(num_sink_tokens, low), device=q.device), positions))
        k, v = (
            stored_rows(k_cache, k_scale, table[req], positions, True),
            stored_rows(v_cache, v_scale, table[req], positions, False),
        )
        keys = Keys(k)
        if kept is not None:
            keep_keys(k_cache, *kept, table[req], length, q_len)
            codes, scales = (gather(part, table[req], positions)[0] for part in kept)
            keys = Keys(k, codes, scales, keys.head_mean(), min(EXACT_KEYS, length))
        elif qk == "int8":
            keys = Keys(k, *keys.coded(None if means is None else means[req]))
        values = Values(v) if pv == "exact" else rounded_values(v)
        step = max(MAX_SCORES // max(q.shape[1] * len(positions), 1), 1)
        for first in range(0, q_len, step):
            tokens = q[starts[req] + first : starts[req] + min(first + step, q_len)]
            at = torch.arange(chunk_start + first, chunk_start + first + len(tokens), device=q.device)
            seen = _seen(positions, at, causal, window_size, num_sink_tokens).repeat_interleave(q.shape[1] // kv_heads, 0)
            rows = slice(starts[req] + first, starts[req] + first + len(tokens))
            heads = tokens.reshape(len(tokens), kv_heads, -1, q.shape[-1]).transpose(0, 1).flatten(1, 2)
            logits = None if sinks is None else sinks.view(kv_heads, -1, 1).repeat(1, len(tokens), 1)
            yield _Block(rows, heads, keys, values, seen, logits)


def _seen(positions: torch.Tensor, at: torch.Tensor, causal: bool, window_size: int | None, num_sink_tokens: int) -> torch.Tensor:
    """[tokens, keys]"""
    seen = torch.ones(len(at), len(positions), dtype=torch.bool, device=at.device)
    if causal:
        seen &= positions <= at[:, None]
    if window_size is not None:
        seen &= (positions > at.clamp(min=0)[:, None] - window_size) | (positions < num_sink_tokens)
    return seen


def _true_scores(block: _Block, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """In units of log2, of the values that rows of the cache stand for, in one dtype."""
    stored = block.keys.stored
    return _with_codes(block, lambda: block.q.to(dtype) @ stored.values(dtype).permute(1, 2, 0) * (scale * LOG2_E), scale, dtype)


def _stored_scores(block: _Block, scale: float, dot: Dot) -> torch.Tensor:
    """In units of log2, in fp32: rows of the cache meet q as they are stored."""
    k = block.keys.stored

    def scores() -> torch.Tensor:
        products = dot(formats.rotate(block.q).to(block.q.dtype) if k.rotated else block.q, k.codes) * (scale * LOG2_E)
        return products if k.scales is None else products * k.scales.T.unsqueeze(1)

    return _with_codes(block, scores, scale, torch.float32)


def _with_codes(block: _Block, exact_scores: Callable[[], torch.Tensor], scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Scores, of codes where keys have them; products of codes are exact, so that no order matters."""
    keys = block.keys
    if keys.codes is None or keys.scales is None or keys.mean is None:
        return exact_scores()
    factor = scale * LOG2_E
    q_codes, q_scale = round_rows(block.q)
    products = q_codes.double() @ keys.codes.double().permute(1, 2, 0)
    k_scale = keys.scales.T.unsqueeze(1)
    taken = block.q.to(dtype) @ keys.mean.to(dtype).unsqueeze(-1) * factor
    if keys.exact:
        taken = torch.where(k_scale < 0, taken, 0.0)
    coded = products.to(dtype) * k_scale.abs().to(dtype) * (q_scale.unsqueeze(-1).to(dtype) * factor) + taken
    return coded if not keys.exact else torch.cat((exact_scores()[..., : keys.exact], coded[..., keys.exact :]), -1)


def _capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else soft_capped(scores, softcap)


def _softmax(scores: torch.Tensor, block: _Block) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [num_kv_heads, rows, head_dim], lse [num_kv_heads, rows, 1])."""
    scores = scores.masked_fill(~block.seen, float("-inf"))
    top, sink = _top(scores, block)
    shift = torch.where(top == float("-inf"), 0.0, top)
    weights = torch.exp2(scores - shift)
    total = weights.sum(-1, keepdim=True) + torch.exp2(sink - shift)
    return _weighted(weights, block, block.values.real(scores.dtype), total), (top + torch.log2(total)) * LN2


def _rounded_softmax(scores: torch.Tensor, block: _Block, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`_softmax` with weights rounded as kernels do before they meet V as it is stored."""
    v, unit, spoiled = block.values, torch.ones((), device=scores.device), None
    scores = scores.masked_fill(~block.seen, float("-inf"))
    if v.stored.scales is not None:
        spoiled = v.stored.scales.isnan().T.unsqueeze(1) & block.seen
        unit = v.stored.scales.T.unsqueeze(1).nan_to_num(nan=1.0).clamp(min=formats.MIN_SCALE)
        scores = scores + torch.log2(unit)
    top, sink = _top(scores, block)
    shift = torch.where(top == float("-inf"), 0.0, top)
    weights = torch.exp2(scores - shift)
    total = (weights / unit).sum(-1, keepdim=True) + torch.exp2(sink - shift)
    if v.channel_scale is not None:
        weights = (weights * 2.0**FP8_SHIFT).to(torch.float8_e4m3fn).float() * 2.0**-FP8_SHIFT
    else:
        weights = weights.to(dtype).float()
    if spoiled is not None:
        weights = weights.masked_fill(spoiled, float("nan"))
    sums = _weighted(weights, block, v.stored.codes.float(), total)
    return sums if v.channel_scale is None else sums * v.channel_scale.unsqueeze(1), (top + torch.log2(total)) * LN2


def _top(scores: torch.Tensor, block: _Block) -> tuple[torch.Tensor, torch.Tensor]:
    """(the largest score of each row, the row's sink in units of log2), -inf where there is none."""
    sink = scores.new_full((*scores.shape[:2], 1), float("-inf"))
    if block.sinks is not None:
        sink = block.sinks.to(scores.dtype) * LOG2_E
    return torch.cat((scores, sink), -1).amax(-1, keepdim=True), sink


def _weighted(weights: torch.Tensor, block: _Block, v: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Sums of v [keys, num_kv_heads, head_dim] over `total`."""
    v = v.transpose(0, 1)
    sums = weights @ v.nan_to_num(0.0, 0.0, 0.0)
    finite = v.isfinite()
    if not finite.all():
        # 0 * NaN is NaN: only the rows that see a bad value get it.
        sees_bad = block.seen.to(weights.dtype) @ (~finite).to(weights.dtype) > 0
        sums = sums.masked_fill(sees_bad, float("nan"))
    return sums / torch.where(total == 0, 1.0, total)


def _by_token(rows: torch.Tensor, block: _Block) -> torch.Tensor:
    """[num_kv_heads, tokens * group, n] -> [tokens, num_q_heads, n]"""
    tokens = block.rows.stop - block.rows.start
    return rows.reshape(len(rows), tokens, -1, rows.shape[-1]).transpose(0, 1).flatten(1, 2)


def _orders(block: _Block) -> tuple[tuple[int, bool, bool], ...]:
    """Products of codes are exact in every order."""
    if block.keys.codes is not None and not block.keys.exact:
        return ((block.q.shape[-1], False, False),)
    return ORDERS_OF_FEW_KEYS if len(block.keys.stored.codes) <= FEW_KEYS else ORDERS


def _rounded_scores(q: torch.Tensor, k: torch.Tensor, step: int, flip: bool, toward_zero: bool) -> torch.Tensor:
    q, k = q.float(), k.float()
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
