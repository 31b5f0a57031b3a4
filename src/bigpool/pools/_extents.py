"""Where the pages of a strided tensor lie, in bytes from its first element."""

from __future__ import annotations

from dataclasses import dataclass

from bigpool.pools._ranges import Range, merged


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of `shape`, in elements."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Extents:
    """The bytes of each index on axis 0 of a tensor with this shape and these element strides."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def total_bytes(self) -> int:
        """From the first byte of the first element to the last byte of the last."""
        return self._span(self.shape, self.strides)

    @property
    def page_bytes(self) -> int:
        """From the first byte of a page to its last, holes between its pieces included."""
        return self._span(self.shape[1:], self.strides[1:])

    def page_ranges(self, granule: int) -> list[Range]:
        """The pieces of page 0, merged; page p has the same ones `p * stride(0)` elements further.

        An axis whose steps leave a hole of a granule or more splits the page: K and V may lie terabytes apart in one
        page, and a row pool may have rows of 2 GiB. Smaller holes cannot be left without memory and count as page.
        """
        length, starts = self.itemsize, [0]
        for stride, size in sorted(zip(self.strides[1:], self.shape[1:], strict=True)):
            step = stride * self.itemsize
            if size == 1 or step == 0:
                continue
            if len(starts) == 1 and step < length + granule:
                length += (size - 1) * step
            else:
                starts = [start + index * step for index in range(size) for start in starts]
        return merged((start, start + length) for start in starts)

    def _span(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
        return self.itemsize * (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)))
