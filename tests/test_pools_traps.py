"""What only a process of its own can show: deadly accesses, real memory, leaks, refusals, and Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROBES = ("traps", "leaks", "terabyte", "laziness", "core_dump_flags", "refusals")
PLACES = (
    "first byte below",
    "last byte below",
    "furthest wrapped element",
    "unmapped page",
    "first byte above",
    "last byte above",
)


def run_probes(*names: str, **environment: str) -> dict[str, Any]:
    script = Path(__file__).with_name("pools_traps.py")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *names],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def probes() -> dict[str, Any]:
    return run_probes(*PROBES)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("access", ["read", "write"])
def test_an_unmapped_guard_kills(probes: dict[str, Any], access: str, place: str) -> None:
    assert probes["traps"][f"unmapped: {access} {place}"] == "SIGSEGV"


@pytest.mark.parametrize("place", PLACES)
def test_a_poison_guard_reads_nan(probes: dict[str, Any], place: str) -> None:
    assert probes["traps"][f"poison: read {place}"] == "nan"


@pytest.mark.parametrize("place", PLACES)
def test_a_canary_guard_reads_garbage(probes: dict[str, Any], place: str) -> None:
    value = probes["traps"][f"canary: read {place}"]
    assert float(value) != 0.0
    assert value != "SIGSEGV"


def test_a_mapped_page_is_open_under_every_guard(probes: dict[str, Any]) -> None:
    assert probes["traps"]["unmapped: write mapped page"] == "written"
    for guard in ("unmapped", "poison", "canary"):
        assert probes["traps"][f"{guard}: read mapped page"] == "nan"


def test_nothing_is_left_after_a_pool_or_an_exception_in_it(probes: dict[str, Any]) -> None:
    left = probes["leaks"]
    assert left["mappings left"] == 0
    assert left["files left"] == 0
    # The allocator may keep a little; a pool is more than a tebibyte.
    assert abs(left["addresses left"]) < 2**28


@pytest.mark.parametrize("guard", ["unmapped", "poison", "canary"])
def test_a_tebibyte_with_64_written_pages_costs_less_than_a_gibibyte(probes: dict[str, Any], guard: str) -> None:
    size = probes["terabyte"][guard]
    assert size["pages"] == 64
    assert size["virtual"] >= 2**40
    assert size["mapped"] < 2**30
    assert size["resident"] < 2**30
    # 64 pages and the holes between them; a pattern is mapped once per chunk.
    assert size["mappings"] <= (200 if guard == "unmapped" else 20_000)


def test_mapped_pages_cost_memory_when_they_are_written(probes: dict[str, Any]) -> None:
    sizes = probes["laziness"]
    assert sizes["mapped"] == 2**30
    assert sizes["untouched"] < 2**24
    # 32 pages of 1 MiB.
    assert 2**25 - 2**22 <= sizes["written"] < 2**26


def test_no_mapping_of_a_pool_goes_into_a_core_dump(probes: dict[str, Any]) -> None:
    flags = probes["core_dump_flags"]
    assert len(flags) > 100
    assert all(flags)


def test_a_refused_reservation_says_what_was_asked(probes: dict[str, Any]) -> None:
    refusals = probes["refusals"]
    overcommit = Path("/proc/sys/vm/overcommit_memory").read_text().strip()
    # Guards on both sides, and the pool: four pages of 4 KiB.
    assert refusals["addresses"] == (
        f"SparsePool: shape: expected {2 * 2**40 + 4 * 4096} bytes of addresses from the operating system, got ENOMEM "
        f"(Cannot allocate memory); see `ulimit -v` (now {refusals['limit']}) and vm.overcommit_memory (now "
        f"{overcommit}), or ask for a smaller shape or guard_bytes"
    )
    assert refusals["fits"] == "not refused"


def test_triton_interpreter_in_a_pool_beyond_the_wall() -> None:
    outcomes = run_probes("gathers", TRITON_INTERPRET="1")["gathers"]
    assert outcomes.pop("last offset") > 2**31 - 1
    assert outcomes == {
        "gather_narrow unmapped": "SIGSEGV",
        "gather_narrow poison": "nan",
        "gather_narrow canary": "other",
        "gather_wide unmapped": "equal",
        "gather_wide poison": "equal",
        "gather_wide canary": "equal",
    }
