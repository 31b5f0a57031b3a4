"""Looks for a change of the launch that takes the finding's line past 32 bits and leaves everything else as it was."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bigpool.confirm.exact import Access, DivergedError, Position, Setting, Trace, overflows
from bigpool.confirm.patch import exact, first_programs
from bigpool.confirm.record import Held, Snapshot
from bigpool.errors import ProofError
from bigpool.layout import INT32_MAX

# Programs that are run of a larger grid: the last ones of each axis.
MAX_PROGRAMS = 8
MAX_REPAIRS = 3
# Steps after which an operation should have grown: an id may be divided first.
PROBES = (1, 64, 4096)
AXIS_LIMIT = (INT32_MAX, 65_535, 65_535)
# As far past the wall as the top lies: beyond 2^33 elements where the ids allow it.
TOP_SPANS = 4


@dataclass(frozen=True, slots=True)
class Knob:
    """What is made larger: the values loaded from an argument ("load"), program ids of an axis ("program"), or a "scalar".

    `variable` is the author's name for it, `today` its largest value in the captured launch, `most` the largest it may get.
    """

    kind: str
    name: str
    variable: str
    today: int
    most: int

    def turned(self, setting: Setting, amount: int) -> Setting:
        if self.kind == "load":
            return replace(setting, loads={**setting.loads, self.name: amount})
        if self.kind == "scalar":
            return replace(setting, scalars={**setting.scalars, self.name: self.today + amount})
        axis = int(self.name)
        first, programs = list(setting.first), list(setting.programs)
        first[axis] += amount
        programs[axis] += amount
        return replace(setting, first=(first[0], first[1], first[2]), programs=(programs[0], programs[1], programs[2]))

    @property
    def words(self) -> str:
        what = {"load": f"values loaded from {self.name}", "program": f"programs of axis {self.name}", "scalar": "argument"}
        return f"{self.variable} ({what[self.kind]})" if self.variable != self.name or self.kind != "scalar" else self.name


class Memory:
    """The captured bytes, and arguments that lie in them."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.spaces = {name: data.clone() for name, data in snapshot.spaces.items()}
        self.views: dict[str, tuple[str, int, int]] = {}
        for name, held in snapshot.arguments.items():
            if isinstance(held, Held):
                item = _itemsize(held.dtype)
                last = sum((size - 1) * step for size, step in zip(held.shape, held.strides, strict=True)) if held.shape else 0
                self.views[name] = (held.space, held.offset, held.offset + (last + 1) * item)

    def trace(self, setting: Setting, like: Trace | None = None) -> Trace:
        bounds = sorted((data.data_ptr(), data.data_ptr() + data.numel(), name) for name, data in self.spaces.items())
        starts, ends = (np.array([bound[place] for bound in bounds], np.int64) for place in (0, 1))
        return Trace(starts, ends, [bound[2] for bound in bounds], self.views, setting.loads, like)

    def arguments(self, setting: Setting) -> dict[str, Any]:
        import torch

        made: dict[str, Any] = {}
        for name, held in self.snapshot.arguments.items():
            if isinstance(held, Held):
                data = self.spaces[held.space][held.offset :]
                kind = getattr(torch, held.dtype)
                whole = data[: data.numel() // _itemsize(held.dtype) * _itemsize(held.dtype)]
                made[name] = whole.view(kind) if whole.data_ptr() % _itemsize(held.dtype) == 0 else whole
            else:
                made[name] = setting.scalars.get(name, held)
        return made


def _itemsize(dtype: str) -> int:
    import torch

    return int(getattr(torch, dtype).itemsize)


class Explorer:
    """Runs of one kernel in the exact interpreter. `span` is where the finding's operation stands."""

    def __init__(self, kernel: Any, snapshot: Snapshot, span: Position, last_line: int) -> None:
        self.kernel = kernel
        self.snapshot = snapshot
        self.memory = Memory(snapshot)
        self.bottom = usual_setting(snapshot.grid)
        self.first = self._run(self.bottom)
        self.places = _places(self.first, span, last_line)

    def _run(self, setting: Setting, like: Trace | None = None, narrow: frozenset[Position] = frozenset()) -> Trace:
        trace = self.memory.trace(setting, like)
        try:
            with exact(trace, narrow), first_programs(setting):
                self.kernel[setting.launched](**self.memory.arguments(setting))
        except Exception as error:  # the interpreter raises what the kernel raises
            if trace.stopped is not None:
                raise trace.stopped from None
            if like is not None:
                raise DivergedError from error
            raise ProofError(
                f"the interpreter cannot run it: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            ) from error
        if like is not None and len(trace.accesses) != len(like.accesses):
            trace.stopped = DivergedError()
            raise trace.stopped
        return trace

    def reach(self, trace: Trace) -> tuple[int, int] | None:
        found = [reach for place, reach in trace.reach.items() if place in self.places]
        return (min(low for low, _ in found), max(high for _, high in found)) if found else None

    def knobs(self, variable: str) -> list[Knob]:
        """What can be made larger, the finding's variable first."""
        found = [*self._loads(variable), *self._programs(), *self._scalars()]
        return sorted(found, key=lambda knob: variable not in (knob.variable, knob.name))

    def _loads(self, wanted: str = "") -> Iterator[Knob]:
        for name, held in self.snapshot.arguments.items():
            if not isinstance(held, Held) or held.dtype not in ("int64", "int32", "int16", "uint32"):
                continue
            space, start, stop = self.memory.views[name]
            loads = [
                one for one in self.first.accesses if one.kind == "load" and one.space == space and _inside(one, start, stop)
            ]
            if not loads:
                continue
            bits = {"int64": 63, "int32": 31, "int16": 15, "uint32": 31}[held.dtype]
            largest: dict[str, int] = {}
            for one in loads:
                assigned = _assigned(one.line) or name
                largest[assigned] = max(largest.get(assigned, 0), int(one.values.max()))
            variable = wanted if wanted in largest else next(iter(largest))
            yield Knob("load", name, variable, largest[variable], min(2**bits - 1, 2**40) - max(largest.values()))

    def _programs(self) -> Iterator[Knob]:
        for axis in range(3):
            first, launched = self.bottom.first[axis], self.bottom.launched[axis]
            today = first + launched - 1
            variable = self._program_name(axis)
            if self.snapshot.grid[axis] >= 1 and variable:
                yield Knob("program", str(axis), variable, today, AXIS_LIMIT[axis] - 1 - today)

    def _program_name(self, axis: int) -> str:
        pattern = re.compile(rf"^\s*(\w+)\s*=.*program_id\(\s*(?:axis\s*=\s*)?{axis}\s*\)", re.M)
        found = pattern.search(_text(self.snapshot.file)[_def_line(self.kernel) :])
        return found[1] if found else f"program_id({axis})"

    def _scalars(self) -> Iterator[Knob]:
        for name, value in self.snapshot.arguments.items():
            constexpr = name in _constexprs(self.kernel)
            if type(value) is int and 1 < value <= INT32_MAX and not constexpr:
                yield Knob("scalar", name, name, value, INT32_MAX - value)

    def replay(self, setting: Setting) -> tuple[Setting, Trace]:
        """The run at `setting`, with sizes grown along where a comparison would come out otherwise.

        Raises:
            DivergedError: the kernel would do something else.
        """
        for _ in range(MAX_REPAIRS):
            trace = None
            try:
                return setting, self._run(setting, self.first)
            except DivergedError:
                trace = self._last(setting)
            repaired = self._repaired(setting, trace)
            if repaired is None:
                raise DivergedError from None
            setting = repaired
        raise DivergedError

    def _last(self, setting: Setting) -> Trace:
        """The comparisons of a run that diverges, as far as it came."""
        trace = self.memory.trace(setting, self.first)
        try:
            with exact(trace), first_programs(setting):
                self.kernel[setting.launched](**self.memory.arguments(setting))
        except Exception:  # what it did until then is what is of interest
            return trace
        return trace

    def _repaired(self, setting: Setting, trace: Trace) -> Setting | None:
        pairs = zip(self.first.compared, trace.compared, strict=False)
        place, now, then = next(((at, b, a) for at, (a, b) in enumerate(pairs) if a.outcome != b.outcome), (0, None, None))
        if now is None or then is None:
            return None
        growth = max(now.left - then.left, now.right - then.right)
        if growth <= 0:
            return None
        for knob in [*self._scalars(), *self._loads()]:
            if knob.name in setting.scalars or knob.name in setting.loads or growth > knob.most:
                continue
            grown = knob.turned(setting, growth)
            again = self._last(grown).compared
            if len(again) > place and all(
                a.outcome == b.outcome for a, b in zip(again[: place + 1], self.first.compared, strict=False)
            ):
                return grown
        return None

    def crossing(self, knob: Knob, step: int) -> int | None:
        """The smallest multiple of `step` at which the finding's line leaves 32 bits, None if there is none.

        Raises:
            DivergedError: on the way there the kernel does something else.
        """
        start = self.reach(self.first)
        most = knob.most // step
        if start is None or overflows(start) or most < 1:
            return None
        guess = self._guess(knob, step, _extent(start))
        if guess is None:
            return None
        count = _first(lambda count: count > 0 and self._over(knob, count * step), min(guess, most), most)
        if count is None and guess <= most and overflows(self.reach(self.replay(knob.turned(self.bottom, guess * step))[1])):
            # It leaves 32 bits and nothing comes of it. The launches will tell.
            count = guess
        return None if count is None else count * step

    def _guess(self, knob: Knob, step: int, today: int) -> int | None:
        """How many steps take the operation past 32 bits if it grows as evenly as at its start; None if it does not grow."""
        for count in PROBES:
            if count * step > knob.most:
                return None
            reach = self.reach(self.replay(knob.turned(self.bottom, count * step))[1])
            if reach is not None and (grown := _extent(reach)) > today:
                return (INT32_MAX - today) * count // (grown - today) + 1
        return None

    def _over(self, knob: Knob, amount: int) -> bool:
        """Whether the operation leaves 32 bits where it matters: alone in 32 bits, it changes what the kernel does."""
        setting, wide = self.replay(knob.turned(self.bottom, amount))
        if not overflows(self.reach(wide)):
            return False
        try:
            alone = self._run(setting, self.first, self.places)
        except DivergedError:
            return True
        pairs = zip(wide.accesses, alone.accesses, strict=True)
        return any(not np.array_equal(a.at, b.at) or not np.array_equal(a.values, b.values) for a, b in pairs)


def _extent(reach: tuple[int, int]) -> int:
    """How far from zero, on the side that is nearer to its limit."""
    return max(reach[1], -reach[0] - 1)


def _first(over: Callable[[int], bool], guess: int, most: int) -> int | None:
    """The smallest count for which `over` holds (it holds from there on), looked for around a guess."""
    low, high, stride = 0, guess, 1
    if over(guess):
        while (low := max(guess - stride, 0)) and over(low):
            high, stride = low, 2 * stride
    else:
        while not over(high):
            if high == most:
                return None
            low, high, stride = high, min(high + stride, most), 2 * stride
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if over(middle) else (middle, high)
    return high


def _places(trace: Trace, span: Position, last_line: int) -> frozenset[Position]:
    """The operations that a finding is about: those that begin where it does (a product, a sum on it), else all in its lines."""
    file, line, col, _ = span
    here = [place for place in trace.reach if _resolved(place[0]) == file and line <= place[1] <= last_line]
    return frozenset([place for place in here if place[1:3] == (line, col)] or here)


def usual_setting(grid: tuple[int, int, int]) -> Setting:
    """The captured launch, or the last programs of each axis of a large one."""
    launched = list(grid)
    while launched[0] * launched[1] * launched[2] > MAX_PROGRAMS:
        widest = max(range(3), key=lambda axis: launched[axis])
        launched[widest] = (launched[widest] + 1) // 2
    first = tuple(all_ - some for all_, some in zip(grid, launched, strict=True))
    return Setting(first=(first[0], first[1], first[2]), launched=(launched[0], launched[1], launched[2]), programs=grid)


def _inside(access: Access, start: int, stop: int) -> bool:
    return bool(access.at.size) and start <= int(access.at.min()) and int(access.at.max()) < stop


def _resolved(file: str) -> str:
    return str(Path(file).resolve()) if file else ""


def _text(file: str) -> str:
    import linecache

    return "".join(linecache.getlines(file))


def _assigned(line: Position) -> str:
    """The name that is assigned in a line, "" if none is."""
    import linecache

    found = re.match(r"\s*(\w+)\s*(?::[^=]*)?=[^=]", linecache.getline(line[0], line[1]))
    return found[1] if found else ""


def _def_line(kernel: Any) -> int:
    """Characters of the file before the kernel's first line."""
    code = kernel.fn.__code__
    import linecache

    return sum(len(line) for line in linecache.getlines(code.co_filename)[: code.co_firstlineno - 1])


def _constexprs(kernel: Any) -> set[str]:
    notes: Mapping[str, Any] = getattr(kernel.fn, "__annotations__", {})
    return {name for name, note in notes.items() if "constexpr" in str(note)}
