"""What a case builds its inputs from: the same bytes at the bottom, across the wall and at the top of a sparse pool."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from types import ModuleType, TracebackType
from typing import Any, Literal, NoReturn, cast

import torch

from bigpool.errors import CanaryError, ProofError
from bigpool.pools import SparsePool
from bigpool.proof.case import WRONG_IN_INTERPRETER, DesignedSkip

INT32_MAX = 2**31 - 1
# Where the pages of a pool without num_pages begin at the top, in elements: beyond 2^33, so that an unsigned 32-bit index wraps
# too; 32 bits see it below the pool if they are signed, in unused pages of the pool if not.
FAR = 28 * 2**31 // 5
WHERE = {"bottom": "below the wall", "top": "above the wall", "across": "across the wall"}
Role = Literal["read", "write"]


def element_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The largest offset inside one page, in elements."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def default_num_pages(stride: int, pages: int) -> int:
    """So many that the last `pages` pages lie from `FAR` on; less where an int32 table could not hold the ids."""
    wall = INT32_MAX // stride + 1
    return max(wall + pages + wall // 10, min(FAR // stride + 1 + pages, 2**31))


def far_row_stride(num_rows: int) -> int:
    """Below 2^31, and such that the last of `num_rows` rows passes 2^33 if there are enough of them.

    2^32 is a whole number and a third of strides, so that a wrapped row lies between rows.
    """
    per_wrap = max(2, (10 * (num_rows - 1) - 7) // 21)
    return -(-(3 * 2**32) // (16 * (3 * per_wrap + 1))) * 16


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def digest(tensor: torch.Tensor) -> str:
    """Of the bits."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


class Inputs:
    """What a kernel may read but not write, and what it held before the launch."""

    def __init__(self) -> None:
        self.plain: list[tuple[str, torch.Tensor]] = []
        self._sealed: list[tuple[str, list[torch.Tensor], list[str]]] = []

    def seal(self, placed: Sequence[Placed]) -> None:
        """Note the bits as they are now."""
        rows = [(one.name, [one.tensor[row] for row in one.ids.tolist()]) for one in placed if one.role == "read"]
        rows += [(name, [tensor]) for name, tensor in self.plain]
        self._sealed = [(name, parts, [digest(part) for part in parts]) for name, parts in rows]

    def changed(self, outputs: Sequence[torch.Tensor]) -> list[str]:
        """A text for each tensor whose bits are not those of `seal`, unless it is returned as an output."""
        returned = {output.untyped_storage().data_ptr() for output in outputs}
        texts = []
        for name, parts, before in self._sealed:
            if parts[0].untyped_storage().data_ptr() in returned:
                continue
            differ = [index for index, part in enumerate(parts) if digest(part) != before[index]]
            if differ:
                where = (
                    f" in {len(differ)} of its {len(parts)} rows in use, first in logical row {differ[0]}" if parts[1:] else ""
                )
                texts.append(
                    f"{name}: expected its bits to stay, since it is only read, got others{where}; "
                    "look for a store through a wrong pointer, or make it with role='write'"
                )
        return texts


