"""Gathers pages of a cache by a block table. It has the bug: the page id stays 32 bits wide when it meets the stride."""

import torch
import triton
import triton.language as tl


@triton.jit
def gather_kernel(
    cache_ptr,
    block_table_ptr,
    out_ptr,
    stride_cache_page,
    stride_out_row,
    PAGE_ELEMENTS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    page_idx = tl.load(block_table_ptr + row)
    offs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = offs < PAGE_ELEMENTS
    values = tl.load(cache_ptr + page_idx * stride_cache_page + offs, mask=mask, other=0.0)
    tl.store(out_ptr + row * stride_out_row + offs, values, mask=mask)


def gather(cache: torch.Tensor, block_table: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = cache[block_table[i]], flattened; cache [num_pages, page_size, dim], out [len(block_table), page_size * dim]."""
    page_elements = cache.shape[1] * cache.shape[2]
    grid = (len(block_table), triton.cdiv(page_elements, 1024))
    gather_kernel[grid](cache, block_table, out, cache.stride(0), out.stride(0), PAGE_ELEMENTS=page_elements, TILE=1024)
