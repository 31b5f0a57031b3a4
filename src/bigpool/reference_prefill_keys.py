"""Keys and values of one request as the twin of prefill attention sees them: as stored, as they are meant, and as 8-bit codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import formats

# bigpool.ops._prefill_plan.EXACT_KEYS
EXACT_KEYS = 128


@dataclass(frozen=True)
class Stored:
    """Rows of a cache: codes [keys, num_kv_heads, head_dim], in the cache's dtype where it is unquantised, else in fp32, NaN
    where the page is not in the pool; scales [keys, num_kv_heads] or None."""

    codes: torch.Tensor
    scales: torch.Tensor | None = None
    rotated: bool = False

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """What the rows stand for."""
        values = self.codes.to(dtype)
        if self.scales is not None:
            values = values * self.scales.to(dtype).unsqueeze(-1)
        return formats.rotate(values) if self.rotated else values


@dataclass(frozen=True)
class Keys:
    """Keys, and if scores are int8 their codes [keys, num_kv_heads, head_dim], scales [keys, num_kv_heads] and the mean
    [num_kv_heads, head_dim] that was taken from them. The first `exact` keys have none; where there are such, a scale of 0 or
    above says that nothing was taken from the key."""

    stored: Stored
    codes: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    exact: int = 0

    def coded(self, mean: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(codes, scales, mean) of the keys less `mean`, by default that of all, which counts what is not finite as 0."""
        x = self.stored.codes.float()
        if mean is None:
            mean = (x.double().masked_fill(~x.isfinite(), 0.0).sum(0) / max(len(x), 1)).float()
        return *round_rows(x - mean), mean

    def head_mean(self) -> torch.Tensor:
        """The mean that kept codes are less, see keep_keys."""
        return head_mean(self.stored.codes[EXACT_KEYS // 2 : EXACT_KEYS])


@dataclass(frozen=True)
class Values:
    """Values; with `channel_scale` [num_kv_heads, head_dim] they are e4m3 codes times it."""

    stored: Stored
    channel_scale: torch.Tensor | None = None

    def real(self, dtype: torch.dtype) -> torch.Tensor:
        """What the values stand for."""
        values = self.stored.values(dtype)
        return values if self.channel_scale is None else values * self.channel_scale.to(dtype)


def gather(paged: torch.Tensor, block_table_row: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of a tensor [num_pages, page_size, ...] at `positions`, which of them are of a page outside the pool)."""
    num_pages, page_size = paged.shape[:2]
    page_idx = block_table_row[positions // page_size].long()
    lost = (page_idx < 0) | (page_idx >= num_pages)
    if num_pages == 0:
        return paged.new_zeros((len(positions), *paged.shape[2:])), lost
    rows = paged.view(torch.uint8) if paged.element_size() == 1 else paged
    return rows[page_idx.masked_fill(lost, 0), positions % page_size].view(paged.dtype), lost


def stored_rows(
    cache: torch.Tensor, scale: torch.Tensor | None, block_table_row: torch.Tensor, positions: torch.Tensor, rotates: bool
) -> Stored:
    """Rows of one request of an NHD cache."""
    kv_format = formats.of(cache.dtype, scale)
    codes, lost = gather(cache, block_table_row, positions)
    scales = None
    if scale is not None and kv_format.scales == "token_head":
        scales = gather(scale, block_table_row, positions)[0].masked_fill(lost.unsqueeze(-1), 1.0)
    elif scale is not None:
        scales = scale.reshape(-1).expand(len(positions), cache.shape[2])
    if kv_format.name not in ("bf16", "fp16", "fp32"):
        codes = kv_format.codes_as(codes, scales, torch.float32)
    codes = codes.masked_fill(lost[:, None, None], float("nan"))
    return Stored(codes, scales, rotates and kv_format.rotates_k)


def round_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes and fp32 scales of rows [..., head_dim], as in an int8 cache; a row with NaN or infinity has scale NaN."""
    codes, scales = formats.named("int8").quantize(rows.float())
    assert scales is not None
    return codes, scales


def rounded_values(values: Stored) -> Values:
    """e4m3 codes with a scale per head and channel; what is not finite becomes NaN and counts as 0 in the scale."""
    x = values.codes.float()
    most = x.abs().masked_fill(~x.isfinite(), 0.0).amax(0) if len(x) else x.new_zeros(x.shape[1:])
    scale = formats.row_scale(most, torch.finfo(torch.float8_e4m3fn).max)
    codes = (x / scale).to(torch.float8_e4m3fn).float()
    return Values(Stored(codes.masked_fill(~x.isfinite(), float("nan"))), scale)


def head_mean(keys: torch.Tensor) -> torch.Tensor:
    """Of the second half of the keys that stay exact, [keys, num_kv_heads, head_dim]: numbers of the cache's dtype, in fp32."""
    x = keys.double()
    return (x.masked_fill(~x.isfinite(), 0.0).sum(0) * (2 / EXACT_KEYS)).float().to(keys.dtype).float()


def keep_keys(
    k_pages: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    block_table_row: torch.Tensor,
    length: int,
    q_len: int,
) -> None:
    """Writes codes and scales [num_pages, page_size, num_kv_heads, ...] of the last `q_len` keys of a request but its first
    EXACT_KEYS. Of a key the smaller one is rounded, the key or the key less the mean; the latter has a scale below 0."""
    if length <= EXACT_KEYS:
        return
    device, page_size = k_pages.device, k_pages.shape[1]
    mean = head_mean(gather_keys(k_pages, block_table_row, torch.arange(EXACT_KEYS // 2, EXACT_KEYS, device=device)))
    positions = torch.arange(max(length - q_len, EXACT_KEYS), length, device=device)
    x, lost = gather(k_pages, block_table_row, positions)
    positions, x = positions[~lost], x[~lost].float()
    takes = (x - mean).abs().amax(-1) < x.abs().amax(-1)
    new_codes, new_scales = round_rows(torch.where(takes.unsqueeze(-1), x - mean, x))
    place = block_table_row[positions // page_size].long(), positions % page_size
    codes[place] = new_codes
    scales[place] = torch.where(takes, -new_scales, new_scales)


def gather_keys(k_pages: torch.Tensor, block_table_row: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Keys at `positions`; NaN where the page is not in the pool."""
    rows, lost = gather(k_pages, block_table_row, positions)
    return rows.masked_fill(lost[:, None, None], float("nan"))
