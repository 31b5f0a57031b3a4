"""A CUDA driver made of host memory that knows the written rules of virtual memory management, and no mercy.

Every rule of the CUDA driver API reference that a sparse pool could break is an error here: granules, whole mappings
at offset 0, unmapping exactly what was mapped, access over fully mapped ranges only, nothing left when addresses go.
Where the reference leaves room (mapping a part of an allocation), the strict reading holds.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
from types import SimpleNamespace

import torch

from bigpool.pools import _host

GRANULE = 1 << 21
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class Location:
    type: object = None
    id: int = -1


class CUmemAllocationProp:
    def __init__(self) -> None:
        self.type: object = None
        self.location = Location()


class CUmemAccessDesc:
    def __init__(self) -> None:
        self.flags: object = None
        self.location = Location()


class FakeDriver:
    """The functions of `cuda.bindings.driver` that pools call. Each returns a tuple that starts with a Result."""

    CUmemAllocationProp = CUmemAllocationProp
    CUmemAccessDesc = CUmemAccessDesc
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="read and write")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="minimum")
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="virtual memory")

    def __init__(self) -> None:
        self.libc = _host._libc()
        self.memory = 1 << 30
        self.supported = 1
        self.dead = False
        self.fills = True
        self.contexts: list[object] = []
        self.reserved: dict[int, int] = {}
        self.allocations: dict[int, int] = {}
        self.released: set[int] = set()
        self.mappings: dict[int, tuple[int, int]] = {}
        self.permitted: set[int] = set()
        self.broken: list[str] = []
        self.calls: list[str] = []

    def __getattribute__(self, name: str):
        function = super().__getattribute__(name)
        if not name.startswith("cu"):
            return function

        def guarded(*arguments):
            self.calls.append(name)
            if self.dead:
                return (Result.CUDA_ERROR_ILLEGAL_ADDRESS,)
            if name not in ("cuCtxPushCurrent", "cuCtxGetCurrent", "cuCtxGetDevice") and not self.contexts:
                return (Result.CUDA_ERROR_INVALID_CONTEXT,)
            return function(*arguments)

        return guarded

    @property
    def used(self) -> int:
        return sum(self.allocations.values())

    def free_unused(self) -> None:
        held = {handle for _, handle in self.mappings.values()}
        for handle in [handle for handle in self.released if handle not in held]:
            os.close(handle)
            self.released.remove(handle)
            del self.allocations[handle]

    def refuse(self, why: str) -> tuple[Result]:
        self.broken.append(why)
        return (Result.CUDA_ERROR_INVALID_VALUE,)

    def cuCtxGetCurrent(self):
        return Result.CUDA_SUCCESS, "context"

    def cuCtxGetDevice(self):
        return Result.CUDA_SUCCESS, 0

    def cuDeviceGetAttribute(self, attribute, device):
        return Result.CUDA_SUCCESS, self.supported

    def cuCtxPushCurrent(self, context):
        self.contexts.append(context)
        return (Result.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self):
        return Result.CUDA_SUCCESS, self.contexts.pop()

    def cuCtxSynchronize(self):
        return (Result.CUDA_SUCCESS,)

    def cuMemGetAllocationGranularity(self, properties, option):
        assert properties.location.type == "device"
        assert option == "minimum"
        return Result.CUDA_SUCCESS, GRANULE

    def cuMemAddressReserve(self, size, alignment, address, flags):
        if size % GRANULE or alignment % GRANULE or address or flags:
            return self.refuse("reserve: size or alignment")
        start = self.libc.mmap(None, size + GRANULE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, -1, 0)
        aligned = -(-start // GRANULE) * GRANULE
        self.reserved[aligned] = size
        return Result.CUDA_SUCCESS, aligned

    def cuMemAddressFree(self, address, size):
        if self.reserved.get(address) != size:
            return self.refuse("free: not what was reserved")
        if any(address <= start < address + size for start in self.mappings):
            return self.refuse("free: still mapped")
        del self.reserved[address]
        self.libc.munmap(address, size)
        return (Result.CUDA_SUCCESS,)

    def cuMemCreate(self, size, properties, flags):
        if size % GRANULE or not size or flags or properties.type != "pinned" or properties.location.id != 0:
            return self.refuse("create: size or properties")
        if self.used + size > self.memory:
            return (Result.CUDA_ERROR_OUT_OF_MEMORY,)
        handle = os.memfd_create("fake allocation")
        os.ftruncate(handle, size)
        self.allocations[handle] = size
        return Result.CUDA_SUCCESS, handle

    def cuMemRelease(self, handle):
        if handle not in self.allocations or handle in self.released:
            return self.refuse("release: no such handle")
        self.released.add(handle)
        self.free_unused()
        return (Result.CUDA_SUCCESS,)

    def cuMemMap(self, address, size, offset, handle, flags):
        if address % GRANULE or offset or flags or handle in self.released or self.allocations.get(handle) != size:
            return self.refuse("map: not a whole allocation in granules")
        if not any(start <= address and address + size <= start + length for start, length in self.reserved.items()):
            return self.refuse("map: not reserved")
        if any(start < address + size and address < start + length for start, (length, _) in self.mappings.items()):
            return self.refuse("map: mapped already")
        self.mappings[address] = size, handle
        self.libc.mmap(address, size, 0, mmap.MAP_SHARED | 0x10, handle, 0)
        return (Result.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address, size, descriptors, count):
        assert [descriptor.flags for descriptor in descriptors] == ["read and write"] * count
        assert all(descriptor.location.type == "device" for descriptor in descriptors)
        covered = [start for start in self.mappings if address <= start < address + size]
        if sum(self.mappings[start][0] for start in covered) != size:
            return self.refuse("access: not fully mapped")
        for start in covered:
            length, handle = self.mappings[start]
            self.libc.mmap(start, length, READ_WRITE, mmap.MAP_SHARED | 0x10, handle, 0)
            self.permitted.add(start)
        return (Result.CUDA_SUCCESS,)

    def cuMemUnmap(self, address, size):
        if address not in self.mappings or self.mappings[address][0] != size:
            return self.refuse("unmap: not exactly a mapping")
        del self.mappings[address]
        self.permitted.discard(address)
        self.libc.mmap(address, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4010, -1, 0)
        self.free_unused()
        return (Result.CUDA_SUCCESS,)

    def cuMemsetD8(self, address, byte, size):
        if not self.accessible(address, size):
            return self.refuse("memset: no access")
        if self.fills:
            ctypes.memset(address, byte, size)
        return (Result.CUDA_SUCCESS,)

    def accessible(self, address: int, size: int) -> bool:
        """Whether every byte of a range is mapped and permitted."""
        position = address
        for start in sorted(self.permitted):
            if start <= position < start + self.mappings[start][0]:
                position = start + self.mappings[start][0]
        return position >= address + size


def host_view(array, device: torch.device) -> torch.Tensor:
    """What torch makes of `__cuda_array_interface__`, of host memory; keeps `array` alive as torch does."""
    interface = array.__cuda_array_interface__
    assert (interface["typestr"], interface["strides"], interface["version"]) == ("|u1", None, 3)
    (length,), (address, read_only) = interface["shape"], interface["data"]
    assert not read_only
    buffer = (ctypes.c_uint8 * length).from_address(address)
    buffer.array = array
    return torch.frombuffer(buffer, dtype=torch.uint8)
