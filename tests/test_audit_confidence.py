"""What high confidence means: width, growth of the index and length of a row are seen in the text. Each doubt has its kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigpool.audit import Finding, audit

HEAD = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"

# (name, kernel, its confidence, the doubt that the report names)
CASES = [
    (
        "a_row_that_a_mask_bounds",
        """
def kernel(x_ptr, stride_row, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_row + cols, mask=cols < n_cols)
    tl.store(x_ptr + row * stride_row + cols, x, mask=cols < n_cols)
""",
        "high",
        "",
    ),
    (
        "a_row_in_tiles_of_the_grid",
        """
def kernel(x_ptr, stride_row, BLOCK: tl.constexpr, N: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + row * stride_row + cols, 0, mask=cols < N)
""",
        "high",
        "",
    ),
    (
        "one_element_for_each_program",
        """
def kernel(x_ptr, stride, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i * stride, 0, mask=i < n)
""",
        "medium",
        "no data-sized axis is seen inside the stride",
    ),
    (
        "a_row_read_one_by_one",
        """
def kernel(x_ptr, top_k):
    token = tl.program_id(0)
    for i in range(top_k):
        tl.store(x_ptr + token * top_k + i, 0)
""",
        "medium",
        "no data-sized axis is seen inside the stride",
    ),
    (
        "a_small_axis_of_the_grid",
        """
def kernel(x_ptr, stride_split, n_cols, BLOCK: tl.constexpr):
    split = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + split * stride_split + cols, 0, mask=cols < n_cols)
""",
        "medium",
        "axis 1 of a grid ends at 65,535",
    ),
    (
        "tiles_on_a_small_axis_are_many_rows",
        """
def kernel(x_ptr, stride_row, n_cols, M: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(1) * M + tl.arange(0, M)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (cols < n_cols)[None, :]
    tl.store(x_ptr + rows[:, None] * stride_row + cols[None, :], 0, mask=mask)
""",
        "high",
        "",
    ),
    (
        "a_row_of_constexprs",
        """
def kernel(x_ptr, H: tl.constexpr, K: tl.constexpr):
    row = tl.program_id(0)
    tl.store(x_ptr + row * H * K + tl.arange(0, K), 0)
""",
        "medium",
        "the length of a row is a constexpr of unknown value",
    ),
    (
        "a_row_of_known_length",
        """
def kernel(x_ptr):
    row = tl.program_id(0)
    tl.store(x_ptr + row * 8192 + tl.arange(0, 8192), 0)
""",
        "high",
        "",
    ),
    (
        "a_small_axis_times_a_number_that_reaches_the_wall",
        """
def kernel(x_ptr):
    batch = tl.program_id(1)
    tl.store(x_ptr + batch * 65536 + tl.arange(0, 65536), 0)
""",
        "high",
        "",
    ),
    (
        "a_part_of_the_grid",
        """
def kernel(x_ptr, stride_batch, heads, n_cols, BLOCK: tl.constexpr):
    batch = tl.program_id(0) // heads
    cols = tl.arange(0, BLOCK)
    tl.store(x_ptr + batch * stride_batch + cols, 0, mask=cols < n_cols)
""",
        "medium",
        "a quotient or a remainder",
    ),
    (
        "scratch_of_programs_that_share_the_work",
        """
def kernel(x_ptr, sum_ptr, stride_sum, rows, n_cols, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(pid, rows, tl.num_programs(0)):
        total += tl.load(x_ptr + row)
    tl.store(sum_ptr + pid * stride_sum + cols, total, mask=cols < n_cols)
""",
        "medium",
        "shares its work among its programs",
    ),
    (
        "a_product_that_is_multiplied_elsewhere",
        """
def kernel(x_ptr, lse_ptr, tokens, heads, D: tl.constexpr):
    batch = tl.program_id(0)
    cols = tl.arange(0, D)
    wide = batch.to(tl.int64) * tokens * heads
    tl.store(lse_ptr + batch * tokens * heads + cols, 0, mask=cols < heads)
    tl.store(x_ptr + wide * 4096 + cols, 0, mask=cols < heads)
""",
        "medium",
        "another address multiplies the same product further",
    ),
    (
        "the_weight_of_a_row_beside_the_row",
        """
def kernel(weight_ptr, x_ptr, stride_w, stride_x, stride_xk, K, n_cols, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    cols = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + token * stride_w + k, mask=k < K)
    wide = token.to(tl.int64)
    tl.store(x_ptr + wide * stride_x + k[:, None] * stride_xk + cols[None, :], weight[:, None], mask=cols[None, :] < n_cols)
""",
        "medium",
        "another address has the same axes and one more",
    ),
    (
        "groups_of_columns_beside_the_columns",
        """
def kernel(group_ptr, x_ptr, stride_g, stride_x, n_cols, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    group = tl.load(group_ptr + row * stride_g + cols // SIZE, mask=cols < n_cols)
    tl.store(x_ptr + row.to(tl.int64) * stride_x + cols, group, mask=cols < n_cols)
""",
        "medium",
        "another address has the same axes and one more",
    ),
    (
        "a_row_beside_a_row_of_other_lanes",
        """
def kernel(x_ptr, y_ptr, stride_x, stride_y, n, m, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    others = tl.arange(0, BLOCK)
    value = tl.load(x_ptr + row * stride_x + cols, mask=cols < n)
    tl.store(y_ptr + row.to(tl.int64) * stride_y + others, value, mask=others < m)
""",
        "high",
        "",
    ),
    (
        "a_row_beside_a_few_of_its_rows",
        """
def kernel(x_ptr, y_ptr, stride_x, stride_y, stride_yk, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    few = tl.arange(0, 16)
    value = tl.load(x_ptr + row * stride_x + cols, mask=cols < n)
    spread = row.to(tl.int64) * stride_y + few[:, None] * stride_yk + cols[None, :]
    tl.store(y_ptr + spread, value[None, :], mask=cols[None, :] < n)
""",
        "high",
        "",
    ),
]


def high(tmp_path: Path, kernel: str) -> Finding:
    """The first error of a kernel."""
    path = tmp_path / "kernel.py"
    path.write_text(HEAD + kernel.lstrip(), "utf-8")
    found = [finding for finding in audit([path]).faults if str(finding.severity) == "error"]
    assert found, "no error at all: the case tests nothing"
    return found[0]


@pytest.mark.parametrize(("name", "kernel", "confidence", "doubt"), CASES, ids=[case[0] for case in CASES])
def test_confidence_follows_what_the_text_shows(tmp_path: Path, name: str, kernel: str, confidence: str, doubt: str) -> None:
    found = high(tmp_path, kernel)
    assert (name, str(found.confidence)) == (name, confidence), found.notes
    assert any(doubt in note for note in found.notes) if doubt else not found.notes


def test_a_helper_that_returns_early_in_one_specialisation_does_not_widen_the_other(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    helper = """
def row_of(ids_ptr, row, HAS_IDS: tl.constexpr):
    if HAS_IDS:
        return tl.load(ids_ptr + row).to(tl.int64)
    return row


@triton.jit
def kernel(x_ptr, ids_ptr, stride_row, n_cols, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr):
    row = row_of(ids_ptr, tl.program_id(0), HAS_IDS)
    cols = tl.arange(0, BLOCK)
    tl.store(x_ptr + row * stride_row + cols, 0, mask=cols < n_cols)
"""
    path.write_text(HEAD + helper.lstrip(), "utf-8")
    assert [finding.rule for finding in audit([path]).faults] == ["BP103"]
