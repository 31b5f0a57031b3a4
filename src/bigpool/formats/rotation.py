"""The rotation of int4 keys: a normalised Hadamard matrix over blocks of dims, so that no channel holds most of a row.

Symmetric and orthonormal: rotating twice gives the row back, and q . k is the same when both are rotated.
Source: Ashkboos et al. 2024, "QuaRot" (arXiv 2404.00456); the fast transform, Fino and Algazi 1976.
"""

from __future__ import annotations

import torch


def rotation_block(head_dim: int) -> int:
    """Dims of a block: the largest power of two that divides `head_dim`."""
    return head_dim & -head_dim


def rotate(rows: torch.Tensor) -> torch.Tensor:
    """Rows [..., head_dim] times the block-diagonal H, H[i, j] = (-1)^popcount(i & j) / sqrt(block) within a block.

    Butterflies from neighbours outward, then one product, in float32 (float64 for float64 rows): the kernel's own order, so
    that both give the same bits.
    """
    block = rotation_block(rows.shape[-1])
    rows = rows if rows.dtype == torch.float64 else rows.float()
    shape, half = rows.shape, 1
    while half < block:
        first, second = rows.reshape(*shape[:-1], shape[-1] // (2 * half), 2, half).unbind(-2)
        rows = torch.stack((first + second, first - second), -2).reshape(shape)
        half *= 2
    return torch.mul(rows, block**-0.5)
