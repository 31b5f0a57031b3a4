"""Sparse memory in which a planned launch can be made: what it touches is real, the rest is a trap."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Literal, cast

import numpy as np
import torch

from bigpool.confirm.explore import usual_setting
from bigpool.confirm.load import load_kernel
from bigpool.confirm.plan import Place, span_of
from bigpool.confirm.record import Held, JitReference, Snapshot
from bigpool.errors import CanaryError, ProofError
from bigpool.pools import SparsePool

HOST_PAGE, GPU_PAGE = 1 << 12, 1 << 21
# Memory that a reproduction may take for real.
MAX_REAL_BYTES = 1 << 33
# dtypes that a pool holds as they are; others by an integer of their size.
INTEGERS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


class Memory:
    """The spaces of a launch at one place. `guard`: "unmapped" (a wild access kills) or "mapped" (it finds NaN or canaries)."""

    def __init__(self, snapshot: Snapshot, place: Place, guard: Literal["unmapped", "mapped"], device: str) -> None:
        self.snapshot, self.place, self.device = snapshot, place, device
        self.page = HOST_PAGE if device == "cpu" else GPU_PAGE
        self.stack = ExitStack()
        self.pools: dict[str, SparsePool] = {}
        self.bytes: dict[str, torch.Tensor] = {}
        self.origin: dict[str, int] = {}
        real = 0
        try:
            for space in snapshot.spaces:
                real += self._make(space, guard)
                if real > MAX_REAL_BYTES:
                    raise ProofError(f"it touches too much memory: more than {MAX_REAL_BYTES:,} bytes would have to be real")
        except BaseException:
            self.stack.close()
            raise

    def _make(self, space: str, guard: str) -> int:
        held = [one for one in self.snapshot.arguments.values() if isinstance(one, Held) and one.space == space]
        moved = self.place.moved.get(space, np.empty((0, 3), np.int64))
        low, high = span_of(moved) if len(moved) else (0, 1)
        low, high = min(0, low), max(high, *(one.offset + 1 for one in held))
        shift = self.snapshot.alignment[space]
        origin = -(low // self.page) * self.page + shift
        dtype = getattr(torch, held[0].dtype)
        item = dtype.itemsize
        pages = self._pages(moved[:, 0] + origin, moved[:, 2])
        pages |= {(origin + one.offset) // self.page for one in held}
        count = (origin + high - 1) // self.page + 1
        kind = "unmapped" if guard == "unmapped" else "canary" if space in self.place.written else "poison"
        try:
            pool = self._pool(count, dtype, pages, kind)
        except ValueError:
            pool = self._pool(count, INTEGERS[item], pages, kind)
        self.pools[space], self.origin[space] = pool, origin
        self.bytes[space] = pool.tensor.view(-1).view(torch.uint8)
        self._fill(space, moved)
        return len(pages) * self.page

    def _pool(self, count: int, dtype: torch.dtype, pages: set[int], guard: str) -> SparsePool:
        room = 2**31 * dtype.itemsize + self.page
        shape = (count, self.page // dtype.itemsize)
        made = SparsePool(shape, dtype, self.device, pages=sorted(pages), guard=cast(Any, guard), guard_bytes=room)
        self.stack.callback(made._release)
        return made

    def _pages(self, starts: Any, sizes: Any) -> set[int]:
        first, last = starts // self.page, (starts + sizes - 1) // self.page
        pages = set(np.unique(np.concatenate([first, last])).tolist())
        for start, stop in zip(first[last > first + 1].tolist(), last[last > first + 1].tolist(), strict=True):
            pages.update(range(start, stop))
        return pages

    def _fill(self, space: str, moved: Any) -> None:
        memory, source, origin = self.bytes[space], self.snapshot.spaces[space].clone(), self.origin[space]
        # What the kernel fills may hold the right answer of an earlier launch.
        for item in (1, 2, 4, 8):
            fresh = self.place.fresh.get(space, np.empty((0, 2), np.int64))
            at = torch.from_numpy(fresh[fresh[:, 1] == item, 0])
            for byte in range(item):
                source[at + byte] = 0xFF
        for at, then, size in moved.tolist():
            memory[origin + at : origin + at + size] = source[then : then + size].to(self.device)
        for at, size, amount in self.place.added.get(space, np.empty((0, 3), np.int64)).tolist():
            number = memory[origin + at : origin + at + size]
            value = int.from_bytes(bytes(number.cpu().tolist()), "little", signed=True) + amount
            number.copy_(torch.tensor(list(value.to_bytes(size, "little", signed=True)), dtype=torch.uint8))

    def arguments(self) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, held in self.snapshot.arguments.items():
            if isinstance(held, Held):
                start = self.origin[held.space] + held.offset
                kind = getattr(torch, held.dtype)
                made[name] = self.bytes[held.space][start : start + kind.itemsize].view(kind)
            elif isinstance(held, JitReference):
                made[name] = load_kernel(held)
            else:
                made[name] = self.place.setting.scalars.get(name, held)
        return made

    def read(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """By space, on the CPU and as captured: its bytes (uint8), and which of them this launch touched (bool).

        Ids that were changed are left out, and what depends on them if it is right: neither has an equal.
        """
        found = {}
        for space, moved in self.place.moved.items():
            memory, origin = self.bytes[space], self.origin[space]
            data = torch.zeros_like(self.snapshot.spaces[space])
            touched = torch.zeros(len(data), dtype=torch.bool)
            for at, then, size in moved.tolist():
                data[then : then + size] = memory[origin + at : origin + at + size].cpu()
                touched[then : then + size] = True
            for at, value in self._own(space):
                then = _captured(moved, at)
                if bytes(data[then : then + len(value)].tolist()) == value:
                    touched[then : then + len(value)] = False
            for at, size, _ in self.place.added.get(space, np.empty((0, 3), np.int64)).tolist():
                then = _captured(moved, at)
                touched[then : then + size] = False
            found[space] = data, touched
        return found

    def _own(self, space: str) -> list[tuple[int, bytes]]:
        # The last value that is stored at an address is the one that stays.
        return list(dict(self.place.own.get(space, [])).items())

    def canaries(self) -> str:
        """What was written outside of all that the launch may touch, "" if nothing was."""
        said = []
        for space, pool in self.pools.items():
            try:
                pool.check_canaries()
            except CanaryError as error:
                said.append(str(error).replace("SparsePool", space, 1).partition("; look for")[0])
        return "; ".join(said)

    def close(self) -> None:
        self.stack.close()


def _captured(moved: Any, at: int) -> int:
    """Where a byte lay when the launch was captured."""
    row = moved[np.searchsorted(moved[:, 0], at, "right") - 1]
    return int(row[1] + at - row[0])


def plain(snapshot: Snapshot, device: str) -> tuple[dict[str, Any], Any]:
    """Arguments in ordinary tensors, as captured, and the setting of that launch."""
    spaces = {name: data.to(device) for name, data in snapshot.spaces.items()}
    made: dict[str, Any] = {}
    for name, held in snapshot.arguments.items():
        if isinstance(held, Held):
            kind = getattr(torch, held.dtype)
            made[name] = torch.empty(0, dtype=kind, device=device).set_(
                spaces[held.space].untyped_storage(), held.offset // kind.itemsize, held.shape, held.strides
            )
        else:
            made[name] = load_kernel(held) if isinstance(held, JitReference) else held
    return made, usual_setting(snapshot.grid)
