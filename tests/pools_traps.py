"""Run by test_pools_traps.py in a process of its own: things that kill, leak or run out. Prints one JSON object.

Every probe that may die runs in a fork; its outcome is the name of the signal, or what it returned.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bigpool.errors import PoolError
from bigpool.pools import SparsePool, _host, is_poison
from pools_helpers import trapped_places

UNMAPPED_PAGE = 20


def forked(probe: Callable[[], Any]) -> Any:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, json.dumps(probe()).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return json.loads(answer)


def read(address: int) -> str:
    return str(ctypes.c_float.from_address(address // 4 * 4).value)


def write(address: int) -> str:
    ctypes.c_float.from_address(address // 4 * 4).value = 1.0
    return "written"


def traps() -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    for guard in ("unmapped", "poison", "canary"):
        with SparsePool((64, 3072), torch.float32, pages=[0, 5, 6, 63], guard=guard) as pool:
            places = trapped_places(pool, UNMAPPED_PAGE) | {"mapped page": 5 * 3072 * 4}
            for place, offset in places.items():
                address = pool.base_address + offset
                outcomes[f"{guard}: read {place}"] = forked(lambda at=address: read(at))
                if guard == "unmapped":
                    outcomes[f"{guard}: write {place}"] = forked(lambda at=address: write(at))
    return outcomes


def status(field: str) -> int:
    """A size from /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(field + ":")]
    return int(line.split()[1]) * 1024


def mappings(start: int, stop: int) -> list[str]:
    """Mappings of this process that touch [start, stop)."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [(line, *(int(end, 16) for end in line.split()[0].split("-"))) for line in lines]
    return [line for line, low, high in spans if low < stop and high > start]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def leaks() -> dict[str, Any]:
    def use(fail: bool) -> tuple[int, int]:
        pool = SparsePool((2**20, 2**18), torch.float32, pages=range(0, 64, 2), guard="poison", guard_bytes=2**30)
        span = pool.base_address - pool.guard_bytes, pool.base_address + pool.virtual_bytes + pool.guard_bytes
        try:
            with pool:
                pool.tensor[2] = 1.0
                assert len(mappings(*span)) > 32
                assert status("VmSize") > 2**40
                if fail:
                    raise KeyError
        except KeyError:
            pass
        return span

    use(False)
    files, size = open_files(), status("VmSize")
    spans = [use(fail) for fail in (False, True)]
    _host.max_map_count = lambda: 100
    with contextlib.suppress(PoolError):
        SparsePool((2**20, 2**18), torch.float32, pages=range(0, 1000, 2), guard="poison")
        raise AssertionError("a pool that should have failed half-way did not")
    return {
        "mappings left": sum(len(mappings(*span)) for span in spans),
        "files left": open_files() - files,
        "addresses left": status("VmSize") - size,
    }


def terabyte() -> dict[str, Any]:
    page = 880 * 4 * 256
    num_pages = 2**40 // (page * 2) + 1
    ids = range(0, num_pages, num_pages // 63)
    sizes: dict[str, Any] = {}
    for guard in ("unmapped", "poison", "canary"):
        before = status("VmRSS")
        with SparsePool((num_pages, 880, 4, 256), torch.bfloat16, pages=ids, guard=guard) as pool:
            span = pool.base_address - pool.guard_bytes, pool.base_address + pool.virtual_bytes + pool.guard_bytes
            for page_idx in ids:
                pool.tensor[page_idx] = page_idx % 8
            assert all((pool.tensor[page_idx] == page_idx % 8).all() for page_idx in ids)
            sizes[guard] = {
                "pages": len(pool.mapped_pages),
                "virtual": pool.virtual_bytes,
                "mapped": pool.mapped_bytes,
                "resident": status("VmRSS") - before,
                "mappings": len(mappings(*span)),
            }
    return sizes


def laziness() -> dict[str, int]:
    before = status("VmRSS")
    with SparsePool((4096, 2**18), torch.float32, pages=range(1024)) as pool:
        mapped = pool.mapped_bytes
        untouched = status("VmRSS") - before
        assert is_poison(pool.tensor[1023, -8:]).all()
        pool.tensor[:32] = 0.0
        return {"mapped": mapped, "untouched": untouched, "written": status("VmRSS") - before - untouched}


def core_dump_flags() -> list[bool]:
    with SparsePool((64, 4096), torch.float32, pages=[3], guard="poison") as pool:
        low, high = pool.base_address - pool.guard_bytes, pool.base_address + pool.virtual_bytes + pool.guard_bytes
        flags, inside = [], False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if line.startswith("VmFlags:"):
                flags += [" dd" in line] * inside
            elif "-" in line.split()[0]:
                start, stop = (int(end, 16) for end in line.split()[0].split("-"))
                inside = low <= start and stop <= high
        return flags


def refusals() -> dict[str, str]:
    def capped(limit: int, act: Callable[[], Any]) -> str:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            act()
        except PoolError as refused:
            return str(refused)
        return "not refused"

    limit = status("VmSize") // 1024 * 1024 + 2**30
    return {
        "limit": str(limit // 1024),
        "addresses": forked(lambda: capped(limit, lambda: SparsePool((4, 4096), torch.int8, guard_bytes=2**40))),
        "fits": forked(lambda: capped(limit, lambda: SparsePool((4, 4096), torch.int8, guard_bytes=2**20))),
    }


def gathers() -> dict[str, Any]:
    import pools_gather_kernel as kernels

    page, width, last = 2**20, 64, 2599
    pages = torch.tensor([7, last], dtype=torch.int32)
    expected = torch.stack([-torch.arange(float(width)), torch.arange(float(width))])
    outcomes: dict[str, Any] = {"last offset": last * page}

    def launch(kernel: Any, pool: SparsePool) -> str:
        out = torch.zeros(2, width)
        before = status("VmRSS")
        kernel[(2,)](pool.tensor, pages, out, pool.tensor.stride(0), WIDTH=width)
        assert status("VmRSS") - before < 2**26, "the pool has become resident"
        assert torch.equal(out[0], expected[0]), "a page below the wall is read wrongly"
        return "equal" if torch.equal(out[1], expected[1]) else "nan" if out[1].isnan().all() else "other"

    for guard in ("unmapped", "poison", "canary"):
        with SparsePool((last + 1, page), torch.float32, pages=pages.tolist(), guard=guard) as pool:
            pool.tensor[7, :width], pool.tensor[last, :width] = expected
            for kernel in (kernels.gather_narrow, kernels.gather_wide):
                name = f"{kernel.__name__} {guard}"
                outcomes[name] = forked(lambda kernel=kernel, pool=pool: launch(kernel, pool))
    return outcomes


if __name__ == "__main__":
    # One thread: a fork has no others, and torch would wait for them.
    torch.set_num_threads(1)
    # leaks() lowers a limit, so it comes last.
    probes = [traps, terabyte, laziness, core_dump_flags, refusals, gathers, leaks]
    print(json.dumps({probe.__name__: probe() for probe in probes if probe.__name__ in sys.argv[1:]}))
