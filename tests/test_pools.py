"""Sparse pools of the host: what their pages hold, layouts, numbers, and the text of every error."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch

from bigpool.errors import ArgumentError, PoolError, UnsupportedPlatformError
from bigpool.pools import SparsePool, _host, is_poison, poison_byte, poison_value
from pools_helpers import GRANULE, bytes_at, trapped_places

FLOATS = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
INTEGERS = {
    torch.int8: -128,
    torch.uint8: 128,
    torch.int32: -0x7F7F7F80,
    torch.int64: -0x7F7F7F7F7F7F7F80,
}


# -- contents ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_poison_is_nan_in_every_float_dtype(dtype: torch.dtype) -> None:
    with SparsePool((8, 4096), dtype, pages=[3], guard="poison") as pool:
        assert pool.tensor.dtype == dtype
        for page in (3, 5):
            assert pool.tensor[page].float().isnan().all()
            assert is_poison(pool.tensor[page]).all()
        for offset in trapped_places(pool, 5).values():
            start = offset // dtype.itemsize * dtype.itemsize
            assert bytes_at(pool, start, dtype.itemsize).view(dtype).float().isnan().all()
        pool.tensor[3] = 1.0
        assert not is_poison(pool.tensor[3]).any()
    assert math.isnan(poison_value(dtype))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_poison_of_integers_is_recognisable(dtype: torch.dtype) -> None:
    with SparsePool((8, 4096), dtype, pages=[3], guard="poison") as pool:
        assert poison_byte(dtype) == 0x80
        assert poison_value(dtype) == INTEGERS[dtype]
        for page in (3, 5):
            assert (pool.tensor[page] == INTEGERS[dtype]).all()
            assert is_poison(pool.tensor[page]).all()
        pool.tensor[3] = 7
        assert (pool.tensor[3] == 7).all()
        assert not is_poison(pool.tensor[3]).any()


def test_a_computed_nan_is_not_poison() -> None:
    values = torch.tensor([float("nan"), 0.0, float("inf") - float("inf")])
    assert values[2].isnan()
    assert is_poison(values).tolist() == [False, False, False]


@pytest.mark.parametrize("guard", ["unmapped", "poison", "canary"])
def test_pages_keep_what_is_written_and_map_pages_adds_poison(guard: str) -> None:
    # 1000 bytes a page: neighbours share granules, and most pages straddle none.
    with SparsePool((64, 250), torch.float32, pages=[2], guard=guard) as pool:
        pool.tensor[2] = 5.0
        pool.map_pages([1, 2, 3, 40])
        assert pool.mapped_pages == (1, 2, 3, 40)
        assert (pool.tensor[2] == 5.0).all()
        for page in (1, 3, 40):
            assert is_poison(pool.tensor[page]).all()
        pool.tensor[3] = 3.0
        pool.map_pages(torch.tensor([3, 41], dtype=torch.int32))
        assert (pool.tensor[3] == 3.0).all()
        assert pool.guard_is_intact()


def test_a_page_mapped_over_damaged_slack_is_poison_again() -> None:
    with SparsePool((64, 250), torch.float32, pages=[0], guard="poison") as pool:
        pool.tensor[1] = 9.0
        assert not pool.guard_is_intact()
        pool.map_pages([1])
        assert is_poison(pool.tensor[1]).all()
        assert pool.guard_is_intact()


def test_overlapping_pages_keep_shared_bytes() -> None:
    with SparsePool((16, 1024), torch.float32, strides=(512, 1), pages=[4], guard="canary") as pool:
        pool.tensor[4] = 4.0
        pool.map_pages([5])
        assert (pool.tensor[5, :512] == 4.0).all()
        assert is_poison(pool.tensor[5, 512:]).all()


# -- layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "heads_axis"),
    [((1200, 2, 880, 4, 256), 2), ((1200, 2, 4, 880, 256), 1)],
    ids=["NHD", "HND"],
)
def test_interleaved_k_and_v(shape: tuple[int, ...], heads_axis: int) -> None:
    last = 1199
    with SparsePool(shape, torch.bfloat16, pages=[last], guard="poison") as pool:
        k_cache, v_cache = pool.tensor[:, 0], pool.tensor[:, 1]
        assert k_cache.stride(0) == v_cache.stride(0) == 1_802_240
        assert last * k_cache.stride(0) > 2**31 - 1
        k_cache[last] = 1.0
        v_cache[last] = 2.0
        assert k_cache.shape[heads_axis] == 4
        assert pool.tensor[last].sum(dtype=torch.float64) == 3 * 880 * 4 * 256
        assert pool.guard_is_intact()


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_separate_pool_in_either_order(order: str) -> None:
    shape = (2600, 880, 4, 256) if order == "NHD" else (2600, 4, 880, 256)
    with SparsePool(shape, torch.bfloat16, pages=[2599]) as pool:
        assert pool.tensor.stride(0) == 901_120
        pool.tensor[2599, 3, 2] = torch.arange(256.0).bfloat16()
        assert pool.tensor[2599, 3, 2, 255] == 255
        assert pool.mapped_bytes <= 901_120 * 2 + 2 * GRANULE


def test_k_and_v_planes_in_one_pool_leave_the_hole_between_them_unmapped() -> None:
    # The page axis is not the outermost in memory: [2, num_pages, page] seen as [num_pages, 2, page].
    pages, page = 2**20, 4096
    strides = (page, pages * page, 1)
    with SparsePool((pages, 2, page), torch.float32, strides=strides, pages=[0, pages - 1], guard="unmapped") as pool:
        assert pool.virtual_bytes == 2 * pages * page * 4
        assert pool.mapped_bytes == 4 * page * 4
        pool.tensor[pages - 1] = 1.0
        assert pool.tensor[pages - 1, 1].sum() == page


def test_rows_two_gib_apart() -> None:
    with SparsePool((512, 256), torch.float32, strides=(2**29, 1), pages=range(0, 512, 8)) as pool:
        assert pool.virtual_bytes > 2**40 - 2**31
        assert pool.mapped_bytes == 64 * GRANULE
        pool.tensor[504] = 504.0
        assert pool.tensor[::8].nan_to_num().sum() == 504 * 256


def test_strided_rows_inside_a_page() -> None:
    # Rows of a page 2 GiB apart too: each is a piece of its own.
    with SparsePool((2, 16, 256), torch.float32, strides=(2**33, 2**29, 1), pages=[1]) as pool:
        assert pool.mapped_bytes == 16 * GRANULE
        pool.tensor[1] = 2.0
        assert pool.tensor[1].sum() == 2 * 16 * 256


def test_numbers_of_a_pool() -> None:
    with SparsePool((100, 3, 1000), torch.int8, pages=[2, 4], guard="unmapped") as pool:
        assert pool.num_pages == 100
        assert pool.virtual_bytes == 300_000
        # Pages 2 and 4 are bytes 6000..9000 and 12000..15000.
        assert pool.mapped_bytes == 3 * GRANULE
        assert pool.granule_bytes == GRANULE
        assert pool.guard_bytes == -(-(2**31 + 3000) // GRANULE) * GRANULE
        assert pool.base_address == pool.tensor.data_ptr()
        assert pool.base_address % GRANULE == 0
        assert repr(pool) == (
            "SparsePool((100, 3, 1000), torch.int8, 'cpu', strides=(3000, 1000, 1), guard='unmapped': "
            f"2 of 100 pages mapped, {3 * GRANULE} of 300000 bytes real)"
        )


@pytest.mark.parametrize(("dtype", "wrapped"), [(torch.int8, 2**31), (torch.bfloat16, 2**32), (torch.int64, 2**34)])
def test_the_default_guard_holds_every_wrapped_offset_and_a_page(dtype: torch.dtype, wrapped: int) -> None:
    with SparsePool((4, 1000), dtype) as pool:
        page = 1000 * dtype.itemsize
        assert wrapped + page <= pool.guard_bytes < wrapped + page + GRANULE


def test_the_pattern_counts_as_mapped_once() -> None:
    with SparsePool((64, 4096), torch.float32, pages=[1], guard="poison") as pool:
        assert pool._memory is not None
        assert pool.mapped_bytes == 4 * 4096 + pool._memory.pattern_bytes
        assert pool.mapped_bytes < pool.guard_bytes // 64


# -- errors ------------------------------------------------------------------------------------------------------------


def test_page_ids_out_of_range() -> None:
    with pytest.raises(ArgumentError) as caught:
        SparsePool((64, 8), torch.float32, pages=[0, 64])
    expected = "pages: expected ids in [0, num_pages=64), got 64; ids count along axis 0 of the shape"
    assert str(caught.value) == f"SparsePool: {expected}"
    with SparsePool((64, 8), torch.float32) as pool:
        with pytest.raises(ArgumentError) as caught:
            pool.map_pages([64])
        assert str(caught.value) == f"SparsePool.map_pages: {expected}"
        with pytest.raises(ArgumentError, match=r"got -2, -1, 64, 65 and 2 more; ids"):
            pool.map_pages([-1, -2, 64, 65, 66, 67])
        with pytest.raises(ArgumentError) as caught:
            pool.map_pages([1.5])
        assert str(caught.value) == ("SparsePool.map_pages: pages: expected integer ids, got 1.5; pass ints or an integer tensor")
        assert pool.mapped_pages == ()


def test_all_faults_are_listed() -> None:
    with pytest.raises(ArgumentError) as caught:
        SparsePool((4, 8), torch.complex64, "meta", pages=[4], strides=(8, -1), guard="soft", guard_bytes=-1)
    assert str(caught.value).split("\n") == [
        "SparsePool: 6 faults",
        "  pages: expected ids in [0, num_pages=4), got 4; ids count along axis 0 of the shape",
        "  strides: expected 2 element strides >= 0 for shape (4, 8), got (8, -1); leave strides out for a contiguous pool",
        "  device: expected 'cpu' or 'cuda[:index]', got 'meta'; sparse pools exist for these",
        "  dtype: expected a torch dtype of float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2, int8, "
        "uint8, int32, int64, got torch.complex64; take one of the same size and view it",
        "  guard: expected 'unmapped', 'poison' or 'canary', got 'soft'; 'unmapped' kills, 'poison' marks reads, "
        "'canary' shows writes",
        "  guard_bytes: expected None or an int >= 0, got -1; None is 2**31 elements and one page",
    ]


@pytest.mark.parametrize("shape", [(), (0, 4), (4, -1), (4, 2.0), (True, 4)])
def test_shapes_that_are_none(shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError) as caught:
        SparsePool(shape, torch.float32)
    assert str(caught.value) == (f"SparsePool: shape: expected one or more positive ints, got {shape}; axis 0 counts the pages")


def test_a_number_in_place_of_a_sequence() -> None:
    wrong: Any = 4
    with pytest.raises(ArgumentError) as caught:
        SparsePool(wrong, torch.float32)
    assert str(caught.value) == "SparsePool: shape: expected one or more positive ints, got 4; axis 0 counts the pages"
    with pytest.raises(ArgumentError) as caught:
        SparsePool((4, 8), torch.float32, pages=wrong, strides=wrong)
    assert str(caught.value) == (
        "SparsePool: 2 faults\n"
        "  pages: expected integer ids, got 4; pass a list of ints or an integer tensor, such as range(8)\n"
        "  strides: expected 2 element strides >= 0 for shape (4, 8), got 4; leave strides out for a contiguous pool"
    )


def test_more_addresses_than_numbers() -> None:
    with pytest.raises(PoolError) as caught:
        SparsePool((2**40, 2**30), torch.int8, guard_bytes=0)
    assert str(caught.value) == (
        f"SparsePool: shape: expected fewer than 2**62 bytes with the guards, got {2**70}; "
        "ask for a smaller shape, strides or guard_bytes"
    )


def test_more_mappings_than_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_host, "max_map_count", lambda: 700)
    monkeypatch.setattr(_host, "mapping_count", lambda: 600)
    with SparsePool((1000, 4 * GRANULE), torch.int8, pages=range(0, 60, 2)) as pool, pytest.raises(PoolError) as caught:
        pool.map_pages(range(0, 1000, 2))
    assert str(caught.value) == (
        "SparsePool: pages: expected at most vm.max_map_count=700 memory mappings in this process, which has 600, got "
        "1410 more; map pages that are neighbours, or `sysctl -w vm.max_map_count=2110`"
    )
    with pytest.raises(PoolError) as caught:
        SparsePool((1000, 4 * GRANULE), torch.int8, pages=range(0, 1000, 2), guard="poison")
    assert "more; use guard='unmapped', map pages that are neighbours, or" in str(caught.value)


def test_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedPlatformError) as caught:
        SparsePool((4, 8), torch.float32)
    assert str(caught.value) == (
        "SparsePool: device: 'cpu' needs Linux (mmap without reservation, memfd_create), got 'darwin'; "
        "run in a Linux container or virtual machine"
    )
