"""The plain-torch twins of `write_kv` and `gather_kv`: what CPU tensors run, and what the kernel's bits are compared with."""

from __future__ import annotations

import torch

from . import formats
from .cache import KVCache


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
    """Twin of `bigpool.write_kv`: same arguments, same bits. Syncs the host."""
    k_cache, v_cache, k_scale, v_scale = cache.nhd()
    write_rows(k, k_cache, k_scale, slot_mapping, is_key=True)
    write_rows(v, v_cache, v_scale, slot_mapping, is_key=False)


def write_rows(
    rows: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor | None, slot_mapping: torch.Tensor, *, is_key: bool
) -> None:
    """Puts `rows` [num_tokens, num_kv_heads, head_dim] into an NHD cache and its scales, in place."""
    kv_format = formats.of(cache.dtype, scales)
    num_pages, page_size = cache.shape[:2]
    page_idx = slot_mapping.div(page_size, rounding_mode="floor")
    used = (slot_mapping >= 0) & (page_idx < num_pages)
    rows, page_idx = rows[used], page_idx[used]
    slot = slot_mapping[used] - page_idx * page_size
    if is_key and kv_format.rotates_k:
        rows = formats.rotate(rows)
    codes, row_scales = kv_format.quantize(rows, scales)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.element_size()]
    cache.view(bits)[page_idx, slot] = codes.view(bits)
    if kv_format.scales == "token_head":
        assert scales is not None
        assert row_scales is not None
        scales[page_idx, slot] = row_scales


def gather_kv(cache: KVCache, block_table: torch.Tensor, seq_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `bigpool.gather_kv`."""
    k_cache, v_cache, k_scale, v_scale = cache.nhd()
    keys = gather_rows(k_cache, k_scale, block_table, seq_lens)
    if cache.format.rotates_k:
        keys = formats.rotate(keys)
    return keys, gather_rows(v_cache, v_scale, block_table, seq_lens)


def gather_rows(
    cache: torch.Tensor, scales: torch.Tensor | None, block_table: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """Rows as they are stored, dequantised, fp32 [total length, num_kv_heads, head_dim]; NaN where a page is not in the pool."""
    kv_format = formats.of(cache.dtype, scales)
    num_pages, page_size = cache.shape[:2]
    none = torch.zeros(0, dtype=torch.int64, device=cache.device)
    page_idx, slots = [none], [none]
    for table, length in zip(block_table.long(), seq_lens.tolist(), strict=True):
        position = torch.arange(min(max(length, 0), len(table) * page_size), device=cache.device)
        page_idx.append(table[position // page_size])
        slots.append(position % page_size)
    pages, slot = torch.cat(page_idx), torch.cat(slots)
    in_pool = (pages >= 0) & (pages < num_pages)
    pages = torch.where(in_pool, pages, 0)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.element_size()]
    codes = cache.view(bits)[pages, slot].view(cache.dtype)
    if kv_format.scales == "token_head":
        assert scales is not None
        scales = scales[pages, slot]
    rows = kv_format.dequantize(codes, scales)
    return torch.where(in_pool[:, None, None], rows, float("nan"))
