"""The Hopper kernel of prefill attention compiles without a GPU: within shared memory, products not one by one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bigpool.ops._prefill_sm90 import prefill_shape_sm90
from bigpool.ops._verify_sm90 import has_gluon

triton = pytest.importorskip("triton")


@pytest.mark.skipif(not has_gluon(), reason=f"Triton {triton.__version__} is not in tuning_sm90.TRITON_VERSIONS")
def test_it_compiles_and_fits(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(Path(__file__).parent / "prefill_sm90_compile.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == 10
    for row in rows:
        assert row["shared"] <= 227 * 1024, row
        # No score or sum is spilled; a few addresses are where boxes are many or rules add values to keep.
        assert row["spills"] <= 16, row
        # Where the compiler cannot keep products in flight it waits after each.
        fp8, head_dim = row["case"][-1], row["case"][0]
        assert row["waits"] == (2 + 2 * head_dim // 64 if fp8 else 8), row


def test_which_pages_it_takes():
    def pages(page_size, int8=False, head_dim=256):
        shape = prefill_shape_sm90(head_dim, 6, page_size, int8, True, 0, 0.0)
        return shape and (shape.tile, shape.box, shape.tiles_per_page)

    assert pages(880) == (64, 64, 14)
    assert pages(880, int8=True) == (64, 16, 0)
    assert pages(16) == (64, 16, 0)
    assert pages(24) == (64, 8, 0)
    assert pages(128) == (64, 64, 2)
    assert pages(880, head_dim=128) == (128, 128, 7)
    assert pages(17) is None
    assert pages(257) == (64, 64, 5)
