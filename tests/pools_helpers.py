"""Places in and around a sparse pool of the host."""

from __future__ import annotations

import mmap

import torch

from bigpool.pools import SparsePool

GRANULE = mmap.PAGESIZE


def bytes_at(pool: SparsePool, offset: int, length: int) -> torch.Tensor:
    """uint8 [length] anywhere in the pool or its guards."""
    assert pool._memory is not None
    return pool._memory.view(offset, offset + length)


def trapped_places(pool: SparsePool, page: int) -> dict[str, int]:
    """Byte offsets that belong to no mapped page; `page` is an unmapped one."""
    end = -(-pool.virtual_bytes // GRANULE) * GRANULE
    return {
        "first byte below": -1,
        "last byte below": -pool.guard_bytes,
        "furthest wrapped element": -(2**31) * pool.dtype.itemsize,
        "unmapped page": page * pool.strides[0] * pool.dtype.itemsize,
        "first byte above": end,
        "last byte above": end + pool.guard_bytes - 1,
    }
