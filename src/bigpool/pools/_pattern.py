"""What guard memory holds: poison, which a reader recognises, or a canary, which shows every stray write."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROW_BYTES = 4096
# Bounds the temporary tensors of a fill or a comparison.
BATCH_BYTES = 1 << 22
# On a GPU a fill of few bytes costs its launches.
DEVICE_BATCH_BYTES = 1 << 25
# A store of a few equal bytes can leave some of them as they were: holes up to this size do not split a report.
REPORT_GAP = 16
MAX_REPORTED = 1024

_FLOATS = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
DTYPES = _FLOATS + _INTEGERS


def poison_byte(dtype: torch.dtype) -> int:
    """The byte that poisoned memory of `dtype` repeats.

    0xFF makes NaN in every float dtype here, float8_e4m3fn and float8_e5m2 included. Integers have no NaN: 0x80 makes
    the most negative int8, 128 in uint8, and a negative value far outside any pool in int32 and int64.
    """
    return 0xFF if dtype in _FLOATS else 0x80


def poison_value(dtype: torch.dtype) -> float | int:
    """What a read of one poisoned element of `dtype` gives: NaN, or the integer that repeats 0x80."""
    if dtype in _FLOATS:
        return float("nan")
    return int.from_bytes(bytes([0x80]) * dtype.itemsize, "little", signed=dtype.is_signed)


def is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """A bool tensor of the shape of `tensor`: which elements still hold the poison bit pattern of its dtype.

    A NaN that a kernel computed has another bit pattern, save by chance. Does not sync the host.
    """
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    word = bytes([poison_byte(tensor.dtype)]) * tensor.dtype.itemsize
    return tensor.view(integer) == int.from_bytes(word, "little", signed=integer.is_signed)


@dataclass(frozen=True)
class Pattern:
    """Bytes for each position of a line without end: `byte` everywhere, or pseudo-random where `byte` is None."""

    byte: int | None

    def write(self, view: torch.Tensor, position: int) -> None:
        """Fill the uint8 tensor `view` [n] with the pattern from `position` on."""
        if self.byte is not None:
            view.fill_(self.byte)
            return
        step = BATCH_BYTES if view.device.type == "cpu" else DEVICE_BATCH_BYTES
        for start in range(0, view.numel(), step):
            batch = view[start : start + step]
            batch.copy_(_canary(position + start, batch.numel(), view.device))

    def differs(self, view: torch.Tensor, position: int) -> torch.Tensor:
        """Bool [n]: the bytes of the uint8 tensor `view` [n] that are not the pattern's from `position` on."""
        if self.byte is not None:
            return view != self.byte
        return view != _canary(position, view.numel(), view.device)


def damaged_ranges(pattern: Pattern, places: list[tuple[torch.Tensor, int]]) -> list[tuple[int, int]]:
    """(position, bytes) of all places that differ from `pattern`; `places` are uint8 views and their positions.

    One host sync if nothing differs. Gives at most the first 1024 ranges of each 4 MiB.
    """
    batches = [
        (view[start : start + BATCH_BYTES], position + start)
        for view, position in places
        for start in range(0, view.numel(), BATCH_BYTES)
    ]
    if not batches:
        return []
    flags = torch.stack([pattern.differs(view, position).any() for view, position in batches]).tolist()
    ranges: list[tuple[int, int]] = []
    for (view, position), flag in zip(batches, flags, strict=True):
        if flag:
            ranges += _runs(pattern.differs(view, position), position)
    return _joined(ranges)


def _runs(mask: torch.Tensor, position: int) -> list[tuple[int, int]]:
    """(position, length) of the runs of True in the bool tensor `mask` [n]."""
    edge = torch.zeros(1, dtype=torch.int8, device=mask.device)
    steps = torch.diff(mask.to(torch.int8), prepend=edge, append=edge)
    bounds = steps.nonzero().flatten()[: 2 * MAX_REPORTED].tolist()
    return [(position + start, stop - start) for start, stop in zip(bounds[::2], bounds[1::2], strict=True)]


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, length in ranges:
        if joined and 0 <= start - sum(joined[-1]) <= REPORT_GAP:
            joined[-1] = (joined[-1][0], start + length - joined[-1][0])
        else:
            joined.append((start, length))
    return joined


def _canary(position: int, length: int, device: torch.device) -> torch.Tensor:
    """uint8 [length]: a row of mixed column numbers, each row of it xored with a mixed row number."""
    first, last = position // ROW_BYTES, -(-(position + length) // ROW_BYTES)
    columns = _mixed(torch.arange(-ROW_BYTES // 8, 0, dtype=torch.int64, device=device))
    rows = _mixed(torch.arange(first, last, dtype=torch.int64, device=device))
    line = (rows[:, None] ^ columns[None, :]).view(torch.uint8).flatten()
    skip = position - first * ROW_BYTES
    return line[skip : skip + length]


def _mixed(index: torch.Tensor) -> torch.Tensor:
    # Two rounds of multiply and shift make all 64 bits depend on the index; int64 products wrap in torch.
    index = (index + 0x5851F42D4C957F2D) * 0x2545F4914F6CDD1D
    index = (index ^ (index >> 29)) * 0x369DEA0F31A53F85
    return index ^ (index >> 32)
