"""What a sparse pool asks of an operating system or a GPU driver."""

from __future__ import annotations

import contextlib
import math
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from bigpool.pools._ranges import Range


@dataclass(frozen=True)
class Reservation:
    """Sizes in bytes, multiples of the granule: guard below, pool, guard above, and how much shares one pattern."""

    below: int
    pool: int
    above: int
    aliased: int


def balanced_chunk(aliased: int, bytes_per_mapping: int, smallest: int) -> int:
    """A power of two near which filling a pattern costs what mapping it `aliased / chunk` times costs.

    `bytes_per_mapping` says how many bytes are filled in the time of one mapping. At least `smallest`, and no more than
    `aliased` needs.
    """
    chunk = max(smallest, min(aliased, math.isqrt(aliased * bytes_per_mapping)))
    return 1 << (chunk.bit_length() - 1)


class Memory(ABC):
    """A reserved range of addresses. Offsets count bytes from the first byte of the pool; guards below are negative.

    The pattern is one piece of memory that is mapped again and again: a write through any of its addresses shows in
    `pattern_view`. Everything raises PoolError when the system refuses.
    """

    anchored: bool
    """Whether the addresses of views must have memory: a launcher that queries a pointer rejects others."""

    granule: int
    """The unit of mapping in bytes."""

    base_address: int
    pattern_bytes: int

    @abstractmethod
    def reserve(self, reservation: Reservation) -> None:
        """Take the addresses, and make a pattern (not yet filled) if any are to share one. Call it once."""

    @abstractmethod
    def alias(self, ranges: list[Range]) -> None:
        """Map the pattern over `ranges` (granules)."""

    @abstractmethod
    def commit(self, ranges: list[Range], byte: int) -> None:
        """Give `ranges` (granules, whatever is there now) memory of their own, filled with `byte`.

        Nothing has changed if there is not enough memory.
        """

    @abstractmethod
    def fill(self, start: int, stop: int, byte: int) -> None:
        """Set the bytes of a range that has memory."""

    @abstractmethod
    def view(self, start: int, stop: int) -> torch.Tensor:
        """uint8 [stop - start]; touches nothing, and keeps this object alive as long as any tensor of it lives."""

    @abstractmethod
    def pattern_view(self) -> torch.Tensor:
        """uint8 [pattern_bytes]."""

    @abstractmethod
    def synchronize(self) -> bool:
        """Wait for running kernels. False if one has killed the context, so that nothing can be read any more."""

    @abstractmethod
    def release(self) -> None:
        """Give everything back. Raises nothing, also when a GPU context is dead; a second call does nothing."""

    def __del__(self) -> None:
        if not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self.release()
