"""The plain-torch twin of verify attention: what CPU tensors run, and in float64 the oracle that kernels are judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import formats
from .reference_logits import LOG2_E, soft_capped
from .tuning import MAX_SEQ_LEN

if TYPE_CHECKING:
    from collections.abc import Iterator

LN2 = 0.6931471805599453
# (dims of a step, from the last dim on, rounding sums toward zero): the orders of the baseline. Each costs time, and few
# keys need them most. NVIDIA's matrix units round toward zero: Fasi, Higham, Mikaitis and Pranesh 2021 (PeerJ CS 7:e330).
ORDERS = ((4, False, False), (16, True, False))
ORDERS_OF_FEW_KEYS = (*ORDERS, (1, False, False), (1, True, False), (16, False, True), (16, True, True))
FEW_KEYS = 1_024


@dataclass(frozen=True)
class _Rows:
    """Keys or values of one request as they are stored: codes [length, num_kv_heads, head_dim] and scales [length, num_kv_heads].

    Codes are exact; they are in the cache's dtype where that is q's, else in fp32, and NaN where the page is not in the pool.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None
    rotated: bool

    def at(self, keys: Any) -> _Rows:
        return _Rows(self.codes[keys], None if self.scales is None else self.scales[keys], self.rotated)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        values = self.codes.to(dtype)
        if self.scales is not None:
            values = values * self.scales.to(dtype).unsqueeze(-1)
        return formats.rotate(values) if self.rotated else values


@dataclass(frozen=True)
class _Token:
    """One query token: its row in q, the keys and values that it sees, and how far each key is from its position."""

    row: int
    k: _Rows
    v: _Rows
    distance: torch.Tensor


