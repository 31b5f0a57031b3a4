"""Relations between sizes bound what is made of them: stated, or read from the launches."""

from __future__ import annotations

from pathlib import Path

import pytest

from audit_texts import audited
from bigpool.audit import Severity

VOLUME = """
    @triton.jit
    def f(x_ptr, N, H, W, BW: tl.constexpr):
        i = tl.program_id(0)
        j = tl.program_id(1)
        k = tl.program_id(2) * BW + tl.arange(0, BW)
        inside = {mask}
        tl.store(x_ptr + {offset}, 0.0, mask=inside)
"""
OFFSETS = ("i * H * W + j * W + k", "((i * H + j) * W + k)", "(k + W * (j + H * i))")
ALL = "(i < N) & (j < H) & (k < W)"


@pytest.mark.parametrize("offset", OFFSETS)
def test_a_stated_product_bounds_a_masked_index(tmp_path: Path, offset: str) -> None:
    text = VOLUME.format(mask=ALL, offset=offset)
    assert audited(tmp_path, text).faults
    stated = audited(tmp_path, text, "N * H * W < 2**31")
    assert stated.faults == []
    assert stated.assumed == {"H * N * W < 2**31": 1}


@pytest.mark.parametrize("bound", ["N * H < 2**31", "N * H * W < 2**33", "H * W < 2**20"])
def test_a_product_that_says_too_little(tmp_path: Path, bound: str) -> None:
    assert audited(tmp_path, VOLUME.format(mask=ALL, offset=OFFSETS[1]), bound).faults


@pytest.mark.parametrize("mask", ["(i < N) & (k < W)", "(j < H) & (k < W)", "(i < N) | (j < H) | (k < W)"])
def test_an_index_without_its_mask_is_not_bounded(tmp_path: Path, mask: str) -> None:
    """Too many programs on that axis write past the end, and wrap."""
    report = audited(tmp_path, VOLUME.format(mask=mask, offset=OFFSETS[1]), "N * H * W < 2**31")
    assert report.faults


def test_a_mask_on_a_wrapped_value_bounds_nothing(tmp_path: Path) -> None:
    text = """
    @triton.jit
    def f(x_ptr, N, H, W):
        row = tl.program_id(0) * H
        tl.store(x_ptr + row * W, 0.0, mask=row * W < N)
    """
    assert audited(tmp_path, text, "N * H * W < 2**31", "N < 2**20").faults


FLAT = """
    @triton.jit
    def f(x_ptr, numel, BLOCK: tl.constexpr):
        offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x_ptr + offs, 0.0, mask=offs < numel)

    def launch(x):
        n = x.numel()
        grid = {grid}
        f[grid](x, n, {block})
"""


@pytest.mark.parametrize(
    ("grid", "block"), [("(triton.cdiv(n, 1024),)", "1024"), ('lambda meta: (triton.cdiv(n, meta["BLOCK"]),)', "BLOCK=1024")]
)
def test_a_grid_that_covers_the_elements(tmp_path: Path, grid: str, block: str) -> None:
    text = FLAT.format(grid=grid, block=block)
    assert audited(tmp_path, text).faults
    assert audited(tmp_path, text, "numel < 2**30").faults == []


@pytest.mark.parametrize("grid", ["(n,)", "(triton.cdiv(n, 64),)", "(other,)"])
def test_a_grid_that_is_larger(tmp_path: Path, grid: str) -> None:
    assert audited(tmp_path, FLAT.format(grid=grid, block="1024"), "numel < 2**30").faults


ROWS = """
    @triton.jit
    def f(x_ptr, rows, columns, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        cols = tl.arange(0, BLOCK)
        tl.store(x_ptr + row * columns + cols, 0.0, mask=cols < columns)

    def launch(x):
        rows, columns = x.shape
        {check}
        f[(rows,)](x, rows, columns, BLOCK=1024)
"""


def test_the_grid_is_an_axis(tmp_path: Path) -> None:
    text = ROWS.format(check="pass")
    assert audited(tmp_path, text).faults
    assert audited(tmp_path, text, "rows * columns < 2**31").faults == []


def test_the_launcher_checks_the_product(tmp_path: Path) -> None:
    assert audited(tmp_path, ROWS.format(check="assert rows * columns < 2**31")).faults == []
    assert audited(tmp_path, ROWS.format(check="assert rows * columns < 2**32")).faults


def test_stated_elements_of_a_tensor_make_a_note(tmp_path: Path) -> None:
    text = VOLUME.format(mask=ALL, offset=OFFSETS[0])
    report = audited(tmp_path, text, "x.numel() < 2**31")
    assert report.faults == []
    assert {finding.severity for finding in report.findings} == {Severity.NOTE}
    assert all("assumed: x.numel < 2**31" in finding.notes for finding in report.findings)
    assert audited(tmp_path, text, "x.numel() < 2**33").faults
    assert audited(tmp_path, text, "y.numel() < 2**31").faults


def test_a_loaded_value_of_the_same_name_is_not_the_argument(tmp_path: Path) -> None:
    text = VOLUME.format(mask=ALL, offset=OFFSETS[1]).replace("inside =", "H = tl.load(x_ptr)\n        inside =")
    assert audited(tmp_path, text, "N * H * W < 2**31").faults


def test_a_dictionary_is_not_the_constants_of_the_launch(tmp_path: Path) -> None:
    text = FLAT.format(grid='(triton.cdiv(n, meta["BLOCK"]),)', block="BLOCK=1024")
    assert audited(tmp_path, text.replace("n = x.numel()", 'n, meta = x.numel(), {"BLOCK": 8}'), "numel < 2**30").faults


def test_a_check_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    assert audited(tmp_path, ROWS.format(check="assert rows * (columns & ~1) < 2**31")).faults


def test_stated_elements_in_a_launch() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    import audit_launched
    from bigpool.audit import Options, capture

    pool = torch.empty(66, 901_120, dtype=torch.bfloat16, device="meta")
    table = torch.zeros(32, dtype=torch.int32, device="meta")
    out = torch.empty(32, 128, dtype=torch.bfloat16, device="meta")
    with capture() as found:
        audit_launched.gather_pages[(32,)](out, pool, table, pool.stride(0), BLOCK=128)
    (fault,) = found.report().faults
    pointer = fault.wall.element
    report = found.report(Options((f"{pointer}.numel() < 2**31",)))
    assert report.faults == []
    assert any(f"assumed: {pointer}.numel < 2**31" in finding.notes for finding in report.findings)


def test_a_parameter_that_is_a_tuple(tmp_path: Path) -> None:
    text = """
    @triton.jit
    def f(x_ptr, strides, D: tl.constexpr):
        outer, inner = strides
        row = tl.program_id(0){cast}
        tl.store(x_ptr + row * outer + tl.arange(0, D) * inner, 0.0)
    """
    (fault,) = audited(tmp_path, text.format(cast="")).faults
    assert fault.rule == "BP103"
    assert audited(tmp_path, text.format(cast=".to(tl.int64)")).findings == []
