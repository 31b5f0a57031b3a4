"""Places in and around a sparse pool of the host."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from bigpool.pools import SparsePool

GRANULE = mmap.PAGESIZE


def bytes_at(pool: SparsePool, offset: int, length: int) -> torch.Tensor:
    """uint8 [length] anywhere in the pool or its guards."""
    assert pool._memory is not None
    # A failure of this has a name; a test that reads on has a signal.
    assert readable(pool.base_address + offset), f"nothing is mapped {offset} bytes from the base"
    return pool._memory.view(offset, offset + length)


def readable(address: int) -> bool:
    """Whether a mapping of this process holds the address and may be read."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access = line.split()[:2]
        start, stop = (int(end, 16) for end in span.split("-"))
        if start <= address < stop:
            return access.startswith("r")
    return False


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
