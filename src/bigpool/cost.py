"""Work of each op from its shapes and lengths alone: operations, bytes, and the time that a machine needs for them at least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TABLE_ENTRY_BYTES = LENGTH_BYTES = LSE_BYTES = 4


@dataclass(frozen=True)
class Cost:
    """`flops`: multiplications and additions. `bytes_read`, `bytes_written`: what must cross the memory bus once; no scratch."""

    flops: int
    bytes_read: int
    bytes_written: int

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of a machine: bytes a second read, bytes a second copied (read + written), operations a second."""

    read: float
    copy: float
    matrix: float


@dataclass(frozen=True)
class Floor:
    """Seconds that the memory and the matrix units need at least; they work side by side, so the longer one binds."""

    memory: float
    matrix: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.matrix)

    @property
    def bound(self) -> str:
        return "memory" if self.memory >= self.matrix else "matrix"


def visible_keys(seq_len: int, q_len: int) -> int:
    """Keys that the query tokens of a request see, summed over them; causal, bottom-right aligned."""
    first = max(seq_len - q_len + 1, 0)
    tokens = seq_len - first + 1 if seq_len > 0 and q_len > 0 else 0
    return tokens * (first + seq_len) // 2


def verify_cost(
    seq_lens: Sequence[int],
    q_lens: Sequence[int],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    itemsize: int,
    kv_bytes_per_row: float | None = None,
) -> Cost:
    """Cost of one call of verify attention (prefill of a chunk too: the same sums).

    Each key and value in use is read once, whatever the number of query tokens and heads. `kv_bytes_per_row` is what one key
    (or value) of one head takes with its scale, head_dim * itemsize if None. Requests without query tokens read nothing.
    """
    busy = [(seq_len, q_len) for seq_len, q_len in zip(seq_lens, q_lens, strict=True) if q_len > 0]
    pairs = sum(visible_keys(seq_len, q_len) for seq_len, q_len in busy)
    row = head_dim * itemsize if kv_bytes_per_row is None else kv_bytes_per_row
    keys = sum(max(seq_len, 0) for seq_len, _ in busy)
    rows_of_q = sum(q_len for _, q_len in busy) * num_q_heads
    table = sum(-(-max(seq_len, 0) // page_size) for seq_len, _ in busy) * TABLE_ENTRY_BYTES
    lengths = (2 * len(seq_lens) + 1) * LENGTH_BYTES
    return Cost(
        flops=4 * head_dim * num_q_heads * pairs,
        bytes_read=int(2 * keys * num_kv_heads * row) + rows_of_q * head_dim * itemsize + table + lengths,
        bytes_written=rows_of_q * (head_dim * itemsize + LSE_BYTES),
    )


def floor_of(cost: Cost, ceilings: Ceilings) -> Floor:
    """What `cost` takes at least at these rates. What is written counts at the copy rate's price of a byte."""
    memory = cost.bytes_read / ceilings.read + cost.bytes_written / ceilings.copy
    return Floor(memory, cost.flops / ceilings.matrix)
