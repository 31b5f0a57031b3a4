"""Compiles the verify kernels for cards that are not here, ptxas included: shared memory within each card's limit, no spills.

A sample of the launches by default; `BIGPOOL_COMPILE_ALL=1` compiles every format at every size of verify_compile.ALL.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# SMs, and most shared memory of one block, bytes: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
CARDS = {
    80: (108, 163 * 1024),
    86: (82, 99 * 1024),
    89: (128, 99 * 1024),
    90: (132, 227 * 1024),
    100: (148, 227 * 1024),
    120: (170, 99 * 1024),
}
WHICH = ["all"] if os.environ.get("BIGPOOL_COMPILE_ALL") == "1" else []
# Spill instructions in the main loop. None, but on cards whose tiles were chosen by time on an H200, and with every option on.
MOST_SPILLS = {90: 40, 100: 40}
MOST_WITH_EVERY_OPTION = 60


def compiled(sm, tmp_path, which):
    num_sms, smem = CARDS[sm]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).parent / "verify_compile.py"
    command = [sys.executable, str(script), str(sm), str(num_sms), str(smem), *which]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("sm", CARDS)
def test_kernels_compile_and_fit(sm, tmp_path):
    rows = compiled(sm, tmp_path, WHICH)
    assert len(rows) == (10 if not WHICH else 110)
    _, smem = CARDS[sm]
    for row in rows:
        assert row["shared"] <= smem, f"sm{sm} {row}"
        most = MOST_WITH_EVERY_OPTION if "alibi" in row["shape"] else MOST_SPILLS.get(sm, 0)
        assert 0 <= row["spills"] <= most, f"sm{sm} {row}"
        assert row["registers"] > 16
