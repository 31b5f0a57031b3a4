"""Sparse memory of the host: Linux mmap."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from bigpool.errors import PoolError, UnsupportedPlatformError
from bigpool.pools._memory import Memory, Reservation, balanced_chunk
from bigpool.pools._ranges import Range

_MAP_FIXED = 0x10
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_MADV_DONTDUMP = 16
_READ_WRITE = 3
_NO_ACCESS = 0

# On a small virtual machine a mapping takes 7 us, and filling 16 KiB of new memory 8 us.
_BYTES_PER_MAPPING = 1 << 14
_CHUNK_MIN = 1 << 21
_SOURCE_MAX = 1 << 21


class HostMemory(Memory):
    """Addresses come from one mapping without access; ranges of it are mapped over.

    Committed ranges are private copies of a file of poison: a page costs memory when it is first written, not when it
    is mapped. The pattern is a file of its own, shared by all its mappings.
    """

    anchored = False

    def __init__(self) -> None:
        self._length = 0
        self._files: list[int] = []
        self._source: tuple[int, int] | None = None
        if sys.platform != "linux":
            raise UnsupportedPlatformError(
                f"SparsePool: device: 'cpu' needs Linux (mmap without reservation, memfd_create), got {sys.platform!r};"
                " run in a Linux container or virtual machine"
            )
        self.granule = mmap.PAGESIZE
        self._libc = _libc()

    def reserve(self, reservation: Reservation) -> None:
        self._home = reservation.pool + reservation.above
        self.pattern_bytes = 0
        if reservation.aliased:
            # An odd number of granules, so that pages a power of two apart do not share a byte of the pattern.
            chunk = balanced_chunk(reservation.aliased, _BYTES_PER_MAPPING, _CHUNK_MIN)
            self.pattern_bytes = chunk - self.granule
        length = reservation.below + self._home + self.pattern_bytes
        start = self._mmap(None, length, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self._start, self._length = start, length
        self.base_address = start + reservation.below
        if self.pattern_bytes:
            self._pattern = self._file("bigpool-guard", self.pattern_bytes)
            self._map_file(self._home, self._home + self.pattern_bytes, self._pattern, mmap.MAP_SHARED)
        self._leave_out_of_core_dumps()

    def alias(self, ranges: list[Range]) -> None:
        self._expect_mappings(ranges, self.pattern_bytes)
        for start, stop in ranges:
            for position in range(start, stop, self.pattern_bytes):
                self._map_file(position, min(position + self.pattern_bytes, stop), self._pattern, mmap.MAP_SHARED)
        self._leave_out_of_core_dumps()

    def commit(self, ranges: list[Range], byte: int) -> None:
        if not ranges:
            return
        source, length = self._poison_source(min(max(stop - start for start, stop in ranges), _SOURCE_MAX), byte)
        self._expect_mappings(ranges, length)
        for start, stop in ranges:
            for position in range(start, stop, length):
                self._map_file(position, min(position + length, stop), source, mmap.MAP_PRIVATE)
        self._leave_out_of_core_dumps()

    def fill(self, start: int, stop: int, byte: int) -> None:
        ctypes.memset(self.base_address + start, byte, stop - start)

    def view(self, start: int, stop: int) -> torch.Tensor:
        buffer = (ctypes.c_uint8 * (stop - start)).from_address(self.base_address + start)
        # torch keeps the buffer, the buffer keeps the addresses.
        buffer.memory = self  # type: ignore[attr-defined]
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def pattern_view(self) -> torch.Tensor:
        return self.view(self._home, self._home + self.pattern_bytes)

    def synchronize(self) -> bool:
        return True

    def release(self) -> None:
        length, self._length = self._length, 0
        if length:
            self._libc.munmap(self._start, length)
        while self._files:
            os.close(self._files.pop())

    def _poison_source(self, size: int, byte: int) -> tuple[int, int]:
        """The file of poison and its length, at least `size`; nothing maps it shared, so nobody can write it."""
        if self._source is None:
            self._source = (self._file("bigpool-poison", 0), 0)
        source, length = self._source
        if length < size:
            with _refusing(size):
                os.pwrite(source, bytes([byte]) * (size - length), length)
            self._source = (source, size)
        return self._source

    def _file(self, name: str, length: int) -> int:
        with _refusing(length):
            file = os.memfd_create(name)
            self._files.append(file)
            os.ftruncate(file, length)
        return file

    def _map_file(self, start: int, stop: int, file: int, sharing: int) -> None:
        self._mmap(self.base_address + start, stop - start, _READ_WRITE, sharing | _MAP_FIXED, file)

    def _mmap(self, address: int | None, length: int, protection: int, flags: int, file: int) -> int:
        result = self._libc.mmap(address, length, protection, flags | _MAP_NORESERVE, file, 0)
        if result is None or result == ctypes.c_void_p(-1).value:
            raise PoolError(_refusal(ctypes.get_errno(), length, self._length == 0, self.pattern_bytes > 0))
        return int(result)

    def _leave_out_of_core_dumps(self) -> None:
        # Pools are made to be crashed into, and a dump would write each mapping of the pattern out in full. A kernel
        # that cannot do it costs nothing but that.
        self._libc.madvise(self._start, self._length, _MADV_DONTDUMP)

    def _expect_mappings(self, ranges: list[Range], length: int) -> None:
        """Refuse beforehand what would run into the limit half-way; few mappings are not worth counting."""
        needed = sum(-(-(stop - start) // length) + 2 for start, stop in ranges)
        limit = max_map_count()
        if needed > limit // 8 and needed + mapping_count() > limit:
            raise PoolError(_too_many_mappings(needed, limit, self.pattern_bytes > 0))


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [address, size]
    libc.madvise.argtypes = [address, size, ctypes.c_int]
    return libc


def mapping_count() -> int:
    """Memory mappings of this process."""
    with Path("/proc/self/maps").open("rb") as maps:
        return sum(1 for _ in maps)


def max_map_count() -> int:
    """How many memory mappings a process may have."""
    return int(_sysctl("max_map_count"))


def _sysctl(name: str) -> str:
    return Path("/proc/sys/vm", name).read_text().strip()


def _too_many_mappings(needed: int, limit: int, guarded: bool) -> str:
    unguarded = "use guard='unmapped', " if guarded else ""
    return (
        f"SparsePool: pages: expected at most vm.max_map_count={limit} memory mappings in this process, which has "
        f"{mapping_count()}, got {needed} more; {unguarded}map pages that are neighbours, or "
        f"`sysctl -w vm.max_map_count={limit + needed}`"
    )


def _refusal(error: int, length: int, reserving: bool, guarded: bool = False) -> str:
    # Not on every system, where this module must still import to say so.
    import resource

    limit = max_map_count()
    if error == errno.ENOMEM and not reserving and mapping_count() >= limit - 2:
        return _too_many_mappings(1, limit, guarded)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    allowed = "unlimited" if soft == resource.RLIM_INFINITY else str(soft // 1024)
    what = "addresses" if reserving else "memory"
    return (
        f"SparsePool: shape: expected {length} bytes of {what} from the operating system, got "
        f"{errno.errorcode.get(error, error)} ({os.strerror(error)}); see `ulimit -v` (now {allowed}) and "
        f"vm.overcommit_memory (now {_sysctl('overcommit_memory')}), or ask for a smaller shape or guard_bytes"
    )


@contextlib.contextmanager
def _refusing(length: int) -> Iterator[None]:
    try:
        yield
    except OSError as refused:
        raise PoolError(_refusal(refused.errno or 0, length, reserving=False)) from refused