@dataclass(frozen=True)
class _Logits:
    """What happens to scores: natural units, heads as [num_kv_heads, group, 1]."""

    scale: float
    softcap: float | None
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None

    @classmethod
    def of(
        cls, scale: float, softcap: float | None, slopes: torch.Tensor | None, sinks: torch.Tensor | None, kv_heads: int
    ) -> _Logits:
        def by_head(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values.view(kv_heads, -1, 1)

        return cls(scale, softcap, by_head(slopes), by_head(sinks))

    def bias(self, scores: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        return scores if self.slopes is None else scores + self.slopes.to(scores.dtype) * distance.to(scores.dtype)


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
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    **masks: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `bigpool.verify_attention`: same arguments, same meaning, no input changed; syncs the host.

    `masks`: k_scale, v_scale, causal, window_size, num_sink_tokens, chunk_size, tree_mask. `compute_dtype` float64 makes it the
    oracle: the output is then float64 too, with `out_scale` divided by it and saturated, not rounded. Returns (out, lse).
    """
    logits = _Logits.of(_scale(q, softmax_scale), softcap, alibi_slopes, sinks, _kv_heads(k_cache, kv_layout))
    if out is None:
        dtype = torch.float64 if compute_dtype == torch.float64 else q.dtype if out_scale is None else torch.float8_e4m3fn
        out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.promote_types(torch.float32, compute_dtype), device=q.device)
    for token in _tokens(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, kv_layout, **masks):
        heads = q[token.row].to(compute_dtype).view(_kv_heads(k_cache, kv_layout), -1, q.shape[-1])
        sums, logs = _attend(heads, token.k.values(compute_dtype), token.v.values(compute_dtype), token.distance, logits)
        out[token.row] = _as_output(sums.flatten(0, 1), out_scale, out.dtype)
        lse[token.row] = logs.flatten()
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
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float8_e4m3fn,
    **masks: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same-dtype reordered reference of the error rule, (out, lse).

    What a right kernel of that dtype may do, in other orders: keys last to first, dot products summed in fp32 in steps of 16,
    of 4 (as the narrowest matrix units do) or one by one, from either end, to nearest or toward zero, exponentials in base 2,
    weights rounded to q's dtype before they meet V. Codes of a quantised cache enter the products as they are: K's scale
    multiplies scores, V's goes into the exponent; q is rotated and rounded where keys are stored rotated. Each row is that of
    the order that comes out farthest from float64, since few numbers in one order can be right by luck. Its distance from the
    float64 oracle is the measure of a kernel's.
    """
    kv_heads = _kv_heads(k_cache, kv_layout)
    logits = _Logits.of(_scale(q, softmax_scale), softcap, alibi_slopes, sinks, kv_heads)
    dtype = q.dtype if out_scale is None else out_dtype
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    for token in _tokens(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, kv_layout, **masks):
        heads = q[token.row].view(kv_heads, -1, q.shape[-1])
        exact = _attend(heads.double(), token.k.values(torch.float64), token.v.values(torch.float64), token.distance, logits)
        orders = ORDERS_OF_FEW_KEYS if len(token.distance) <= FEW_KEYS else ORDERS
        queries = formats.rotate(heads).to(q.dtype) if token.k.rotated else heads
        last_first = torch.arange(len(token.distance) - 1, -1, -1, device=q.device)
        backward = token.k.at(last_first), token.v.at(last_first), token.distance.flip(0)
        tries = [_attend_rounded(queries, *backward, logits, *order) for order in orders]
        sums = max((sums for sums, _ in tries), key=lambda sums: _distance(sums, exact[0])).flatten(0, 1)
        out[token.row] = _as_output(sums, out_scale, dtype)
        lse[token.row] = max((logs for _, logs in tries), key=lambda logs: _distance(logs, exact[1])).flatten()
    return out, lse


def _scale(q: torch.Tensor, softmax_scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


def _kv_heads(k_cache: torch.Tensor, kv_layout: str) -> int:
    return k_cache.shape[2 if kv_layout == "NHD" else 1]


def _as_output(sums: torch.Tensor, out_scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """In `dtype`; with a scale, what fp8 can hold of the quotient. float64 keeps the quotient."""
    if out_scale is None:
        return sums.to(dtype)
    quotient = sums.to(torch.promote_types(torch.float32, sums.dtype)) / out_scale.to(sums.device)
    largest = torch.finfo(torch.float8_e4m3fn if dtype == torch.float64 else dtype).max
    return quotient.clamp(-largest, largest).to(dtype)


def _attend(
    heads: torch.Tensor, k: torch.Tensor, v: torch.Tensor, distance: torch.Tensor, logits: _Logits
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [kv_heads, group, head_dim], lse [kv_heads, group]) of one token in the dtype of its arguments."""
    scores = torch.einsum("hgd,nhd->hgn", heads, k) * logits.scale
    if logits.softcap is not None:
        scores = logits.softcap * torch.tanh(scores / logits.softcap)
    scores = logits.bias(scores, distance)
    if logits.sinks is None:
        if not scores.shape[-1]:
            return torch.zeros_like(heads), torch.full_like(heads[..., 0], float("-inf"))
        return torch.einsum("hgn,nhd->hgd", torch.softmax(scores, -1), v), torch.logsumexp(scores, -1)
    scores = torch.cat((scores, logits.sinks.to(scores.dtype)), -1)
    return torch.einsum("hgn,nhd->hgd", torch.softmax(scores, -1)[..., :-1], v), torch.logsumexp(scores, -1)


def _attend_rounded(
    heads: torch.Tensor, k: _Rows, v: _Rows, distance: torch.Tensor, logits: _Logits, step: int, flip: bool, toward_zero: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_attend` with the roundings of a kernel whose dot products advance `step` dims at a time."""
    scores = _rounded_scores(heads, k, step, flip, toward_zero) * (logits.scale * LOG2_E)
    if k.scales is not None:
        scores = scores * k.scales.T.unsqueeze(1)
    if logits.softcap is not None:
        scores = soft_capped(scores, logits.softcap)
    if logits.slopes is not None:
        scores = scores + logits.slopes * LOG2_E * distance.float()
    unit, spoiled = torch.ones(()), None
    if v.scales is not None:
        spoiled = v.scales.isnan().T.unsqueeze(1)
        unit = v.scales.T.unsqueeze(1).nan_to_num(nan=1.0).clamp(min=formats.MIN_SCALE)
        scores = scores + torch.log2(unit)
    sink = logits.sinks if logits.sinks is not None else scores.new_full((*scores.shape[:2], 1), float("-inf"))
    top = torch.cat((scores, sink * LOG2_E), -1).amax(-1, keepdim=True)
    shift = torch.where(top == float("-inf"), 0.0, top)
    weights = torch.exp2(scores - shift)
    total = (weights / unit).sum(-1, keepdim=True) + torch.exp2(sink * LOG2_E - shift)
    if spoiled is not None:
        weights = weights.masked_fill(spoiled, float("nan"))
    sums = torch.einsum("hgn,nhd->hgd", weights.to(heads.dtype).float(), v.codes.float())
    logs = (top + torch.log2(total)) * LN2
    return (sums / torch.where(total == 0, 1.0, total)).to(heads.dtype), logs.squeeze(-1)


def _rounded_scores(heads: torch.Tensor, k: _Rows, step: int, flip: bool, toward_zero: bool) -> torch.Tensor:
    queries, keys = heads.float(), k.codes.float()
    if flip:
        queries, keys = queries.flip(-1), keys.flip(-1)
    scores = queries.new_zeros(*queries.shape[:2], len(keys))
    for part_q, part_k in zip(torch.split(queries, step, -1), torch.split(keys, step, -1), strict=True):
        if toward_zero:
            scores = _add_toward_zero(scores, torch.einsum("hgd,nhd->hgn", part_q.double(), part_k.double()))
        else:
            scores += torch.einsum("hgd,nhd->hgn", part_q, part_k)
    return scores


def _add_toward_zero(sums: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    exact = sums.double() + terms
    rounded = exact.float()
    too_far = rounded.double().abs() > exact.abs()
    return torch.where(too_far, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)


def _distance(values: torch.Tensor, exact: torch.Tensor) -> float:
    return float((values.double() - exact).abs().nan_to_num(nan=0.0).max())


def _tokens(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kv_layout: str,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    **rules: Any,
) -> Iterator[_Token]:
    if kv_layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        k_scale, v_scale = (
            scale.transpose(1, 2) if scale is not None and scale.dim() == 3 else scale for scale in (k_scale, v_scale)
        )
    capacity = min(block_table.shape[1] * k_cache.shape[1], MAX_SEQ_LEN)
    starts = cu_seqlens_q.tolist()
    table = block_table.cpu()
    for req, seq_len in enumerate(seq_lens.tolist()):
        q_len = starts[req + 1] - starts[req]
        if q_len <= 0:
            continue
        length = min(max(seq_len, 0), capacity)
        k = _rows_of(k_cache, k_scale, table[req], length, rotates=True)
        v = _rows_of(v_cache, v_scale, table[req], length, rotates=False)
        positions = torch.arange(length, device=q.device)
        for i in range(q_len):
            row = starts[req] + i
            tree = None if tree_mask is None else _tree_row(tree_mask[row], positions - (length - q_len))
            seen = _seen(positions, length - q_len + i, tree, **rules)
            yield _Token(row, k.at(seen), v.at(seen), positions[seen] - (length - q_len + i))


def _seen(
    positions: torch.Tensor,
    position: int,
    tree: torch.Tensor | None,
    causal: bool = True,
    window_size: int | None = None,
    num_sink_tokens: int = 0,
    chunk_size: int | None = None,
) -> Any:
    """What picks the keys that a query token at `position` sees: a slice for the plain causal rule, else a mask."""
    if causal and tree is None and window_size is None and chunk_size is None:
        return slice(0, max(position + 1, 0))
    seen = tree if tree is not None else positions <= position if causal else torch.ones_like(positions, dtype=torch.bool)
    near = torch.ones_like(seen)
    if window_size is not None:
        near &= positions > position - window_size
    if chunk_size is not None:
        near &= positions >= position // chunk_size * chunk_size
    return seen & (near | (positions < num_sink_tokens))


def _tree_row(words: torch.Tensor, draft_idx: torch.Tensor) -> torch.Tensor:
    """Which keys a row of a tree mask lets pass; all before the draft block."""
    inside = (draft_idx >= 0) & (draft_idx < 32 * len(words))
    idx = torch.where(inside, draft_idx, 0)
    return torch.where(inside, (words[idx // 32] >> (idx % 32)) & 1 == 1, draft_idx < 0)


def _rows_of(
    cache: torch.Tensor, scale: torch.Tensor | None, block_table_row: torch.Tensor, length: int, *, rotates: bool
) -> _Rows:
    """The first `length` rows of one request of an NHD cache."""
    kv_format = formats.of(cache.dtype, scale)
    codes, lost = _gather(cache.view(torch.uint8) if cache.element_size() == 1 else cache, block_table_row, length)
    codes = codes.view(cache.dtype)
    scales = None
    if scale is not None and kv_format.scales == "token_head":
        scales = _gather(scale, block_table_row, length)[0]
    elif scale is not None:
        scales = scale.reshape(-1).expand(length, cache.shape[2])
    if kv_format.name not in ("bf16", "fp16", "fp32"):
        codes = kv_format.codes_as(codes, scales, torch.float32)
    codes[lost] = float("nan")
    return _Rows(codes, scales, rotates and kv_format.rotates_k)


def _gather(paged: torch.Tensor, block_table_row: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows [length, ...] of a tensor [num_pages, page_size, ...], which of them are of a page outside the pool)."""
    num_pages, page_size = paged.shape[:2]
    rows = paged.new_zeros((length, *paged.shape[2:]))
    lost = torch.zeros(length, dtype=torch.bool, device=paged.device)
    for col in range((length + page_size - 1) // page_size):
        begin, end = col * page_size, min((col + 1) * page_size, length)
        page_idx = int(block_table_row[col])
        if 0 <= page_idx < num_pages:
            rows[begin:end] = paged[page_idx, : end - begin]
        else:
            lost[begin:end] = True
    return rows, lost
