"""What the arguments of a sparse pool must be."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, get_args

import torch

from bigpool.errors import ArgumentError
from bigpool.pools._extents import contiguous_strides
from bigpool.pools._pattern import DTYPES

Guard = Literal["unmapped", "poison", "canary"]

_SHOWN = 4


class Checked(NamedTuple):
    """Arguments in one form."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device
    pages: set[int]


def check_pool(
    shape: Iterable[int],
    dtype: torch.dtype,
    device: str | torch.device,
    pages: Iterable[int],
    strides: Iterable[int] | None,
    guard: str,
    guard_bytes: int | None,
) -> Checked:
    """The arguments of `SparsePool`, or an ArgumentError that lists all their faults."""
    sizes = _items(shape)
    given = None if strides is None else _items(strides)
    ids: set[int] = set()
    if sizes is None:
        raise ArgumentError("SparsePool", f"shape: expected one or more positive ints, got {shape!r}; axis 0 counts the pages")
    if not sizes or not all(_is_int(size) and size > 0 for size in sizes):
        steps: tuple[int, ...] = ()
        faults = [f"shape: expected one or more positive ints, got {sizes}; axis 0 counts the pages"]
    else:
        ids, faults = check_pages(pages, sizes[0])
        steps = contiguous_strides(sizes) if strides is None else given or ()
        if given is None and strides is not None:
            faults.append(
                f"strides: expected {len(sizes)} element strides >= 0 for shape {sizes}, got {strides!r}; "
                "leave strides out for a contiguous pool"
            )
        elif len(steps) != len(sizes) or not all(_is_int(step) and step >= 0 for step in steps):
            faults.append(
                f"strides: expected {len(sizes)} element strides >= 0 for shape {sizes}, got {steps}; "
                "leave strides out for a contiguous pool"
            )
    place = _device(device)
    if place is None:
        faults.append(f"device: expected 'cpu' or 'cuda[:index]', got {str(device)!r}; sparse pools exist for these")
    faults += _scalar_faults(dtype, guard, guard_bytes)
    if faults or place is None:
        raise ArgumentError("SparsePool", *faults)
    return Checked(sizes, steps, place, ids)


def check_pages(pages: Iterable[int], num_pages: int) -> tuple[set[int], list[str]]:
    """Page ids as a set of ints, and what is wrong with them."""
    ids: set[int] = set()
    entries = _items(pages)
    if entries is None:
        return ids, [f"pages: expected integer ids, got {pages!r}; pass a list of ints or an integer tensor, such as range(8)"]
    for page in entries:
        try:
            ids.add(operator.index(page))
        except TypeError:
            return ids, [f"pages: expected integer ids, got {page!r}; pass ints or an integer tensor"]
    wrong = sorted(page for page in ids if not 0 <= page < num_pages)
    if not wrong:
        return ids, []
    shown = ", ".join(map(str, wrong[:_SHOWN])) + (f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else "")
    return ids, [f"pages: expected ids in [0, num_pages={num_pages}), got {shown}; ids count along axis 0 of the shape"]


def _scalar_faults(dtype: torch.dtype, guard: str, guard_bytes: int | None) -> list[str]:
    faults = []
    if dtype not in DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        faults.append(f"dtype: expected a torch dtype of {names}, got {dtype}; take one of the same size and view it")
    if guard not in get_args(Guard):
        faults.append(
            f"guard: expected 'unmapped', 'poison' or 'canary', got {guard!r}; 'unmapped' kills, 'poison' marks reads, "
            "'canary' shows writes"
        )
    if guard_bytes is not None and not (_is_int(guard_bytes) and guard_bytes >= 0):
        faults.append(f"guard_bytes: expected None or an int >= 0, got {guard_bytes!r}; None is 2**31 elements and one page")
    return faults


def _items(values: object) -> tuple[Any, ...] | None:
    """None for what cannot be iterated over, a number say."""
    try:
        return tuple(values)  # type: ignore[arg-type]
    except TypeError:
        return None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _device(device: str | torch.device) -> torch.device | None:
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        return None
    return place if place.type in ("cpu", "cuda") else None
