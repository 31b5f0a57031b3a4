"""SparsePool: a tensor of any virtual size, backed where its pages are in use, trapped everywhere else."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple

import torch

from bigpool.errors import ArgumentError, CanaryError, PoolError
from bigpool.pools._arguments import Guard, check_pages, check_pool
from bigpool.pools._cuda import CudaMemory
from bigpool.pools._extents import Extents
from bigpool.pools._host import HostMemory
from bigpool.pools._memory import Memory, Reservation
from bigpool.pools._pattern import Pattern, damaged_ranges, poison_byte
from bigpool.pools._ranges import Range, merged, minus, overlap, rounded_out, total

# ctypes would drop the bits of a length that no address can have.
_ADDRESSES = 1 << 62
_SHOWN = 4


class Damage(NamedTuple):
    """Bytes that a kernel wrote where no page is, as (offset, bytes) pairs."""

    guard: tuple[tuple[int, int], ...]
    """Offsets in the guard pattern: all guard addresses share it, so which of them was written is not known."""

    slack: tuple[tuple[int, int], ...]
    """Offsets from the first byte of the pool, in the granules of mapped pages but outside the pages."""


class SparsePool:
    """A strided tensor of any virtual size, with memory only where its pages are mapped and guards on both sides.

    Axis 0 is the page axis: a page is what one index on it spans, in bytes. That is a page of a KV cache, or a token
    row of q, out or scratch, or a row of a block table: any tensor becomes sparse. K and V in one page are a shape
    `(num_pages, 2, page_size, num_kv_heads, head_dim)` and the views `pool.tensor[:, 0]` and `pool.tensor[:, 1]`.

    `guard` says what lies below the pool, above it, and in its unmapped pages:

    - `"unmapped"`: nothing. An access kills the process (SIGSEGV) or the CUDA context (illegal address).
    - `"poison"`: one chunk of memory mapped again and again that holds `poison_byte(dtype)`, so reads give NaN, or
      `poison_value(dtype)` for integers.
    - `"canary"`: the same with pseudo-random bytes that depend on their position, so that a stray write shows, also one
      that a reader with the same wrong index agrees with. Reads give plausible garbage.

    Mapped pages start filled with poison. Memory comes in granules (4 KiB on most hosts, 2 MiB on a GPU); what a
    granule holds beside mapped pages, the slack, is poison too, or canary under `guard="canary"`. Traps are granules:
    under `"unmapped"` an access to slack kills nothing, but `damage()` sees a write.

    On a GPU page 0 is always backed, by poison or canary if it is not mapped: torch and Triton ask the driver about the
    address of each tensor and reject one without memory. The same holds for views: start them in page 0 or in a mapped
    page. Pools cannot be made, mapped or closed while a CUDA graph is captured.

    Tensors of a pool keep its addresses until `close()`, or the end of a `with` block, takes them away: using a tensor
    after that kills the process or reads foreign memory.

    Args:
        shape: the virtual shape; axis 0 counts the pages.
        dtype: float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2, int8, uint8, int32 or int64.
        device: `"cpu"` or `"cuda[:index]"`. Linux only; a GPU also needs the package cuda-bindings.
        pages: the page ids to map now; `map_pages` maps more.
        strides: in elements, not negative, any order, holes and overlaps allowed; None is contiguous. Rows 2 GiB apart:
            `(2**29, 256, 1)` in float32.
        guard: see above.
        guard_bytes: at least so many on each side, rounded up to granules. None: 2**31 elements and one page, which
            holds every offset that one 32-bit index can wrap to. Two wrapped indices may add up to twice that.

    Raises:
        ArgumentError: one line for each argument that breaks this contract.
        UnsupportedPlatformError: not Linux, no NVIDIA GPU, no CUDA virtual memory management, no cuda-bindings.
        PoolError: the system refused addresses, memory or a number of mappings; nothing is left behind.
    """

    def __init__(
        self,
        shape: Iterable[int],
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        *,
        pages: Iterable[int] = (),
        strides: Iterable[int] | None = None,
        guard: Guard = "unmapped",
        guard_bytes: int | None = None,
    ) -> None:
        checked = check_pool(shape, dtype, device, pages, strides, guard, guard_bytes)
        self.shape, self.strides, self.device, ids = checked
        self.dtype = dtype
        self.guard: Guard = guard
        self._extents = Extents(self.shape, self.strides, dtype.itemsize)
        self._poison = poison_byte(dtype)
        self._pattern = Pattern(None if guard == "canary" else self._poison)
        self._mapped: set[int] = set()
        self._page_bytes: list[Range] = []
        self._granules: list[Range] = []
        self._tensor: torch.Tensor | None = None
        self._bytes: torch.Tensor | None = None
        memory: Memory
        if self.device.type == "cpu":
            memory = HostMemory()
        else:
            memory = CudaMemory(self.device)
            self.device = memory.device
        self._memory: Memory | None = memory
        try:
            self._reserve(memory, guard_bytes, ids)
            self._map(memory, ids)
        except BaseException:
            self._release()
            raise

    @property
    def tensor(self) -> torch.Tensor:
        """The whole virtual shape, `dtype` on `device`. Only mapped pages may be touched.

        Raises:
            PoolError: the pool is closed.
        """
        memory = self._open("tensor")
        if self._tensor is None:
            whole = memory.view(0, self._extents.total_bytes)
            self._tensor = whole.view(self.dtype).as_strided(self.shape, self.strides)
        return self._tensor

    @property
    def num_pages(self) -> int:
        """Size of axis 0."""
        return self.shape[0]

    @property
    def mapped_pages(self) -> tuple[int, ...]:
        """The ids of the mapped pages, ascending."""
        return tuple(sorted(self._mapped))

    @property
    def mapped_bytes(self) -> int:
        """Real memory: granules of mapped pages, and the guard pattern once. 0 after close.

        On a host this is a bound: a granule costs memory when it is first written.
        """
        return 0 if self._memory is None else total(self._granules) + self._memory.pattern_bytes

    @property
    def virtual_bytes(self) -> int:
        """From the first byte of the first element to the last of the last; guards not counted."""
        return self._extents.total_bytes

    @property
    def guard_bytes(self) -> int:
        """Bytes of guard on each side; the one above starts with the first granule behind the pool."""
        return self._guard_bytes

    @property
    def base_address(self) -> int:
        """Address of the first element.

        Raises:
            PoolError: the pool is closed.
        """
        return self._open("base_address").base_address

    @property
    def granule_bytes(self) -> int:
        """The unit in which memory is mapped."""
        return self._granule

    def map_pages(self, ids: Iterable[int]) -> None:
        """Give pages memory, filled with poison; pages that have it already keep their contents.

        On a GPU this waits for running kernels.

        Raises:
            ArgumentError: an id is not in [0, num_pages).
            PoolError: the pool is closed, or the system refused; what was mapped before stays.
        """
        memory = self._open("map_pages")
        wanted, faults = check_pages(ids, self.num_pages)
        if faults:
            raise ArgumentError("SparsePool.map_pages", *faults)
        self._map(memory, wanted)

    def damage(self) -> Damage:
        """Where guard memory was written; both parts are empty if it is whole. Syncs a GPU and the host.

        Looks at one copy of the guard pattern, since all guard addresses share it, and at the slack. Under `"unmapped"`
        that is the slack, and on a GPU what backs page 0. A write of bytes that are there already cannot be seen.
        At most 1024 ranges of each 4 MiB are given.

        Raises:
            PoolError: the pool is closed, or a kernel has killed the CUDA context.
        """
        memory = self._open("damage")
        if not memory.synchronize():
            raise PoolError(
                "SparsePool: damage: expected a living CUDA context, got one that an earlier kernel has killed; "
                "run a kernel that may die in a process of its own"
            )
        guard = [(memory.pattern_view(), 0)] if memory.pattern_bytes else []
        slack = [(self._view(memory, start, stop), start) for start, stop in minus(self._granules, self._page_bytes)]
        return Damage(
            tuple(damaged_ranges(self._pattern, guard)),
            tuple(damaged_ranges(self._pattern, slack)),
        )

    def guard_is_intact(self) -> bool:
        """Whether `damage()` finds nothing; works under every guard. Raises as `damage` does."""
        return not any(self.damage())

    def check_canaries(self) -> None:
        """Raise if guard memory was written. Works under every guard; `"canary"` sees every value, poison not its own.

        Raises:
            CanaryError: with the ranges of `damage()`, those of the guard first.
            PoolError: as `damage`.
        """
        damage = self.damage()
        if any(damage):
            raise CanaryError(_describe(damage), damage.guard + damage.slack)

    def close(self) -> None:
        """Free memory and addresses; a second call does nothing. Under `"canary"` the guards are checked first.

        Waits for running kernels. If one has killed the CUDA context, this raises nothing: it warns where canaries
        would have been checked, and the memory goes when the process ends.

        Raises:
            CanaryError: guard memory was written (the pool is closed all the same).
        """
        memory = self._memory
        if memory is None:
            return
        try:
            if self.guard == "canary":
                if memory.synchronize():
                    self.check_canaries()
                else:
                    text = "SparsePool: close: a kernel has killed the CUDA context, the canaries were not checked"
                    warnings.warn(text, RuntimeWarning, stacklevel=2)
        finally:
            self._release()

    def __enter__(self) -> SparsePool:
        self._open("with")
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._release()

    def __repr__(self) -> str:
        state = "closed" if self._memory is None else f"{len(self._mapped)} of {self.num_pages} pages mapped"
        return (
            f"SparsePool({self.shape}, {self.dtype}, '{self.device}', strides={self.strides}, guard={self.guard!r}: "
            f"{state}, {self.mapped_bytes} of {self.virtual_bytes} bytes real)"
        )

    def _open(self, what: str) -> Memory:
        if self._memory is None:
            raise PoolError(f"SparsePool: {what}: expected an open pool, got a closed one; use it before it closes")
        return self._memory

    def _release(self) -> None:
        memory, self._memory, self._tensor, self._bytes = self._memory, None, None, None
        self._mapped, self._page_bytes, self._granules = set(), [], []
        if memory is not None:
            memory.release()

    def _reserve(self, memory: Memory, guard_bytes: int | None, ids: set[int]) -> None:
        """Take the addresses and put the pattern everywhere but where `ids` will be."""
        granule = self._granule = memory.granule
        self._page_ranges = self._extents.page_ranges(granule)
        if guard_bytes is None:
            guard_bytes = 2**31 * self.dtype.itemsize + self._extents.page_bytes
        below = self._guard_bytes = -(-guard_bytes // granule) * granule
        pool = -(-self._extents.total_bytes // granule) * granule
        if self.guard != "unmapped":
            covered = [(-below, pool + below)]
        elif memory.anchored:
            covered = rounded_out(self._page_ranges, granule)
        else:
            covered = []
        if pool + 2 * below >= _ADDRESSES:
            raise PoolError(
                f"SparsePool: shape: expected fewer than 2**62 bytes with the guards, got {pool + 2 * below}; "
                "ask for a smaller shape, strides or guard_bytes"
            )
        memory.reserve(Reservation(below, pool, below, total(covered)))
        if memory.pattern_bytes:
            self._pattern.write(memory.pattern_view(), 0)
        memory.alias(minus(covered, rounded_out(self._bytes_of(ids), granule)))

    def _map(self, memory: Memory, ids: set[int]) -> None:
        new = minus(self._bytes_of(ids - self._mapped), self._page_bytes)
        pages = merged(self._page_bytes + new)
        fresh = minus(rounded_out(new, self._granule), self._granules)
        memory.commit(fresh, self._poison)
        for start, stop in overlap(new, self._granules):
            memory.fill(start, stop, self._poison)
        if self._pattern.byte is None:
            for start, stop in minus(fresh, pages):
                self._pattern.write(self._view(memory, start, stop), start)
        memory.synchronize()
        self._mapped |= ids
        self._page_bytes = pages
        self._granules = merged(self._granules + fresh)

    def _bytes_of(self, ids: Iterable[int]) -> list[Range]:
        step = self.strides[0] * self.dtype.itemsize
        return merged((page * step + start, page * step + stop) for page in ids for start, stop in self._page_ranges)

    def _view(self, memory: Memory, start: int, stop: int) -> torch.Tensor:
        """uint8 [stop - start] of the granules of the pool."""
        if self._bytes is None:
            self._bytes = memory.view(0, rounded_out([(0, self._extents.total_bytes)], self._granule)[0][1])
        return self._bytes[start:stop]


def _describe(damage: Damage) -> str:
    places = [f"{size} bytes at offset {offset} of the guard pattern" for offset, size in damage.guard]
    places += [f"{size} bytes at byte {offset} of the pool, beside mapped pages" for offset, size in damage.slack]
    more = f", and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    return (
        f"SparsePool: guard: expected untouched memory outside the mapped pages, got {len(places)} written ranges: "
        f"{', '.join(places[:_SHOWN])}{more}; look for an index that wraps in 32 bits, or a store without a mask"
    )
