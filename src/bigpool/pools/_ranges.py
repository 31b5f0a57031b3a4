"""Sets of bytes as sorted, disjoint, half-open (start, stop) ranges."""

from __future__ import annotations

from collections.abc import Iterable

Range = tuple[int, int]


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The union of `ranges`, in any order and overlapping or not; touching ranges become one."""
    union: list[Range] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], stop))
        else:
            union.append((start, stop))
    return union


def minus(left: list[Range], right: list[Range]) -> list[Range]:
    """The bytes of `left` that are not in `right`; both merged."""
    rest: list[Range] = []
    first = 0
    for start, stop in left:
        while first < len(right) and right[first][1] <= start:
            first += 1
        position, hole = start, first
        while hole < len(right) and right[hole][0] < stop:
            if right[hole][0] > position:
                rest.append((position, right[hole][0]))
            position = right[hole][1]
            hole += 1
        if position < stop:
            rest.append((position, stop))
    return rest


def overlap(left: list[Range], right: list[Range]) -> list[Range]:
    """The bytes in both `left` and `right`; both merged."""
    return minus(left, minus(left, right))


def rounded_out(ranges: Iterable[Range], granule: int) -> list[Range]:
    """The granules that `ranges` touch, merged."""
    return merged((start // granule * granule, -(-stop // granule) * granule) for start, stop in ranges)


def total(ranges: Iterable[Range]) -> int:
    """Bytes in merged `ranges`."""
    return sum(stop - start for start, stop in ranges)
