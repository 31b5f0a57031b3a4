"""Runs a kernel in Triton's interpreter as its author meant it: integers that never wrap, and a note of every access.

`Trace` is a first run on the captured bytes. `Replay` is another run whose loads give what the first one loaded, so that
addresses need no memory and may be anywhere: it says where the same launch goes when its ids are larger.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bigpool.errors import ProofError
from bigpool.layout import INT32_MAX

Array = npt.NDArray[Any]
# Lanes that a trace may touch: more take minutes and gigabytes in an interpreter.
MAX_LANES = 1 << 25
# (file, line, column, last column) of an operation, as a finding has them; columns are 0 before Python 3.11.
Position: TypeAlias = tuple[str, int, int, int]
OURS = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Setting:
    """How a launch differs from the captured one.

    Attributes:
        loads: what is added to every value >= 0 that is loaded from an argument.
        first: the first program of each axis; `launched` counts those that run, `programs` those that there are.
        scalars: values of integer arguments.
    """

    loads: Mapping[str, int] = field(default_factory=dict)
    first: tuple[int, int, int] = (0, 0, 0)
    launched: tuple[int, int, int] = (1, 1, 1)
    programs: tuple[int, int, int] = (1, 1, 1)
    scalars: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Access:
    """One load or store of a program. `at` (bytes from the start of `space`) and `values` are of the lanes in `mask`."""

    kind: str
    line: Position
    space: str
    at: Array
    mask: Array
    item: int
    values: Array


@dataclass(slots=True)
class Compared:
    """A comparison: its outcome, and the largest value of either side."""

    outcome: bytes
    left: int
    right: int


class DivergedError(Exception):
    """A replay took another way than the trace: `place` counts the comparisons before it."""


@dataclass(slots=True)
class Trace:
    """What a run touched. `reach` holds the lowest and highest exact value of narrow integers by place."""

    starts: Array
    ends: Array
    names: list[str]
    views: Mapping[str, tuple[str, int, int]]
    loads: Mapping[str, int] = field(default_factory=dict)
    like: Trace | None = None
    accesses: list[Access] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)
    reach: dict[Position, tuple[int, int]] = field(default_factory=dict)
    lanes: int = 0
    stopped: BaseException | None = None

    def fail(self, error: BaseException) -> BaseException:
        """Keeps the reason: the interpreter wraps what passes through it."""
        self.stopped = error
        return error

    # Called by the patched interpreter.

    def integer(self, data: Array) -> None:
        if data.size:
            line = user_line()
            low, high = int(data.min()), int(data.max())
            before = self.reach.get(line)
            self.reach[line] = (low, high) if before is None else (min(low, before[0]), max(high, before[1]))

    def comparison(self, left: Array, right: Array, outcome: Array) -> None:
        if left.size and right.size and left.dtype.kind in "iu" and right.dtype.kind in "iu":
            self.compared.append(Compared(np.packbits(outcome).tobytes(), int(left.max()), int(right.max())))

    def touch(
        self, kind: str, pointers: Array, mask: Array, values: Array | None, dtype: Any, memory: Callable[[], Array]
    ) -> Array:
        """One access of the kernel. `memory` does it; a replay does not call it. Returns what was loaded, of all lanes."""
        mask = np.broadcast_to(mask, pointers.shape)
        line = user_line()
        at = pointers[mask].astype(np.int64)
        self.lanes += at.size
        if self.lanes > MAX_LANES:
            raise self.fail(ProofError(f"it touches more than {MAX_LANES:,} elements; run the script with smaller tensors"))
        if self.like is not None:
            return self._again(kind, line, at, mask, values, dtype, pointers.shape)
        space = self._space(at, np.dtype(dtype).itemsize, line)
        before = memory()
        kept = before[mask] if values is None else np.broadcast_to(values, pointers.shape)[mask]
        start = int(self.starts[self.names.index(space)]) if space else 0
        self.accesses.append(Access(kind, line, space, at - start, mask, np.dtype(dtype).itemsize, np.array(kept)))
        return before

    def _space(self, at: Array, item: int, line: Position) -> str:
        if not at.size:
            return ""
        place = int(np.searchsorted(self.starts, at[0], "right")) - 1
        if place < 0 or int(at.min()) < self.starts[place] or int(at.max()) + item > self.ends[place]:
            raise self.fail(ProofError(f"as captured it reads or writes outside of its tensors, in line {line[1]}"))
        return self.names[place]

    def _again(
        self, kind: str, line: Position, at: Array, mask: Array, values: Array | None, dtype: Any, shape: tuple[int, ...]
    ) -> Array:
        assert self.like is not None
        place = len(self.accesses)
        first = self.like.accesses[place] if place < len(self.like.accesses) else None
        if first is None or first.kind != kind or first.line != line or not np.array_equal(first.mask, mask):
            raise self.fail(DivergedError())
        start = int(self.starts[self.names.index(first.space)]) if first.space else 0
        kept = first.values if values is None else np.broadcast_to(values, shape)[mask]
        if kind == "load":
            kept = self._grown(first)
        self.accesses.append(Access(kind, line, first.space, at - start, mask, first.item, np.array(kept)))
        result = np.zeros(shape, dtype)
        result[mask] = kept if kind == "load" else first.values.astype(dtype)
        return result

    def _grown(self, first: Access) -> Array:
        """What a load gives in this run."""
        for name, amount in self.loads.items():
            space, start, stop = self.views[name]
            if first.space == space and first.at.size and start <= int(first.at.min()) and int(first.at.max()) < stop:
                return np.where(first.values >= 0, first.values.astype(np.int64) + amount, first.values)
        return first.values


@lru_cache(maxsize=4096)
def _foreign(file: str) -> bool:
    """Whether a file is Triton's, numpy's, or one of these: not the author's."""
    import triton

    roots = [Path(triton.__file__).resolve().parent, Path(np.__file__).resolve().parent]
    path = Path(file).resolve()
    return file.startswith("<") or path.parent == OURS or any(root in path.parents for root in roots)


def user_line() -> Position:
    """Where the author's code stands at this moment."""
    frame: Any = sys._getframe(1)
    while frame is not None and _foreign(frame.f_code.co_filename):
        frame = frame.f_back
    return _position(frame.f_code, frame.f_lasti, frame.f_lineno) if frame is not None else ("", 0, 0, 0)


@lru_cache(maxsize=65536)
def _position(code: Any, at: int, line: int) -> Position:
    if sys.version_info >= (3, 11):
        first, _, start, stop = next(islice(code.co_positions(), at // 2, None))
        if first is not None and start is not None and stop is not None:
            return code.co_filename, first, start + 1, stop + 1
    return code.co_filename, line, 0, 0


class Untraced:
    """In place of a trace, where nothing is to be noted."""

    like = None

    def integer(self, data: Array) -> None:
        pass

    def comparison(self, left: Array, right: Array, outcome: Array) -> None:
        pass

    def touch(
        self, kind: str, pointers: Array, mask: Array, values: Array | None, dtype: Any, memory: Callable[[], Array]
    ) -> Array:
        return memory()


def overflows(reach: tuple[int, int] | None) -> bool:
    return reach is not None and (reach[1] > INT32_MAX or reach[0] < -INT32_MAX - 1)
