"""Sparse memory of an NVIDIA GPU: CUDA virtual memory management. Never managed memory."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from bigpool.errors import ArgumentError, PoolError, UnsupportedPlatformError
from bigpool.pools._memory import Memory, Reservation, balanced_chunk
from bigpool.pools._ranges import Range

# Mapping is slow beside filling here, and the bar of 1 GiB for 1 TiB leaves room for a large pattern.
_BYTES_PER_MAPPING = 1 << 16


class CudaMemory(Memory):
    """Addresses come from one reservation; allocations are mapped into it.

    The driver maps from the start of an allocation only, and unmaps exactly what was mapped. So the pattern is a ladder
    of allocations, each mapped whole, and a mapping that a page breaks is taken away and its two ends are covered anew.
    """

    anchored = True

    def __init__(self, device: torch.device) -> None:
        self._reserved = 0
        self._rungs: list[tuple[int, Any]] = []
        self._starts: list[int] = []
        self._lengths: dict[int, int] = {}
        self.device = indexed(device)
        self._driver = load_driver()
        self._context = torch_context(self._driver, self.device)
        self._properties, self._access = self._describe()
        minimum = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        with self._current():
            self.granule = int(self._call("cuMemGetAllocationGranularity", self._properties, minimum))

    def reserve(self, reservation: Reservation) -> None:
        with self._current():
            rungs = _ladder(reservation.aliased, self.granule)
            self._home = reservation.pool + reservation.above
            self.pattern_bytes = sum(rungs)
            length = reservation.below + self._home + self.pattern_bytes
            self._start = int(self._call("cuMemAddressReserve", length, self.granule, 0, 0, asked=length))
            self._reserved = length
            self.base_address = self._start + reservation.below
            self._make_rungs(rungs)

    def alias(self, ranges: list[Range]) -> None:
        with self._current():
            for start, stop in ranges:
                self._cover(start, stop)

    def commit(self, ranges: list[Range], byte: int) -> None:
        with self._current(), contextlib.ExitStack() as handles:
            # Memory first: running out of it must leave everything as it was.
            created: list[Any] = []
            for start, stop in ranges:
                created.append(self._create(stop - start))
                # The mapping holds the memory too, so that unmapping frees it.
                handles.callback(self._call, "cuMemRelease", created[-1])
            self._call("cuCtxSynchronize")
            for (start, stop), handle in zip(ranges, created, strict=True):
                self._clear(start, stop)
                self._map(start, stop - start, handle)
                self._permit(start, stop)
                self._call("cuMemsetD8", self.base_address + start, byte, stop - start)
            self._call("cuCtxSynchronize")

    def fill(self, start: int, stop: int, byte: int) -> None:
        with self._current():
            self._call("cuMemsetD8", self.base_address + start, byte, stop - start)
            self._call("cuCtxSynchronize")

    def view(self, start: int, stop: int) -> torch.Tensor:
        return device_view(_Array(self, self.base_address + start, stop - start), self.device)

    def pattern_view(self) -> torch.Tensor:
        return self.view(self._home, self._home + self.pattern_bytes)

    def synchronize(self) -> bool:
        try:
            with self._current():
                self._call("cuCtxSynchronize")
        except PoolError:
            return False
        return True

    def release(self) -> None:
        length, self._reserved = self._reserved, 0
        # After an illegal access every call fails until the process ends, and its memory goes with it.
        if not length or not self.synchronize():
            return
        driver = self._driver
        with self._current():
            for start in self._starts:
                driver.cuMemUnmap(self.base_address + start, self._lengths[start])
            for _, handle in self._rungs:
                driver.cuMemRelease(handle)
            driver.cuMemAddressFree(self._start, length)
        self._starts, self._lengths, self._rungs = [], {}, []

    def _make_rungs(self, lengths: list[int]) -> None:
        position = self._home
        for length in lengths:
            handle = self._create(length)
            self._rungs.append((length, handle))
            self._map(position, length, handle)
            position += length
        if lengths:
            self._permit(self._home, position)

    def _cover(self, start: int, stop: int) -> None:
        position = start
        for length, handle in self._rungs:
            while position + length <= stop:
                self._map(position, length, handle)
                position += length
        if start < stop:
            self._permit(start, stop)

    def _clear(self, start: int, stop: int) -> None:
        """Unmap all that touches a range, and cover what stuck out of it with the pattern again."""
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        last = bisect.bisect_left(self._starts, stop)
        for mapped in self._starts[first:last]:
            end = mapped + self._lengths[mapped]
            if end <= start:
                continue
            self._call("cuMemUnmap", self.base_address + mapped, end - mapped)
            self._starts.remove(mapped)
            del self._lengths[mapped]
            self._cover(mapped, min(start, end))
            self._cover(max(stop, mapped), end)

    def _create(self, length: int) -> Any:
        return self._call("cuMemCreate", length, self._properties, 0, asked=length)

    def _map(self, start: int, length: int, handle: Any) -> None:
        self._call("cuMemMap", self.base_address + start, length, 0, handle, 0)
        bisect.insort(self._starts, start)
        self._lengths[start] = length

    def _permit(self, start: int, stop: int) -> None:
        self._call("cuMemSetAccess", self.base_address + start, stop - start, [self._access], 1)

    def _call(self, name: str, *arguments: Any, asked: int = 0) -> Any:
        return call(self._driver, name, *arguments, asked=asked)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        # Another thread, or a garbage collection in it, may have another context or none.
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._driver.cuCtxPopCurrent()

    def _describe(self) -> tuple[Any, Any]:
        """What to allocate (memory of this device) and who may use it (this device, reading and writing)."""
        driver = self._driver
        properties, access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        for location in (properties.location, access.location):
            location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            location.id = self.device.index
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return properties, access


class _Array:
    """Device memory as torch imports it, holding on to the memory that it lies in."""

    def __init__(self, memory: CudaMemory, address: int, length: int) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def device_view(array: object, device: torch.device) -> torch.Tensor:
    """uint8 tensor over an object with `__cuda_array_interface__`, without a copy."""
    return torch.as_tensor(array, device=device)


def indexed(device: torch.device) -> torch.device:
    """`device` with its index, of a GPU that torch can use."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise UnsupportedPlatformError(
            f"SparsePool: device: '{device}' needs an NVIDIA GPU and torch built for CUDA, got torch "
            f"{torch.__version__} with torch.cuda.is_available() = {torch.cuda.is_available()}; use device='cpu'"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ArgumentError(
            "SparsePool",
            f"device: expected an index below torch.cuda.device_count()={count}, got '{device}'; see nvidia-smi -L",
        )
    return torch.device("cuda", index)


