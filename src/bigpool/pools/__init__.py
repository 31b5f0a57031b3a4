"""Sparse pools: tensors of any virtual size of which only the pages in use have memory, with guards around them."""

from __future__ import annotations

from bigpool.pools._arguments import Guard
from bigpool.pools._pattern import is_poison, poison_byte, poison_value
from bigpool.pools.sparse import Damage, SparsePool

__all__ = ["Damage", "Guard", "SparsePool", "is_poison", "poison_byte", "poison_value"]
