"""`--fix`: one cast where the index is made; what is around it survives."""

from __future__ import annotations

from pathlib import Path

import pytest

from audit_texts import HEADER, write
from bigpool.audit import Options, audit
from bigpool.audit.fix import Fixes, fixes

KERNEL = """
    @triton.jit
    def f(
        x_ptr,  y_ptr, i_ptr, stride,      # odd spacing stays
    ):
        page = tl.load(i_ptr  +  tl.program_id(1),   # a comment
                       mask=True)  # another
        tl.store(y_ptr + tl.arange(0, 64), tl.load(x_ptr + page*stride))
"""


def fixed(path: Path, unsafe: bool = False) -> tuple[str, Fixes]:
    report = audit([path])
    assert report.faults
    result = fixes([path], Options(), report, unsafe)
    for file, (_, after) in result.files.items():
        file.write_bytes(after)
    return path.read_text("utf-8"), result


def test_the_load_is_widened_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path, KERNEL)
    before = path.read_text("utf-8")
    after, result = fixed(path)
    assert after == before.replace("mask=True)", "mask=True).to(tl.int64)")
    assert (result.fixed, result.left) == (1, [])
    assert audit([path]).faults == []


def test_the_alias_of_the_file_is_used(tmp_path: Path) -> None:
    path = tmp_path / "k.py"
    path.write_text(
        "import triton\nimport triton.language as lang\n\n@triton.jit\ndef f(x_ptr, stride):\n"
        "    lang.store(x_ptr + lang.program_id(0) * stride, 1.0)\n"
    )
    after, _ = fixed(path)
    assert "lang.program_id(0).to(lang.int64) * stride" in after


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_line_endings_and_a_byte_order_mark_survive(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path, KERNEL)
    data = ("\ufeff" + path.read_text("utf-8").replace("\n", ending)).encode()
    path.write_bytes(data)
    fixed(path)
    assert path.read_bytes() == data.replace(b"mask=True)", b"mask=True).to(tl.int64)")


def test_two_products_need_one_cast(tmp_path: Path) -> None:
    body = """
        @triton.jit
        def f(x_ptr, y_ptr, stride_x, stride_y):
            row = tl.program_id(0)
            tl.store(y_ptr + row * stride_y, tl.load(x_ptr + row * stride_x))
    """
    path = write(tmp_path, body)
    after, result = fixed(path)
    assert after.count(".to(tl.int64)") == 1
    assert result.fixed == 2


def test_a_variable_that_is_assigned_twice_is_left_to_the_unsafe_fixes(tmp_path: Path) -> None:
    # A loop or a branch that carries it wants one type on every way.
    body = """
        @triton.jit
        def f(x_ptr, i_ptr, n, stride):
            page = 0
            for i in range(n):
                if i % 2 == 0:
                    page = tl.load(i_ptr + i)
                tl.store(x_ptr + page * stride, 1.0)
    """
    path = write(tmp_path, body)
    after, result = fixed(path)
    assert after == path.read_text("utf-8")
    assert result.files == {}
    assert [reason for _, reason in result.left] == ["its fix does not resolve it"]


def test_a_loop_variable_is_widened_at_its_use_as_an_unsafe_fix(tmp_path: Path) -> None:
    body = """
        @triton.jit
        def f(x_ptr, n, stride):
            for row in range(n):
                tl.store(x_ptr + row * stride, 1.0)
    """
    path = write(tmp_path, body)
    assert fixed(path)[1].files == {}
    after, _ = fixed(path, unsafe=True)
    assert "x_ptr + row.to(tl.int64) * stride" in after
    assert audit([path]).faults == []


def test_the_diff_shows_both_sides(tmp_path: Path) -> None:
    path = write(tmp_path, KERNEL)
    result = fixes([path], Options(), audit([path]), False)
    diff = result.diff()
    assert "-                   mask=True)  # another\n+                   mask=True).to(tl.int64)  # another\n" in diff
    assert path.read_text("utf-8").startswith(HEADER)
