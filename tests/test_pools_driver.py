"""The GPU side of sparse pools without a GPU: against a strict fake of the driver. What only a GPU shows is elsewhere."""

from __future__ import annotations

import gc
import sys
import warnings

import pytest
import torch

import pools_fake_driver as fake
from bigpool.errors import ArgumentError, CanaryError, PoolError, UnsupportedPlatformError
from bigpool.pools import SparsePool, _cuda, _pattern, is_poison

GRANULE = fake.GRANULE
PAGE = 880 * 4 * 256
GUARD = 2**27


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch):
    """The fake in place of the driver; nothing may be left in it, and no rule broken."""
    driver = fake.FakeDriver()
    monkeypatch.setattr(_cuda, "load_driver", lambda: driver)
    monkeypatch.setattr(_cuda, "indexed", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(_cuda, "torch_context", lambda driver, device: "context")
    monkeypatch.setattr(_cuda, "device_view", fake.host_view)
    yield driver
    gc.collect()
    assert driver.broken == []
    assert driver.contexts == []
    if not driver.dead:
        assert (driver.reserved, driver.mappings, driver.allocations) == ({}, {}, {})


def has_memory(driver: fake.FakeDriver, pool: SparsePool, offset: int) -> bool:
    return driver.accessible(pool.base_address + offset, 1)


def pool_of(pages, guard: str = "unmapped", num_pages: int = 300, **options) -> SparsePool:
    options = {"guard_bytes": GUARD} | options
    return SparsePool((num_pages, 880, 4, 256), torch.bfloat16, "cuda", pages=pages, guard=guard, **options)


@pytest.mark.parametrize("guard", ["unmapped", "poison", "canary"])
def test_pages_have_memory_and_keep_what_is_written(driver: fake.FakeDriver, guard: str) -> None:
    with pool_of(range(277, 300), guard) as pool:
        assert pool.device == torch.device("cuda", 0)
        assert pool.granule_bytes == GRANULE
        assert is_poison(pool.tensor[277:]).all()
        pool.tensor[299] = 1.0
        pool.map_pages([3, 5, 299])
        assert (pool.tensor[299] == 1.0).all()
        assert is_poison(pool.tensor[3]).all()
        assert is_poison(pool.tensor[5]).all()
        assert pool.guard_is_intact()


def test_unmapped_means_no_memory_but_page_0_has_some(driver: fake.FakeDriver) -> None:
    with pool_of([299]) as pool:
        for offset in (-1, -GUARD, 10 * PAGE * 2, -(-pool.virtual_bytes // GRANULE) * GRANULE):
            assert not has_memory(driver, pool, offset)
        assert has_memory(driver, pool, 0)
        assert is_poison(pool.tensor[0]).all()
        assert GRANULE < pool.mapped_bytes == driver.used <= 3 * GRANULE
        pool.map_pages([0])
        pool.tensor[0] = 1.0
        assert pool.guard_is_intact()


def test_the_bases_of_k_and_v_planes_have_memory(driver: fake.FakeDriver) -> None:
    pages, page = 2**20, 4096
    strides = (page, pages * page, 1)
    with SparsePool((pages, 2, page), torch.float32, "cuda", strides=strides, pages=[77], guard_bytes=GUARD) as pool:
        assert has_memory(driver, pool, 0)
        assert has_memory(driver, pool, pool.tensor[:, 1].data_ptr() - pool.base_address)


@pytest.mark.parametrize("guard", ["poison", "canary"])
def test_guards_and_unmapped_pages_share_the_pattern(driver: fake.FakeDriver, guard: str) -> None:
    pool = pool_of([0, 9, 299], guard)
    end = -(-pool.virtual_bytes // GRANULE) * GRANULE
    for offset in (-1, -GUARD, 100 * PAGE * 2, end, end + GUARD - 1):
        assert has_memory(driver, pool, offset)
        assert pool.guard_is_intact()
        target = pool._memory.view(offset, offset + 1)
        target ^= 0xFF
        with pytest.raises(CanaryError, match="1 bytes at offset"):
            pool.check_canaries()
        target ^= 0xFF
    if guard == "poison":
        assert is_poison(pool.tensor[100]).all()
    pool.close()


@pytest.mark.parametrize("guard", ["poison", "canary"])
def test_a_page_in_the_middle_of_a_mapping_leaves_the_rest_covered(driver: fake.FakeDriver, guard: str) -> None:
    with pool_of([], guard, guard_bytes=2**31) as pool:
        assert len(pool._memory._rungs) > 1
        for page in (0, 150, 299, 151, 149, 20):
            pool.map_pages([page])
            pool.tensor[page] = float(page)
        end = -(-pool.virtual_bytes // GRANULE) * GRANULE
        assert driver.accessible(pool.base_address - 2**31, end + 2**32)
        assert pool.guard_is_intact()
        assert all((pool.tensor[page] == float(page)).all() for page in pool.mapped_pages)


def test_slack_of_two_mebibytes_is_checked(driver: fake.FakeDriver) -> None:
    pool = SparsePool((8, 256), torch.float32, "cuda", strides=(2**29, 1), pages=[3], guard="canary", guard_bytes=GUARD)
    assert pool.guard_is_intact()
    pool.tensor.as_strided((1,), (1,), 3 * 2**29 + 256)[0] = 0.0
    [(offset, size)] = pool.damage().slack
    assert offset == 3 * 2**31 + 1024
    assert size in (3, 4)
    with pytest.raises(CanaryError):
        pool.close()


def test_neighbours_share_one_allocation(driver: fake.FakeDriver) -> None:
    with pool_of(range(100, 140)):
        assert driver.calls.count("cuMemCreate") == 2
        assert len(driver.mappings) == 3


@pytest.mark.parametrize("guard", ["unmapped", "poison"])
def test_a_tebibyte_takes_few_calls_and_less_than_a_gibibyte(
    driver: fake.FakeDriver, guard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Counts, not contents: half a gibibyte of them would be real here.
    monkeypatch.setattr(_pattern.Pattern, "write", lambda *arguments: None)
    driver.fills = False
    num_pages = 2**40 // (PAGE * 2) + 1
    with pool_of(range(0, num_pages, num_pages // 63), guard, num_pages, guard_bytes=None) as pool:
        assert len(pool.mapped_pages) == 64
        assert pool.mapped_bytes == driver.used < 2**30
        assert len(driver.mappings) < (70 if guard == "unmapped" else 6144)
        assert driver.calls.count("cuMemCreate") < 80


# -- ends --------------------------------------------------------------------------------------------------------------


def test_an_exception_in_the_block_frees_everything(driver: fake.FakeDriver) -> None:
    with pytest.raises(KeyError), pool_of([1, 2], "canary"):
        raise KeyError


def test_a_forgotten_pool_frees_everything_with_its_last_tensor(driver: fake.FakeDriver) -> None:
    tensor = pool_of([1, 2]).tensor[1]
    gc.collect()
    assert driver.reserved
    assert is_poison(tensor).all()
    del tensor
    gc.collect()
    assert not driver.reserved


def test_running_out_of_memory_leaves_the_pool_as_it_was(driver: fake.FakeDriver) -> None:
    driver.memory = 2**27
    with pool_of([1, 2], "poison") as pool:
        pool.tensor[1] = 1.0
        used, mappings = driver.used, dict(driver.mappings)
        with pytest.raises(PoolError) as caught:
            pool.map_pages(range(10, 100))
        first, last = 10 * PAGE * 2 // GRANULE, -(-100 * PAGE * 2 // GRANULE)
        assert str(caught.value) == (
            f"SparsePool: device: expected CUDA_SUCCESS from cuMemCreate of {(last - first) * GRANULE} bytes, got "
            "CUDA_ERROR_OUT_OF_MEMORY; map fewer pages, free GPU memory (torch.cuda.empty_cache()), or ask for a "
            "smaller shape or guard_bytes"
        )
        assert (driver.used, driver.mappings, pool.mapped_pages) == (used, mappings, (1, 2))
        pool.map_pages([10])
        assert (pool.tensor[1] == 1.0).all()


def test_running_out_of_memory_at_the_start_leaves_nothing(driver: fake.FakeDriver) -> None:
    driver.memory = 2**22
    with pytest.raises(PoolError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        pool_of(range(100), "poison")


def test_a_dead_context_is_left_alone(driver: fake.FakeDriver) -> None:
    pool, canary = pool_of([1]), pool_of([1], "canary")
    driver.dead = True
    with pytest.raises(PoolError) as caught:
        canary.check_canaries()
    assert str(caught.value) == (
        "SparsePool: damage: expected a living CUDA context, got one that an earlier kernel has killed; "
        "run a kernel that may die in a process of its own"
    )
    with pytest.raises(PoolError) as caught:
        pool.map_pages([2])
    assert str(caught.value) == (
        "SparsePool: device: expected CUDA_SUCCESS from cuCtxPushCurrent, got CUDA_ERROR_ILLEGAL_ADDRESS; "
        "an earlier kernel has killed the CUDA context: run a kernel that may die in a process of its own"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.close()
    with pytest.warns(RuntimeWarning, match="a kernel has killed the CUDA context, the canaries were not checked"):
        canary.close()
    canary.close()
    driver.contexts.clear()


# -- platforms ---------------------------------------------------------------------------------------------------------


def test_a_driver_without_virtual_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = fake.FakeDriver()
    driver.supported = 0
    driver.contexts.append("torch's")
    monkeypatch.setattr(torch.cuda, "device", lambda device: warnings.catch_warnings())
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    with pytest.raises(UnsupportedPlatformError) as caught:
        _cuda.torch_context(driver, torch.device("cuda", 0))
    assert str(caught.value) == (
        "SparsePool: device: 'cuda:0' needs CUDA virtual memory management, which this driver or virtual GPU does not "
        "offer; update the driver, pass the whole GPU through, or use device='cpu'"
    )
    driver.supported = 1
    assert _cuda.torch_context(driver, torch.device("cuda", 0)) == "context"


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedPlatformError) as caught:
        SparsePool((4, 8), torch.float32, "cuda")
    assert str(caught.value) == (
        f"SparsePool: device: 'cuda' needs an NVIDIA GPU and torch built for CUDA, got torch {torch.__version__} with "
        "torch.cuda.is_available() = False; use device='cpu'"
    )


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert _cuda.indexed(torch.device("cuda")) == torch.device("cuda", 0)
    with pytest.raises(ArgumentError) as caught:
        SparsePool((4, 8), torch.float32, "cuda:3")
    assert str(caught.value) == (
        "SparsePool: device: expected an index below torch.cuda.device_count()=1, got 'cuda:3'; see nvidia-smi -L"
    )


def test_no_cuda_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda, "indexed", lambda device: torch.device("cuda", 0))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(UnsupportedPlatformError) as caught:
        SparsePool((4, 8), torch.float32, "cuda")
    assert str(caught.value) == (
        "SparsePool: device: 'cuda' needs the package cuda-bindings, which cannot be imported here; "
        "pip install 'bigpool[kernels]', or use device='cpu'"
    )
