"""Canaries, damaged guards, and the end of a pool."""

from __future__ import annotations

import gc

import pytest
import torch

from bigpool.errors import CanaryError, PoolError
from bigpool.pools import SparsePool
from pools_helpers import bytes_at, readable, trapped_places

# -- canaries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["first byte below", "last byte below", "furthest wrapped element", "unmapped page"])
@pytest.mark.parametrize("guard", ["poison", "canary"])
def test_a_stray_write_below_or_inside_is_found(guard: str, place: str) -> None:
    find_stray_write(guard, place)


@pytest.mark.parametrize("place", ["first byte above", "last byte above"])
@pytest.mark.parametrize("guard", ["poison", "canary"])
def test_a_stray_write_above_is_found(guard: str, place: str) -> None:
    find_stray_write(guard, place)


def find_stray_write(guard: str, place: str) -> None:
    pool = SparsePool((64, 4096), torch.float32, pages=[0, 63], guard=guard)
    assert pool.guard_is_intact()
    pool.check_canaries()
    target = bytes_at(pool, trapped_places(pool, 5)[place], 1)
    target ^= 1
    assert not pool.guard_is_intact()
    [(offset, size)] = pool.damage().guard
    assert size == 1
    with pytest.raises(CanaryError) as caught:
        pool.check_canaries()
    assert caught.value.ranges == ((offset, 1),)
    assert str(caught.value) == (
        "SparsePool: guard: expected untouched memory outside the mapped pages, got 1 written ranges: "
        f"1 bytes at offset {offset} of the guard pattern; "
        "look for an index that wraps in 32 bits, or a store without a mask"
    )
    target ^= 1
    assert pool.guard_is_intact()
    pool.close()


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan")])
def test_a_canary_shows_any_constant(value: float) -> None:
    pool = SparsePool((64, 4096), torch.float32, pages=[0], guard="canary")
    pool.tensor[9, 100:164] = value
    [(_, size)] = pool.damage().guard
    # A byte that was right by chance may shorten the range at its ends.
    assert 64 * 4 - 4 <= size <= 64 * 4
    with pytest.raises(CanaryError):
        pool.close()


def test_a_canary_shows_a_wrapped_copy_between_guard_pages() -> None:
    # Pages a power of two apart: a pattern that repeats with them would hide a copy from one to another.
    pool = SparsePool((1024, 2**18), torch.float32, pages=[0], guard="canary")
    for source, target in [(8, 9), (16, 32), (64, 512)]:
        before = pool.tensor[target, :64].clone()
        pool.tensor[target, :64] = pool.tensor[source, :64]
        assert not pool.guard_is_intact(), (source, target)
        pool.tensor[target, :64] = before
    assert pool.guard_is_intact()
    pool.close()


@pytest.mark.parametrize("guard", ["unmapped", "poison", "canary"])
def test_a_write_to_the_slack_of_a_granule_is_found(guard: str) -> None:
    pool = SparsePool((64, 250), torch.int32, pages=[10], guard=guard)
    pool.tensor[10] = 1
    assert pool.guard_is_intact()
    pool.tensor[11, 0] = 0x01010101
    assert pool.damage() == ((), ((11_000, 4),))
    with pytest.raises(CanaryError) as caught:
        pool.check_canaries()
    assert caught.value.ranges == ((11_000, 4),)
    assert str(caught.value) == (
        "SparsePool: guard: expected untouched memory outside the mapped pages, got 1 written ranges: "
        "4 bytes at byte 11000 of the pool, beside mapped pages; "
        "look for an index that wraps in 32 bits, or a store without a mask"
    )
    if guard == "canary":
        with pytest.raises(CanaryError):
            pool.close()
    pool.close()


def test_many_damaged_ranges_are_counted_and_the_first_are_named() -> None:
    pool = SparsePool((64, 250), torch.int32, pages=[10], guard="poison")
    for word in range(0, 60, 10):
        pool.tensor[11, word] = 0
    with pytest.raises(CanaryError, match=r"got 6 written ranges: .* pages, and 2 more; look for") as caught:
        pool.check_canaries()
    assert caught.value.ranges == tuple((11_000 + 4 * word, 4) for word in range(0, 60, 10))
    pool.close()


# -- closing -----------------------------------------------------------------------------------------------------------


def test_a_clean_end_of_the_block_checks_canaries() -> None:
    with pytest.raises(CanaryError), SparsePool((64, 4096), torch.int32, guard="canary") as pool:
        pool.tensor[3, 3] = 3
    with pytest.raises(PoolError, match="got a closed one"):
        _ = pool.tensor


def test_an_exception_in_the_block_is_not_replaced() -> None:
    pool = SparsePool((64, 4096), torch.int32, guard="canary")

    def damage_and_fail() -> None:
        with pool:
            pool.tensor[3, 3] = 3
            raise KeyError("the body's own")

    with pytest.raises(KeyError, match="the body's own"):
        damage_and_fail()
    assert pool.mapped_bytes == 0


USES = {
    "tensor": lambda pool: pool.tensor,
    "base_address": lambda pool: pool.base_address,
    "map_pages": lambda pool: pool.map_pages([2]),
    "damage": lambda pool: pool.guard_is_intact(),
    "with": lambda pool: pool.__enter__(),
}


@pytest.mark.parametrize("use", USES)
def test_use_after_close(use: str) -> None:
    pool = SparsePool((4, 10), torch.float32, pages=[1])
    pool.close()
    pool.close()
    with pytest.raises(PoolError) as caught:
        USES[use](pool)
    assert str(caught.value) == f"SparsePool: {use}: expected an open pool, got a closed one; use it before it closes"
    assert pool.mapped_bytes == 0
    assert pool.mapped_pages == ()


def test_a_tensor_outlives_a_forgotten_pool() -> None:
    tensor = SparsePool((4, 4096), torch.float32, pages=[1]).tensor[1]
    address = tensor.data_ptr()
    gc.collect()
    assert readable(address)
    tensor[:] = 3.0
    assert tensor.sum() == 3 * 4096
