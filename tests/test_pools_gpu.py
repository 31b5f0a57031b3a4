"""Sparse pools on an NVIDIA GPU. Run as a script, it is one launch that may kill the CUDA context."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from bigpool.errors import CanaryError
from bigpool.pools import SparsePool, is_poison, poison_value

PAGE, WIDTH, LAST = 2**20, 64, 2599
GRANULE = 2**21
DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)


def missing() -> str:
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU: torch.cuda.is_available() is False"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "needs cuda-bindings: pip install 'bigpool[kernels]'"
    return ""


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")]


def gather(kernel_name: str, pool: SparsePool, page_idx: int) -> str:
    """What a kernel reads from page 7, which must be right, and from `page_idx`."""
    import pools_gather_kernel

    kernel = getattr(pools_gather_kernel, kernel_name)
    pages = torch.tensor([7, page_idx], dtype=torch.int32, device="cuda")
    out = torch.zeros(2, WIDTH, device="cuda")
    row = torch.arange(float(WIDTH), device="cuda")
    pool.tensor[7, :WIDTH], pool.tensor[LAST, :WIDTH] = -row, row
    torch.cuda.synchronize()
    try:
        kernel[(2,)](pool.tensor, pages, out, pool.tensor.stride(0), WIDTH=WIDTH)
        torch.cuda.synchronize()
    except Exception as died:
        return "killed" if "illegal memory access" in str(died) else repr(died)
    assert torch.equal(out[0], -row), "a page below the wall is read wrongly"
    return "equal" if torch.equal(out[1], row) else "nan" if out[1].isnan().all() else "other"


def gather_pool(guard: str) -> SparsePool:
    return SparsePool((LAST + 1, PAGE), torch.float32, "cuda", pages=[7, LAST], guard=guard)


def used_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info()
    return whole - free


@pytest.mark.parametrize(
    ("kernel_name", "page_idx", "outcome"),
    [
        ("gather_wide", LAST, "equal"),
        ("gather_narrow", LAST, "killed"),
        ("gather_wide", -1, "killed"),
        ("gather_wide", 20, "killed"),
        ("gather_wide", LAST + 1, "killed"),
    ],
    ids=["fixed", "wrapped", "below", "inside", "above"],
)
def test_an_unmapped_guard_kills(kernel_name: str, page_idx: int, outcome: str) -> None:
    assert LAST * PAGE > 2**31 - 1
    run = subprocess.run([sys.executable, __file__, kernel_name, str(page_idx)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    # Closing is silent also after the context has died.
    assert json.loads(run.stdout) == {"outcome": outcome, "closed": True}


@pytest.mark.parametrize(("guard", "garbage"), [("poison", "nan"), ("canary", "other")])
def test_a_mapped_guard_is_read(guard: str, garbage: str) -> None:
    assert LAST * PAGE > 2**31 - 1
    with gather_pool(guard) as pool:
        assert gather("gather_wide", pool, LAST) == "equal"
        assert gather("gather_narrow", pool, LAST) == garbage
        for page_idx in (-1, 20, LAST + 1):
            assert gather("gather_wide", pool, page_idx) == garbage
        assert pool.guard_is_intact()


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_in_every_dtype(dtype: torch.dtype) -> None:
    with SparsePool((64, 2**20), dtype, "cuda", pages=[3], guard="poison", guard_bytes=2**26) as pool:
        for page in (0, 3, 5):
            assert is_poison(pool.tensor[page]).all()
            values = pool.tensor[page, :8]
            assert values.float().isnan().all() if dtype.is_floating_point else (values == poison_value(dtype)).all()


@pytest.mark.parametrize("guard", ["unmapped", "poison", "canary"])
def test_interleaved_views_are_launched_with_page_0_unmapped(guard: str) -> None:
    import pools_gather_kernel as kernels

    with SparsePool((1200, 2, 880, 4, 256), torch.bfloat16, "cuda", pages=[1199], guard=guard) as pool:
        stride = pool.tensor.stride(0)
        assert 1199 * stride > 2**31 - 1
        pool.tensor[1199, 0], pool.tensor[1199, 1] = 1.0, 2.0
        pages = torch.tensor([1199], dtype=torch.int32, device="cuda")
        for half in (0, 1):
            out = torch.zeros(1, WIDTH, dtype=torch.bfloat16, device="cuda")
            kernels.gather_wide[(1,)](pool.tensor[:, half], pages, out, stride, WIDTH=WIDTH)
            assert (out == half + 1.0).all()
        assert pool.guard_is_intact()


@pytest.mark.parametrize("guard", ["poison", "canary"])
def test_stray_writes_are_found(guard: str) -> None:
    pool = SparsePool((64, 2**20), torch.float32, "cuda", pages=[0, 63], guard=guard)
    for offset in (-1, -pool.guard_bytes, 20 * 2**22, pool.virtual_bytes, pool.virtual_bytes + pool.guard_bytes - 1):
        target = pool._memory.view(offset, offset + 1)
        target ^= 1
        with pytest.raises(CanaryError, match="1 bytes at offset"):
            pool.check_canaries()
        target ^= 1
    assert pool.guard_is_intact()
    pool.close()


def test_slack_is_checked() -> None:
    strides = (2**29, 1)
    pool = SparsePool((8, 256), torch.float32, "cuda", strides=strides, pages=range(8), guard="canary")
    assert pool.mapped_bytes >= 8 * GRANULE
    assert pool.guard_is_intact()
    pool.tensor.as_strided((1,), (1,), 3 * 2**29 + 256)[0] = 0.0
    with pytest.raises(CanaryError, match=f"bytes at byte {3 * 2**31 + 1024} of the pool"):
        pool.close()


@pytest.mark.parametrize("guard", ["unmapped", "poison", "canary"])
def test_map_pages_breaks_into_what_is_there(guard: str) -> None:
    with SparsePool((600, 880, 4, 256), torch.bfloat16, "cuda", guard=guard) as pool:
        for page in (0, 300, 599, 301, 299, 20):
            pool.map_pages([page])
            assert is_poison(pool.tensor[page]).all()
            pool.tensor[page] = float(page % 8)
        assert all((pool.tensor[page] == float(page % 8)).all() for page in pool.mapped_pages)
        assert pool.guard_is_intact()


@pytest.mark.parametrize("guard", ["unmapped", "poison", "canary"])
def test_a_tebibyte_with_64_pages(guard: str, capsys: pytest.CaptureFixture[str]) -> None:
    num_pages = 2**40 // (880 * 4 * 256 * 2) + 1
    ids = range(0, num_pages, num_pages // 63)
    # The first pool of a process pays for loading kernels.
    SparsePool((4, 8), torch.float32, "cuda", guard=guard, guard_bytes=GRANULE).close()
    seconds, before = [], used_bytes()
    for _ in range(3):
        start = time.perf_counter()
        pool = SparsePool((num_pages, 880, 4, 256), torch.bfloat16, "cuda", pages=ids, guard=guard)
        seconds.append(time.perf_counter() - start)
        real, tensor = used_bytes() - before, pool.tensor
        assert tensor.numel() * 2 >= 2**40
        assert len(pool.mapped_pages) == 64
        for page in ids:
            tensor[page] = page % 8
        assert all((tensor[page] == page % 8).all() for page in ids)
        pool.close()
    assert real < 2**30
    assert abs(used_bytes() - before) < 2**26
    with capsys.disabled():
        times = ", ".join(f"{1000 * taken:.1f}" for taken in seconds)
        print(f"\n1 TiB, 64 pages, {guard}: ready in {times} ms, {real / 2**20:.0f} MiB real")


def test_an_exception_frees_everything() -> None:
    gather_pool("poison").close()
    before = used_bytes()

    def fail() -> None:
        with gather_pool("canary"):
            raise KeyError("the body's own")

    with pytest.raises(KeyError):
        fail()
    assert abs(used_bytes() - before) < 2**24


def launch_and_close(kernel_name: str, page_idx: str) -> dict[str, Any]:
    pool = gather_pool("unmapped")
    outcome = gather(kernel_name, pool, int(page_idx))
    pool.close()
    return {"outcome": outcome, "closed": pool.mapped_bytes == 0}


if __name__ == "__main__":
    print(json.dumps(launch_and_close(*sys.argv[1:])), flush=True)
    # Nothing more can be asked of a dead context, not even to be taken down.
    os._exit(0)
