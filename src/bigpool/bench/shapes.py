"""The shapes that are timed, written as `b1-q8-kv60000-p880-h24/4-d256`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bigpool.cost import Cost, verify_cost
from bigpool.errors import ArgumentError
from bigpool.layout import INT32_MAX

PARTS = {
    "b": ("num_reqs", r"b(\d+)"),
    "q": ("q_len", r"q(\d+)"),
    "kv": ("seq_len", r"kv(\d+)(k?)"),
    "p": ("page_size", r"p(\d+)"),
    "h": ("heads", r"h(\d+)/(\d+)"),
    "d": ("head_dim", r"d(\d+)"),
}
K = 1_024
# Formats of a cache that are timed, and what a scale of each stands for; "none": the dtype of q.
FORMATS = {"bf16": "none", "fp16": "none", "fp8_e4m3": "head", "int8": "token_head", "int4": "token_head"}


@dataclass(frozen=True)
class Shape:
    """`num_reqs` requests of `seq_len` tokens each, the last `q_len` of them new."""

    num_reqs: int = 1
    q_len: int = 8
    seq_len: int = 8 * K
    page_size: int = 880
    num_q_heads: int = 24
    num_kv_heads: int = 4
    head_dim: int = 256

    @property
    def name(self) -> str:
        """What `parse` reads back."""
        length = f"{self.seq_len // K}k" if self.seq_len % K == 0 else str(self.seq_len)
        heads = f"h{self.num_q_heads}/{self.num_kv_heads}"
        return f"b{self.num_reqs}-q{self.q_len}-kv{length}-p{self.page_size}-{heads}-d{self.head_dim}"

    @property
    def pages_per_req(self) -> int:
        return -(-self.seq_len // self.page_size)

    @property
    def num_pages(self) -> int:
        return self.num_reqs * self.pages_per_req

    @property
    def max_offset(self) -> int:
        """The largest element offset into one cache."""
        return self.num_pages * self.page_size * self.num_kv_heads * self.head_dim - 1

    def cost(self, itemsize: int) -> Cost:
        """Of a cache in q's dtype, `itemsize` bytes an element."""
        return self._cost(itemsize, None)

    def _cost(self, itemsize: int, kv_bytes_per_row: float | None) -> Cost:
        lengths = [self.seq_len] * self.num_reqs, [self.q_len] * self.num_reqs
        return verify_cost(
            *lengths, num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
            page_size=self.page_size, itemsize=itemsize, kv_bytes_per_row=kv_bytes_per_row,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}


# The shapes of the published comparison: 24 q / 4 kv heads, D 256, page 880.
TABLE = tuple(
    Shape(num_reqs, q_len, length * K)
    for num_reqs, q_len, length in (
        (1, 4, 8), (1, 4, 32), (1, 8, 128), (1, 16, 32), (1, 16, 128), (1, 4, 256), (16, 8, 32), (64, 4, 1), (64, 4, 8),
    )
)  # fmt: skip
# The original system's 12 timing geometries, at the page size of its test and at that of its server.
ORIGINAL = tuple(
    Shape(1, q_len, seq_len, page_size)
    for page_size in (432, 880)
    for seq_len in (1_500, 4_000, 25_000, 60_000)
    for q_len in (8, 16, 32)
)
# What Triton's interpreter and the torch twin do in milliseconds.
TINY = (Shape(1, 4, 96, 16, 4, 2, 32), Shape(2, 2, 48, 16, 4, 2, 32))


def parse(text: str, shape: Shape = Shape()) -> Shape:
    """A shape from its name; parts that are left out are those of `shape`."""
    for part in filter(None, text.lower().split("-")):
        found = next(
            ((field, match) for field, pattern in PARTS.values() if (match := re.fullmatch(pattern, part)) is not None), None
        )
        if found is None:
            remedy = "write the parts that differ, such as b16-q8-kv32k-p880-h24/4-d256"
            raise ArgumentError("bigpool bench", f"--shapes: expected parts b q kv p h d with numbers, got {part!r}; {remedy}")
        field, match = found
        if field == "heads":
            shape = replace(shape, num_q_heads=int(match[1]), num_kv_heads=int(match[2]))
        elif field == "seq_len":
            shape = replace(shape, seq_len=int(match[1]) * (K if match[2] else 1))
        else:
            shape = replace(shape, **{field: int(match[1])})
    return shape


def format_faults(names: Sequence[str]) -> list[str]:
    """In words, each name that is not in FORMATS."""
    contract = f"one of {', '.join(FORMATS)}"
    unknown = [name for name in names if name not in FORMATS]
    return [f"--format: expected {contract}, got {name!r}; repeat the option for several" for name in unknown]


def check(shapes: Sequence[Shape]) -> None:
    """Shapes that the op cannot run, and pools in which a version without widening would read wild memory."""
    faults = []
    for shape in shapes:
        numbers = (value for value in asdict(shape).values() if isinstance(value, int))
        if not all(number > 0 for number in numbers):
            faults.append(f"--shapes: expected numbers above 0, got {shape.name}; leave a part out for its default")
        elif shape.num_q_heads % shape.num_kv_heads:
            heads = f"h{shape.num_q_heads}/{shape.num_kv_heads}"
            faults.append(f"--shapes: expected q heads a multiple of kv heads, got {heads}; write h24/4 or the like")
        elif shape.q_len > shape.seq_len:
            faults.append(f"--shapes: expected q at most kv, got {shape.name}; kv counts the new tokens too")
        elif shape.max_offset > INT32_MAX:
            faults.append(
                f"--shapes: expected a pool below 2^31 elements, got {shape.max_offset + 1:,} in {shape.name}; past it a version "
                "without 64-bit page ids is wrong, which is for bigpool prove"
            )
    if faults:
        raise ArgumentError("bigpool bench", *faults)
