"""Compiles prefill attention for cards that are not here, ptxas included: each card's shared memory, and what spills.

By default a sample of the modes of 8 bits and of the caches, a few for each card; `BIGPOOL_COMPILE_ALL=1` compiles each for all.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from test_compile_targets import CARDS, WHICH

# Most spill instructions in the loop over tiles that every row sees whole. D 256 fills the registers of cards with wide
# products, and the sums that fp8 keeps of each tile fill them twice; codes take registers while they become numbers.
MOST_SPILLS, MOST_OF_CODES, MOST_OF_INT4, MOST_WIDE_256, MOST_WIDE_256_FP8 = 8, 24, 60, 80, 200
# Launches: fewer on cards without products of fp8.
ROWS = {80: 20, 86: 20, 89: 28, 90: 28, 100: 28, 120: 28} if WHICH else {80: 6, 86: 6, 89: 8, 90: 6, 100: 6, 120: 9}


def most_spills(sm, shape):
    if sm in (90, 100) and 256 in shape:
        return MOST_WIDE_256_FP8 if "fp8" in shape else MOST_WIDE_256
    if "int4" in shape:
        return MOST_OF_INT4
    return MOST_OF_CODES if {"fp8", "e4m3", "e4m3 rows"} & set(shape) else MOST_SPILLS


@pytest.mark.parametrize("sm", CARDS)
def test_kernels_compile_and_fit(sm, tmp_path):
    num_sms, smem = CARDS[sm]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("prefill_compile.py")
    command = [sys.executable, str(script), str(sm), str(num_sms), str(smem), *WHICH]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == ROWS[sm]
    for row in rows:
        assert row["shared"] <= smem, f"sm{sm} {row}"
        assert 0 <= row["spills"] <= most_spills(sm, row["shape"]), f"sm{sm} {row}"
