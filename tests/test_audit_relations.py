"""Relations between sizes bound what is made of them: stated, or read from the launches."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


def test_a_bound_without_a_value_says_so(tmp_path: Path) -> None:
    text = VOLUME.format(mask=ALL, offset=OFFSETS[1])
    report = audited(tmp_path, text, "N < rows")
    assert report.faults
    assert list(report.assumed) == ["N < rows (bounds nothing: rows has no value; --at)"]
    assert list(audited(tmp_path, text, "N < rows", at=("rows=8",)).assumed) == ["N < rows"]


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


TERMS = ("H * W", "W", "H", "N", "N * W", "N * H", "1")
# A count by itself is taken to stay below 2^31 with what is added to it.
MOST_PROGRAMS = (2**30, 65_535, 65_535)


def largest(terms: tuple[str, str], masked: tuple[bool, bool, bool], product: int) -> int:
    """The largest value of any part of `i * terms[0] + j * terms[1] + k` for sizes with a product below `product`, by trial."""
    most = 0
    for first, second in itertools.product(range(product.bit_length()), repeat=2):
        if first + second >= product.bit_length():
            continue
        left, right = 1 << first, 1 << second
        for order in set(itertools.permutations((left, right, (product - 1) // (left * right)))):
            sizes = dict(zip("NHW", order, strict=True))
            if not all(1 <= size < 2**31 for size in order):
                continue
            # A block of 64: the kernel's own is a constexpr.
            ends = [end if axis < 2 else end * 64 + 63 for axis, end in enumerate(MOST_PROGRAMS)]
            i, j, k = (min(size - 1, end) if mask else end for size, end, mask in zip(order, ends, masked, strict=True))
            values = [eval(term, {}, sizes) for term in terms]
            most = max(most, i * values[0] + j * values[1] + k, *values)
    return most


@settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    st.tuples(st.sampled_from(TERMS), st.sampled_from(TERMS)),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.integers(20, 34),
)
def test_what_a_stated_product_silences_cannot_wrap(
    tmp_path_factory: pytest.TempPathFactory, terms: tuple[str, str], masked: tuple[bool, bool, bool], bits: int
) -> None:
    parts = [part for part, is_masked in zip(("(i < N)", "(j < H)", "(k < W)"), masked, strict=True) if is_masked]
    text = VOLUME.format(mask=" & ".join(parts) or "None", offset=f"(i * ({terms[0]}) + j * ({terms[1]}) + k)")
    report = audited(tmp_path_factory.mktemp("volume"), text, f"N * H * W < 2**{bits}")
    if not report.faults:
        assert largest(terms, masked, 2**bits) < 2**31


def test_the_trial_sees_what_wraps_and_silence_happens(tmp_path: Path) -> None:
    """The test above is about something: a right bound is silent, and the trial finds a value past 2^31."""
    assert largest(("H * W", "W"), (True, True, True), 2**31) == 2**31 - 1
    assert largest(("H * W", "W"), (True, True, True), 2**32) >= 2**31
    assert largest(("N * W", "W"), (True, True, True), 2**31) >= 2**31
    assert largest(("H * W", "W"), (False, True, True), 2**31) >= 2**31
    text = VOLUME.format(mask=ALL, offset="(i * (H * W) + j * (W) + k)")
    assert audited(tmp_path, text, "N * H * W < 2**30").faults == []