class Placed:
    """A tensor of which only some rows of axis 0 are real memory. `.tensor` is what the kernel gets.

    `ids[i]` (int64, CPU) is the physical row of logical row i; `wall` is the first row whose offset leaves 32 bits.
    """

    def __init__(self, name: str, pool: SparsePool, ids: torch.Tensor, role: Role, inputs: Inputs) -> None:
        self.name = name
        self.pool = pool
        self.tensor: torch.Tensor = pool.tensor
        self.ids = ids
        self.role = role
        self._inputs = inputs
        self.num_pages = int(self.tensor.shape[0])
        self.page_stride = int(self.tensor.stride(0))
        self.wall = INT32_MAX // self.page_stride + 1
        self.max_offset = int(ids.max()) * self.page_stride + reach(self.tensor.shape[1:], self.tensor.stride()[1:])

    def write(self, data: torch.Tensor) -> None:
        """Put `data` [len(ids), *page_shape] into the rows in use, in logical order."""
        want = (len(self.ids), *self.tensor.shape[1:])
        if tuple(data.shape) != want:
            raise ProofError(f"{self.name}: expected data of shape {list(want)}, got {list(data.shape)}")
        for logical, physical in enumerate(self.ids.tolist()):
            self.tensor[physical].copy_(data[logical])

    def read(self) -> torch.Tensor:
        """The rows in use in logical order: a compact CPU tensor [len(ids), *page_shape]."""
        return torch.stack([self.tensor[physical].cpu() for physical in self.ids.tolist()])

    def table(self, logical: torch.Tensor | Sequence[Sequence[int]], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """The block table, on the device: physical ids in place of logical ones, same shape."""
        made = self.ids[torch.as_tensor(logical, dtype=torch.int64)].to(dtype).to(self.tensor.device)
        self._inputs.plain.append((f"table of {self.name}", made))
        return made

    def facts(self) -> dict[str, Any]:
        """What the record says about this tensor."""
        return {
            "name": self.name,
            "role": self.role,
            "shape": list(self.tensor.shape),
            "dtype": str(self.tensor.dtype).removeprefix("torch."),
            "page_stride": self.page_stride,
            "wall": self.wall,
            "first_id": int(self.ids.min()),
            "last_id": int(self.ids.max()),
            "ids_in_use": len(self.ids),
            "max_offset": self.max_offset,
            "virtual_bytes": int(self.pool.virtual_bytes),
            "mapped_bytes": int(self.pool.mapped_bytes),
        }


class Context:
    """Handed to every method of a case.

    `backend`: always "triton"; `interpreted`: Triton's interpreter on the CPU rather than a GPU. `device`, `dtype`,
    `placement`, `guard`, `arm`: what this run is. `kernels`: the arm's kernel module, for a case in a user's file.
    `capability`: (major, minor) of the GPU, or None.
    """

    backend = "triton"

    def __init__(
        self,
        *,
        case: str,
        placement: str,
        guard: str,
        arm: str,
        dtype: torch.dtype,
        device: str = "cpu",
        interpreted: bool = True,
        kernels: ModuleType | None = None,
        versions: str = "",
    ) -> None:
        self.case = case
        self.placement = placement
        self.guard = guard
        self.arm = arm
        self.dtype = dtype
        self.device = torch.device(device)
        self.interpreted = interpreted
        self.kernels = kernels
        self.capability = torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None
        self.placed: list[Placed] = []
        self._inputs = Inputs()
        self._versions = versions
        self._stack = ExitStack()
        self._canaries_checked = False
        self._generator = self.generator("main")

    def __enter__(self) -> Context:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._stack.__exit__(kind, value, trace)
        except CanaryError:
            # Pools look at their canaries once more when they close.
            if not self._canaries_checked:
                raise

    def skip(self, reason: str) -> NoReturn:
        """A designed skip: the case cannot run here. `reason` says what is missing and is printed."""
        raise DesignedSkip(reason)

    def generator(self, salt: str) -> torch.Generator:
        """A CPU generator that gives the same numbers at every placement, in every arm."""
        seed = int.from_bytes(hashlib.sha256(f"{self.case}/{salt}".encode()).digest()[:6], "big")
        return torch.Generator().manual_seed(seed)

    def randn(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers on the CPU in `dtype` (default: the run's)."""
        dtype = self.dtype if dtype is None else dtype
        self._refuse_wrong_dtype("randn", dtype)
        return (torch.randn(*shape, generator=self._generator) * scale).to(dtype)

    def randint(self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Integers in [low, high) on the CPU."""
        return torch.randint(low, high, tuple(shape), generator=self._generator, dtype=torch.int64).to(dtype)

    def tensor(self, data: Any, dtype: torch.dtype | None = None, role: Role = "read") -> torch.Tensor:
        """A small plain tensor on the device (lengths, offsets): not placed, not guarded.

        It has to keep its bits, unless `run` returns it as an output, or `role="write"` says that it is scratch.
        """
        made = torch.as_tensor(data, dtype=dtype).to(self.device)
        self._refuse_wrong_dtype("tensor", made.dtype)
        if role == "read":
            self._inputs.plain.append((f"ctx.tensor() {len(self._inputs.plain) + 1}, {_kind(made)}", made))
        return made

    def pool(
        self,
        name: str,
        page_shape: Sequence[int],
        *,
        pages: int | None = None,
        num_pages: int | None = None,
        dtype: torch.dtype | None = None,
        role: Role = "read",
        strides: Sequence[int] | None = None,
        like: Placed | None = None,
    ) -> Placed:
        """A pool [num_pages, *page_shape] of which `pages` pages are in use; the rest is a trap.

        `num_pages` defaults to what puts the top beyond 2^33 elements. `strides` (elements) default to compact ones. K and V
        interleaved in a page: make one pool with page_shape (2, ...) and slice `.tensor[:, 0]` and `.tensor[:, 1]`.
        `like` takes num_pages and ids from another pool, for two caches that share one block table; at the top it has to pass
        its own wall too.
        """
        dtype = self.dtype if dtype is None else dtype
        stride = strides[0] if strides is not None else element_strides((1, *page_shape))[0]
        wall = INT32_MAX // stride + 1
        if like is not None:
            num_pages, ids = like.num_pages, like.ids
        else:
            if pages is None or pages < 1:
                raise ProofError(f"{name}: expected pages >= 1, got {pages}; say how many pages the case uses")
            if num_pages is None:
                num_pages = default_num_pages(stride, pages)
            ids = self._place(name, pages, num_pages, stride, page_shape, strides)
        placed = self._make(name, (num_pages, *page_shape), dtype, strides, ids, role)
        if like is not None and self.placement == "top" and placed.max_offset <= INT32_MAX and wall + len(ids) <= INT32_MAX:
            raise ProofError(
                f"{name}: expected an offset above {INT32_MAX} elements at top, got {placed.max_offset} at most "
                f"(num_pages={num_pages} of {like.name}, page stride {stride}); pass num_pages={wall + len(ids)} to {like.name}"
            )
        if like is None and self.placement != "bottom" and placed.max_offset <= INT32_MAX:
            raise ProofError(
                f"{name}: expected an offset above {INT32_MAX} elements at {self.placement}, got {placed.max_offset} at most "
                f"(num_pages={num_pages}, page stride {stride}); pass num_pages >= {wall + len(ids)} or leave it out"
            )
        return placed

    def rows(self, name: str, shape: Sequence[int], *, dtype: torch.dtype | None = None, role: Role = "write") -> Placed:
        """A tensor whose axis 0 the kernel indexes (tokens, requests, scratch rows), all rows in use.

        Compact at the bottom; otherwise the same rows so far apart that the last ones pass 2^31 elements (each stride
        still fits 32 bits), from 4 rows on 2^32, from 6 on 2^33. Needs at least 3 rows; every row costs a page of memory
        (2 MiB on a GPU), so keep them few.
        """
        dtype = self.dtype if dtype is None else dtype
        num_rows = shape[0]
        strides = list(element_strides(shape))
        if self.placement != "bottom":
            if num_rows < 3:
                raise ProofError(
                    f"{name}: expected at least 3 rows, got {num_rows}; two rows cannot pass 2^31 with a 32-bit stride"
                )
            strides[0] = max(strides[0], far_row_stride(num_rows))
        placed = self._make(name, tuple(shape), dtype, tuple(strides), torch.arange(num_rows), role)
        assert self.placement == "bottom" or placed.max_offset > INT32_MAX
        return placed

    def check_canaries(self) -> None:
        """Raise CanaryError if memory outside any tensor was written; guards of tensors that are read are looked at too."""
        self._canaries_checked = True
        texts: list[str] = []
        ranges: list[tuple[int, int]] = []
        for placed in self.placed:
            try:
                placed.pool.check_canaries()
            except CanaryError as error:
                texts.append(str(error).replace("SparsePool", placed.name, 1))
                ranges += error.ranges
        if texts:
            raise CanaryError("; ".join(texts), ranges)

    def seal(self) -> None:
        """Called before the launch: from now on, what is only read must keep its bits."""
        self._inputs.seal(self.placed)

    def check_inputs(self, outputs: Sequence[torch.Tensor]) -> None:
        """Raise CanaryError if a tensor that is only read was written; `outputs` are what `run` returned."""
        texts = self._inputs.changed(outputs)
        if texts:
            raise CanaryError("; ".join(texts), ())

    def _place(
        self, name: str, pages: int, num_pages: int, stride: int, page_shape: Sequence[int], strides: Sequence[int] | None
    ) -> torch.Tensor:
        wall = INT32_MAX // stride + 1
        if self.placement == "bottom":
            first = 0
        elif self.placement == "top":
            first = num_pages - pages
        else:
            inner = strides[1:] if strides is not None else element_strides(page_shape)
            straddles = (wall - 1) * stride + reach(page_shape, inner) > INT32_MAX
            first = wall - (pages // 2 if pages > 1 else int(straddles))
        if first < 0 or first + pages > num_pages:
            raise ProofError(
                f"{name}: expected a pool that holds {pages} pages {WHERE[self.placement]} at page {wall}, "
                f"got num_pages={num_pages}; leave num_pages out"
            )
        return torch.arange(first, first + pages)

    def _make(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, strides: Sequence[int] | None, ids: torch.Tensor, role: Role
    ) -> Placed:
        self._refuse_wrong_dtype(name, dtype)
        guard = "canary" if role == "write" else self.guard
        pool = self._stack.enter_context(
            SparsePool(shape, dtype, self.device, pages=ids.tolist(), strides=strides, guard=cast(Any, guard))
        )
        placed = Placed(name, pool, ids, role, self._inputs)
        self.placed.append(placed)
        return placed

    def _refuse_wrong_dtype(self, name: str, dtype: torch.dtype) -> None:
        short = WRONG_IN_INTERPRETER.get(str(dtype).removeprefix("torch."))
        if self.interpreted and short is not None:
            self.skip(
                f"{name}: {short} arithmetic is silently wrong in Triton's interpreter{self._versions}; "
                "run this case on a GPU, or with float16 or float32"
            )
