"""Compiles prefill attention for cards that are not here, ptxas included: each card's shared memory, and what spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from test_compile_targets import CARDS, WHICH

# Spill instructions in the loop over tiles that every row sees whole; D 256 fills the registers of cards with wide products.
MOST_SPILLS, MOST_SPILLS_WIDE_256 = 8, 80


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
    assert len(rows) == (7 if WHICH else 4)
    for row in rows:
        most = MOST_SPILLS_WIDE_256 if sm in (90, 100) and 256 in row["shape"] else MOST_SPILLS
        assert row["shared"] <= smem, f"sm{sm} {row}"
        # With a window the first loop is that of the tiles at its edge.
        if "window" not in row["shape"]:
            assert 0 <= row["spills"] <= most, f"sm{sm} {row}"
