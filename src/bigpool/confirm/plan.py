"""From the runs of an explorer to places: which bytes lie where, below the wall, at it, and far above."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bigpool.confirm.exact import DivergedError, Position, Setting, Trace
from bigpool.confirm.explore import TOP_SPANS, Explorer, Knob
from bigpool.errors import ProofError

Runs = npt.NDArray[np.int64]
# Addresses of one piece of memory: far below what a process has.
MAX_SPAN = 1 << 40
# What a knob is turned by: a kernel that divides an id does the same again only a whole number of pages on.
STEPS = (1, 64, 4096)
PLACES = ("bottom", "below", "at", "top")


@dataclass(slots=True)
class Place:
    """One launch that is to be made.

    Attributes:
        moved: by space, int64 [n, 3]: (byte in the pool's space, byte as captured, bytes), sorted by the first.
        added: by space, int64 [n, 3]: (byte in the pool's space, bytes of an integer, what is added to it).
        own: by space, int64 [n, 2] and their bytes: where a stored value depends on the ids that were changed.
        fresh: by space, int64 [n, 2]: (byte as captured, bytes) of what is stored before anything loads it.
        written: the spaces that are written.
    """

    name: str
    setting: Setting
    moved: dict[str, Runs] = field(default_factory=dict)
    added: dict[str, Runs] = field(default_factory=dict)
    own: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)
    fresh: dict[str, Runs] = field(default_factory=dict)
    written: tuple[str, ...] = ()


@dataclass(slots=True)
class Plan:
    """How the fault is reproduced: what the knob turns is `below` in the last good launch and `at` in the first bad one.

    `operations` are those that the finding is about.
    """

    knob: Knob
    below: int
    at: int
    top: int
    along: tuple[str, ...]
    places: dict[str, Place]
    operations: frozenset[Position]


def make_plan(explorer: Explorer, variable: str) -> Plan:
    """The first knob that works, the one that the finding names before others.

    Raises:
        ProofError: none does.
    """
    if explorer.reach(explorer.first) is None:
        raise ProofError(
            "the interpreter sees no 32-bit integer operation on the finding's line in this launch (a branch that is not taken, "
            "or a loop variable, which it holds in 64 bits)"
        )
    reasons = []
    for knob in explorer.knobs(variable):
        for step in STEPS:
            try:
                amount = explorer.crossing(knob, step)
                if amount is not None:
                    return _planned(explorer, knob, amount, step)
            except DivergedError:
                reasons.append(f"with larger {knob.words} the kernel does something else")
            except ProofError as error:
                reasons.append(str(error))
    why = "; ".join(dict.fromkeys(reasons)) or "no id, program or argument that can be made larger reaches it"
    raise ProofError(why)


def _planned(explorer: Explorer, knob: Knob, amount: int, step: int) -> Plan:
    top = min(TOP_SPANS * (amount + knob.today), knob.most) // step * step
    wanted = {"bottom": 0, "below": amount - step, "at": amount, "top": max(top, amount)}
    places = {}
    along: tuple[str, ...] = ()
    for name in PLACES:
        setting, trace = explorer.bottom, explorer.first
        if wanted[name]:
            try:
                setting, trace = explorer.replay(knob.turned(explorer.bottom, wanted[name]))
                places[name] = place(name, setting, trace, explorer)
            except (DivergedError, ProofError):
                if name != "top":
                    raise
                wanted[name] = amount
                places[name] = places["at"]
            else:
                along = tuple(sorted((setting.scalars.keys() | setting.loads.keys()) - {knob.name}))
        else:
            places[name] = place(name, setting, trace, explorer)
    values = {name: knob.today + more for name, more in wanted.items()}
    return Plan(knob, values["below"], values["at"], values["top"], along, places, explorer.places)


def place(name: str, setting: Setting, trace: Trace, explorer: Explorer) -> Place:
    """Where every byte lies that this launch touches.

    Raises:
        ProofError: one byte would have to be two, or memory would start below 0.
    """
    made = Place(name, setting)
    first = explorer.first
    moves: dict[str, list[Runs]] = {}
    written: dict[str, list[Runs]] = {}
    for now, then in zip(trace.accesses, first.accesses, strict=True):
        if not now.at.size:
            continue
        rows = np.stack([now.at, then.at, np.full_like(now.at, now.item)], 1)
        moves.setdefault(now.space, []).append(rows)
        if now.kind != "load":
            written.setdefault(now.space, []).append(rows)
            _note_own(made, now, then)
    for space, parts in moves.items():
        made.moved[space] = _runs(space, np.unique(np.concatenate(parts), axis=0))
        low, high = span_of(made.moved[space])
        if high - min(low, 0) > MAX_SPAN:
            raise ProofError(f"{space}: it would have to span {high - min(low, 0):,} bytes")
    for space, parts in written.items():
        _single_home(space, np.concatenate(parts)[:, 1], np.concatenate(moves[space]))
        made.fresh[space] = _fresh(space, first)
    made.written = tuple(sorted(written))
    for argument, amount in setting.loads.items():
        _note_added(made, trace, explorer.memory.views[argument], amount)
    return made


def _note_own(made: Place, now: Any, then: Any) -> None:
    size = min(now.values.dtype.itemsize, then.values.dtype.itemsize)
    if now.values.dtype != then.values.dtype or size != now.item:
        return
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size]
    differ = np.ascontiguousarray(now.values).view(bits) != np.ascontiguousarray(then.values).view(bits)
    for at, value in zip(now.at[differ].tolist(), now.values[differ], strict=True):
        made.own.setdefault(now.space, []).append((at, value.tobytes()))


def _runs(space: str, rows: Runs) -> Runs:
    """Joins neighbours that stay neighbours."""
    again = np.unique(rows[:, [0, 2]], axis=0)
    if len(again) != len(rows):
        raise ProofError(f"{space}: two different values would have to lie at one address")
    breaks = np.flatnonzero(
        (np.diff(rows[:, 0]) != rows[:-1, 2]) | (np.diff(rows[:, 1]) != rows[:-1, 2]) | (np.diff(rows[:, 2]) != 0)
    )
    starts = np.concatenate([[0], breaks + 1])
    stops = np.concatenate([breaks + 1, [len(rows)]])
    return np.stack([rows[starts, 0], rows[starts, 1], (stops - starts) * rows[starts, 2]], 1)


def _fresh(space: str, first: Trace) -> Runs:
    found = [one for one in first.accesses if one.space == space and one.at.size]
    at = np.concatenate([one.at for one in found])
    items = np.concatenate([np.full_like(one.at, one.item) for one in found])
    stored = np.concatenate([np.full(one.at.shape, one.kind == "store") for one in found])
    _, place = np.unique(at, return_index=True)
    chosen = place[stored[place]]
    return np.stack([at[chosen], items[chosen]], 1)


def _single_home(space: str, written: Runs, rows: Runs) -> None:
    """What is written may lie at one place only, else what reads it elsewhere would see the old value."""
    homes = np.unique(rows[np.isin(rows[:, 1], written)][:, [1, 0]], axis=0)
    if len(np.unique(homes[:, 0])) != len(homes):
        raise ProofError(f"{space}: a value that is written would have to lie at two addresses")


def _note_added(made: Place, trace: Trace, view: tuple[str, int, int], amount: int) -> None:
    space, start, stop = view
    parts = []
    assert trace.like is not None
    for now, then in zip(trace.accesses, trace.like.accesses, strict=True):
        if now.kind == "load" and now.space == space and then.at.size and start <= then.at.min() and then.at.max() < stop:
            chosen = then.values >= 0
            parts.append(np.stack([now.at[chosen], np.full(int(chosen.sum()), now.item), np.full(int(chosen.sum()), amount)], 1))
    if parts:
        found = np.unique(np.concatenate(parts), axis=0)
        before = made.added.get(space)
        made.added[space] = found if before is None else np.unique(np.concatenate([before, found]), axis=0)


def span_of(moved: Runs) -> tuple[int, int]:
    """The lowest byte, and one past the highest."""
    return int(moved[:, 0].min()), int((moved[:, 0] + moved[:, 2]).max())
