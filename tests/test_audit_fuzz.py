"""A seeded fuzz of the source front end: no crash, no hang, bounded memory. BIGPOOL_FUZZ seeds; 500 fill a night."""

from __future__ import annotations

import os
import random
import resource
import time
from pathlib import Path

import pytest

from audit_fuzz import MAKERS, Maker, kernel, nested, products, tree
from bigpool.audit import Report, audit
from bigpool.audit.report import FORMATS

SEEDS = int(os.environ.get("BIGPOOL_FUZZ", "6"))
# CPU seconds for one file, whatever is in it.
LIMIT = 15


def audited(path: Path) -> Report:
    """Audits, and writes the report in every format: neither may fail."""
    begin = time.process_time()
    report = audit([path])
    assert time.process_time() - begin < LIMIT
    for lines in FORMATS.values():
        assert "\n".join(lines(report, True)).encode("utf-8", "surrogateescape")
    assert report.files + len(report.skipped_files) >= 1, "nothing is passed over in silence"
    return report


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_file_of_any_content(tmp_path: Path, maker: Maker, seed: int) -> None:
    draw = random.Random(f"{maker.__name__} {seed}")
    path = tmp_path / "hostile.py"
    path.write_bytes(maker(draw, draw.choice((3, 20, 60))))
    report = audited(path)
    assert all(reason for _, reason in [*report.skipped_files, *report.skipped_kernels])


@pytest.mark.parametrize("seed", range(max(1, SEEDS // 6)))
def test_a_folder_of_any_content(tmp_path: Path, seed: int) -> None:
    tree(random.Random(seed), tmp_path / "tree", 10)
    report = audited(tmp_path / "tree")
    made = len(MAKERS) + 2  # one of an odd name, and one link to nothing
    assert report.files + len(report.skipped_files) == made, "each file once, circles and folders left out"
    assert "gone.py" in {Path(name).name for name, _ in report.skipped_files}


@pytest.mark.parametrize(
    ("maker", "size"), [(kernel, 3000), (products, 400), (nested, 3000)], ids=["kernel", "products", "nested"]
)
def test_thousands_of_operations(tmp_path: Path, maker: Maker, size: int) -> None:
    path = tmp_path / "large.py"
    path.write_bytes(maker(random.Random(size), size))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    audited(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 2**10, "KiB"
