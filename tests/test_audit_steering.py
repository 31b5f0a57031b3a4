"""Suppressions, assumptions, baselines."""

from __future__ import annotations

from pathlib import Path

import pytest

from audit_texts import audited, only
from bigpool.audit import Options, audit, baseline
from bigpool.audit.assume import GRAMMAR
from bigpool.errors import ArgumentError

assert GRAMMAR == "NAME < BOUND, NAME <= BOUND, NAME = VALUE or TENSOR: int64"
BODY = """
    @triton.jit
    def f(x_ptr, block_table_ptr, stride_page):
        {above}
        page = tl.load(block_table_ptr + tl.program_id(1))
        tl.store(x_ptr + page * stride_page, 1.0){beside}
"""


def test_a_suppression_with_a_reason(tmp_path: Path) -> None:
    report = audited(tmp_path, BODY.format(above="", beside="  # bigpool: ignore[BP101] checked by the host"))
    assert (report.faults, report.suppressed) == ([], 1)


@pytest.mark.parametrize(
    ("comment", "text"),
    [
        ("ignore[BP101]", "a suppression needs a reason after the brackets"),
        ("ignore[BP103] the wrong rule", "nothing to ignore: no BP103 here"),
        ("ignore this", "expected ignore[RULE] reason, or assume NAME < BOUND, reason"),
        ("assume page < 2**20", "an assumption needs a reason after a comma"),
        ("assume page, is small", f"expected assume {GRAMMAR}, reason"),
    ],
)
def test_a_comment_that_does_nothing_is_reported(tmp_path: Path, comment: str, text: str) -> None:
    report = audited(tmp_path, BODY.format(above="", beside=f"  # bigpool: {comment}"))
    assert [(finding.rule, finding.message) for finding in report.faults if finding.rule != "BP101"] == [("BP190", text)]
    assert "BP101" in [finding.rule for finding in report.faults]


def test_an_assumption_about_what_does_not_exist(tmp_path: Path) -> None:
    report = audited(tmp_path, BODY.format(above="# bigpool: assume slot < 8, fixed", beside=""))
    assert [finding.rule for finding in report.faults] == ["BP190", "BP101"]


@pytest.mark.parametrize(
    ("bounds", "at", "wall"),
    [
        (("stride_page = 901_120",), (), 2384),
        (("stride_page = 901_120", "page < 2384"), (), None),
        (("stride_page = 901_120", "page <= 2384"), (), 2384),
        (("stride_page = 901_120", "block_table < num_pages"), ("num_pages=66",), None),
        (("stride_page = 901_120", "block_table < num_pages"), ("num_pages=100_000",), 2384),
        (("stride_page = 880 * 4 * 256",), (), 2384),
        (("block_table < 2**10", "stride_page < 2**20"), (), None),
        (("stride_page * page < 2**31",), (), None),
        (("stride_page = 901_120", "page*stride_page <= 2**31"), (), 2384),
        (("stride_page = 901_120", "page*stride_page < 2**31"), (), None),
    ],
)
def test_bounds(tmp_path: Path, bounds: tuple[str, ...], at: tuple[str, ...], wall: int | None) -> None:
    report = audited(tmp_path, BODY.format(above="", beside=""), *bounds, at=at)
    if wall is None:
        assert report.faults == []
        assert len(report.assumed) == len(bounds)
    else:
        found = only(report)
        assert found.wall is not None
        assert found.wall.value == wall


@pytest.mark.parametrize("place", ["above", "beside"])
def test_a_bound_in_a_comment_holds_in_its_function(tmp_path: Path, place: str) -> None:
    comment = "  # bigpool: assume page < 2**10, the pool is small"
    body = BODY.format(**{"above": "", "beside": ""} | {place: comment})
    body += BODY.format(above="", beside="").replace("def f(", "def g(")
    report = audited(tmp_path, body, "stride_page < 2**20")
    assert only(report).kernel == "g"
    assert "page < 2**10 (the pool is small)" in report.assumed


def test_bounds_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "bounds.toml"
    path.write_text('[[assume]]\nbound = "page < 100"\nreason = "r"\n[[assume]]\nbound = "stride_page < 2**20"\nkernel = "f"\n')
    assert audited(tmp_path, BODY.format(above="", beside=""), str(path)).faults == []


@pytest.mark.parametrize(
    ("bounds", "at", "text"),
    [
        (("page is small",), (), f"--assume: expected {GRAMMAR}, got 'page is small'; such as 'page < 2**20'"),
        (("slots: int65",), (), "--assume: expected an element type after the colon, got 'slots: int65'; such as 'slots: int64'"),
        (("m * n = 8",), (), "--assume: expected < or <= after a product, got 'm * n = 8'; such as 'm * n < 2**31'"),
        ((), ("num_pages",), "--at: expected NAME=INTEGER, got 'num_pages'; such as num_pages=100_000"),
    ],
)  # fmt: skip
def test_bounds_that_cannot_be_read(tmp_path: Path, bounds: tuple[str, ...], at: tuple[str, ...], text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        audited(tmp_path, BODY, *bounds, at=at)
    assert str(caught.value) == f"bigpool audit: {text}"


def test_a_baseline_survives_moved_lines_and_not_edited_ones(tmp_path: Path) -> None:
    report = audited(tmp_path, BODY.format(above="", beside=""))
    path = tmp_path / "baseline.json"
    path.write_text(baseline.written(report))
    known = baseline.read(path)
    file = tmp_path / "kernels.py"
    file.write_text(file.read_text().replace("@triton.jit", "# moved\n\n\n@triton.jit"))
    assert len(audit([file]).faults) == 1
    assert audit([file], Options(baseline=known)).faults == []
    file.write_text(file.read_text().replace("page * stride_page", "page * stride_page * 2"))
    assert len(audit([file], Options(baseline=known)).faults) == 1


def test_a_file_that_is_no_baseline(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_text("{}")
    with pytest.raises(
        ArgumentError, match=r"--baseline: expected a file of schema bigpool-audit-baseline/1, got .*; write one with"
    ):
        baseline.read(path)
