"""Floors from shapes, against sums that are counted one by one."""

from __future__ import annotations

import pytest

from bigpool.bench import shapes
from bigpool.bench.shapes import Shape, parse
from bigpool.cost import Ceilings, floor_of, verify_cost, visible_keys
from bigpool.errors import ArgumentError

H200 = Ceilings(read=4.65e12, copy=4.26e12, matrix=750e12)


@pytest.mark.parametrize(("seq_len", "q_len"), [(1, 1), (10, 1), (10, 4), (10, 10), (3, 5), (0, 4), (7, 0)])
def test_visible_keys_are_counted_token_by_token(seq_len: int, q_len: int) -> None:
    counted = sum(max(seq_len - q_len + i + 1, 0) for i in range(q_len)) if seq_len else 0
    assert visible_keys(seq_len, q_len) == counted


def test_cost_of_a_ragged_batch() -> None:
    cost = verify_cost([10, 3, 5], [4, 0, 1], num_q_heads=4, num_kv_heads=2, head_dim=8, page_size=4, itemsize=2)
    assert cost.flops == 4 * 8 * 4 * (7 + 8 + 9 + 10 + 5)
    keys, queries, table, lengths = 2 * (10 + 5) * 2 * 8 * 2, 5 * 4 * 8 * 2, (3 + 2) * 4, 7 * 4
    assert cost.bytes_read == keys + queries + table + lengths
    assert cost.bytes_written == 5 * 4 * (8 * 2 + 4)


def test_a_smaller_cache_row_makes_a_lower_floor() -> None:
    sizes = {"num_q_heads": 24, "num_kv_heads": 4, "head_dim": 256, "page_size": 880, "itemsize": 2}
    full, eight = (verify_cost([131_072], [8], kv_bytes_per_row=row, **sizes) for row in (None, 256 + 4))  # type: ignore[arg-type]
    assert floor_of(eight, H200).memory / floor_of(full, H200).memory == pytest.approx(260 / 512, rel=1e-3)


def test_the_published_floor_of_128k_tokens() -> None:
    """115 us at 4.65 TB/s for 24 q / 4 kv heads, D 256."""
    floor = floor_of(Shape(1, 4, 128 * 1024).cost(2), H200)
    assert floor.seconds * 1e6 == pytest.approx(115.5, abs=0.5)
    assert floor.bound == "memory"


def test_many_query_tokens_are_bound_by_the_matrix_units() -> None:
    assert floor_of(Shape(1, 256, 60_000, num_kv_heads=1).cost(2), H200).bound == "matrix"


def test_the_shape_sets() -> None:
    assert len(shapes.TABLE) == 9
    assert len(shapes.ORIGINAL) == 24
    assert {shape.page_size for shape in shapes.ORIGINAL} == {432, 880}
    for shape in (*shapes.TABLE, *shapes.ORIGINAL, *shapes.TINY):
        assert parse(shape.name) == shape
        assert shape.max_offset < 2**31 - 1, "a version with 32-bit page ids must be right on what is timed"
    shapes.check([*shapes.TABLE, *shapes.ORIGINAL])


def test_parts_that_are_left_out_are_the_defaults() -> None:
    assert parse("b2-kv1500") == Shape(num_reqs=2, seq_len=1_500)
    assert parse("KV4k").seq_len == 4_096


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "b1-x9",
            "bigpool bench: --shapes: expected parts b q kv p h d with numbers, got 'x9'; write the parts that differ, such as "
            "b16-q8-kv32k-p880-h24/4-d256",
        ),
        (
            "b0",
            "bigpool bench: --shapes: expected numbers above 0, got b0-q8-kv8k-p880-h24/4-d256; leave a part out for its default",
        ),
        (
            "h5/2",
            "bigpool bench: --shapes: expected q heads a multiple of kv heads, got h5/2; write h24/4 or the like",
        ),
        (
            "q8-kv4",
            "bigpool bench: --shapes: expected q at most kv, got b1-q8-kv4-p880-h24/4-d256; kv counts the new tokens too",
        ),
        (
            "b64-kv64k",
            "bigpool bench: --shapes: expected a pool below 2^31 elements, got 4,325,376,000 in b64-q8-kv64k-p880-h24/4-d256; "
            "past it a version without 64-bit page ids is wrong, which is for bigpool prove",
        ),
    ],
)
def test_shapes_that_are_refused(text: str, error: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        shapes.check([parse(text)])
    assert str(caught.value) == error