def load_driver() -> Any:
    """The driver API of cuda-bindings."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise UnsupportedPlatformError(
            "SparsePool: device: 'cuda' needs the package cuda-bindings, which cannot be imported here; "
            "pip install 'bigpool[kernels]', or use device='cpu'"
        ) from None
    return driver


def torch_context(driver: Any, device: torch.device) -> Any:
    """The context that torch uses on `device`, which must have virtual memory management."""
    with torch.cuda.device(device):
        torch.zeros(1, device=device)
        context = call(driver, "cuCtxGetCurrent")
        ordinal = call(driver, "cuCtxGetDevice")
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    if not call(driver, "cuDeviceGetAttribute", attribute, ordinal):
        raise UnsupportedPlatformError(
            f"SparsePool: device: '{device}' needs CUDA virtual memory management, which this driver or virtual GPU "
            "does not offer; update the driver, pass the whole GPU through, or use device='cpu'"
        )
    return context


def call(driver: Any, name: str, *arguments: Any, asked: int = 0) -> Any:
    """Call a driver function and return what it gives besides its status; `asked` bytes are named in the error."""
    status, *values = getattr(driver, name)(*arguments)
    if int(status) != 0:
        error = str(getattr(status, "name", status))
        what = f"{name} of {asked} bytes" if asked else name
        raise PoolError(f"SparsePool: device: expected CUDA_SUCCESS from {what}, got {error}; {_remedy(error)}")
    return values[0] if values else None


def _remedy(error: str) -> str:
    if error == "CUDA_ERROR_OUT_OF_MEMORY":
        return "map fewer pages, free GPU memory (torch.cuda.empty_cache()), or ask for a smaller shape or guard_bytes"
    if error in ("CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_CONTEXT_IS_DESTROYED"):
        return "an earlier kernel has killed the CUDA context: run a kernel that may die in a process of its own"
    return "report it with the output of nvidia-smi"


def _ladder(aliased: int, granule: int) -> list[int]:
    """Lengths of the allocations of the pattern, falling to one granule, each an odd number of granules."""
    if not aliased:
        return []
    granules = balanced_chunk(aliased, _BYTES_PER_MAPPING, granule) // granule
    return [granule * ((1 << power) - 1) for power in range(max(1, granules.bit_length() - 1), 0, -1)]
