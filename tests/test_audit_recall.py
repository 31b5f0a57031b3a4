"""Faults that the auditor once passed over in public code, and fixes that it once went on reporting; each as small as it gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from audit_texts import HEADER
from bigpool.audit import Confidence, Severity, audit

CASES = {
    # A loop of tiles in steps of the row that the start is multiplied by: no outer axis.
    "start_of_a_group": (
        "def f(c_ptr, sizes, groups: tl.constexpr, N: tl.constexpr, BM: tl.constexpr):\n"
        "    end = 0\n"
        "    for g in tl.range(groups):\n"
        "        start = end\n"
        "        size = tl.load(sizes + g)\n"
        "        end = start + size\n"
        "        rows = tl.program_id(0) % tl.cdiv(size, BM) * BM + tl.arange(0, BM)\n"
        "        tl.store(c_ptr + (start + rows[:, None]) * N + tl.arange(0, BM), 0.0)\n",
        "end = 0",
        "end = tl.full((), 0, tl.int64)",
        "(start + rows[:, None]) * N",
    ),
    # A branch that loads is no gate of a width: the other one is no wide side of it.
    "branches_that_differ": (
        "def f(k_ptr, cu_seqlens, T, H: tl.constexpr, K: tl.constexpr, VARLEN: tl.constexpr):\n"
        "    if VARLEN:\n"
        "        bos = tl.load(cu_seqlens + tl.program_id(1))\n"
        "    else:\n"
        "        bos = tl.program_id(1).to(tl.int64) * T\n"
        "    tl.load(k_ptr + bos * H * K + tl.arange(0, K))\n",
        "tl.load(cu_seqlens + tl.program_id(1))",
        "tl.load(cu_seqlens + tl.program_id(1)).to(tl.int64)",
        "bos * H * K",
    ),
    # A parameter that only one branch replaces keeps its width on the other.
    "a_parameter_replaced_in_a_branch": (
        "def f(g_ptr, cu_seqlens, T, D, VARLEN: tl.constexpr):\n"
        "    n = tl.program_id(1)\n"
        "    if VARLEN:\n"
        "        bos, eos = tl.load(cu_seqlens + n).to(tl.int64), tl.load(cu_seqlens + n + 1).to(tl.int64)\n"
        "        T = eos - bos\n"
        "    else:\n"
        "        bos = n * T\n"
        "    tl.load(g_ptr + (bos + T - 1) * D)\n",
        "n = tl.program_id(1)",
        "n = tl.program_id(1).to(tl.int64)",
        "(bos + T - 1) * D",
    ),
    # So does a sum with a parameter of which it is not known yet that it is no pointer.
    "a_sum_replaced_in_a_branch": (
        "def f(x_ptr, chunks, stride, first, VARLEN: tl.constexpr):\n"
        "    chunk = tl.program_id(2).to(tl.int64) + first\n"
        "    if VARLEN:\n"
        "        chunk = tl.load(chunks + 1)\n"
        "    tl.store(x_ptr + (chunk - 1) * stride, 0.0)\n",
        "tl.load(chunks + 1)",
        "tl.load(chunks + 1).to(tl.int64)",
        "(chunk - 1) * stride",
    ),
    # The outer axis is widened, so that its step bounds nothing; the loop variable goes as far.
    "inside_a_wide_axis": (
        "def f(h_ptr, NT, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr):\n"
        "    h_ptr += tl.program_id(0).to(tl.int64) * NT * H * K * V\n"
        "    for t in range(NT):\n"
        "        tl.store(h_ptr + t * H * K * V + tl.arange(0, V), 0.0)\n",
        "+ t * H * K * V",
        "+ t.to(tl.int64) * H * K * V",
        "t * H * K * V",
    ),
    # Strides that are constexprs, and lanes of heads beside them.
    "constexpr_strides": (
        "def f(cache_ptr, slots, size: tl.constexpr, stride_page: tl.constexpr, stride_head: tl.constexpr, BH: tl.constexpr):\n"
        "    slot = tl.load(slots + tl.program_id(0))\n"
        "    page = slot // size\n"
        "    heads = tl.program_id(1) * BH + tl.arange(0, BH)\n"
        "    tl.store(cache_ptr + (\n"
        "        page * stride_page\n"
        "        + heads.to(tl.int64) * stride_head\n"
        "    ), 0.0)\n",
        "tl.load(slots + tl.program_id(0))",
        "tl.load(slots + tl.program_id(0)).to(tl.int64)",
        "page * stride_page",
    ),
    # `x - (x // d) * d` is `x % d`: once the page is widened nothing is left.
    "a_remainder_by_hand": (
        "def f(cache_ptr, table, length, stride_page, stride_slot, PAGE: tl.constexpr, BN: tl.constexpr):\n"
        "    for start in range(0, length, BN):\n"
        "        tokens = start + tl.arange(0, BN)\n"
        "        column = tokens // PAGE\n"
        "        slot = tokens - column * PAGE\n"
        "        page = tl.load(table + column)\n"
        "        tl.load(cache_ptr + page * stride_page + slot * stride_slot)\n",
        "tl.load(table + column)",
        "tl.load(table + column).to(tl.int64)",
        "page * stride_page",
    ),
    # A row of constexprs with tiles of another axis inside it.
    "a_constexpr_row": (
        "def f(x_ptr, K: tl.constexpr, SF: tl.constexpr, BLOCK: tl.constexpr):\n"
        "    row = tl.program_id(0)\n"
        "    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)\n"
        "    tl.load(x_ptr + row * K + cols * 16, mask=cols < SF)\n",
        "row = tl.program_id(0)",
        "row = tl.program_id(0).to(tl.int64)",
        "row * K",
    ),
    # A part of a row is no number of tiles.
    "half_a_row": (
        "def f(out_ptr, ids, N, PART: tl.constexpr, BLOCK: tl.constexpr):\n"
        "    row = tl.load(ids + tl.program_id(0))\n"
        "    width = N // PART\n"
        "    tl.store(out_ptr + row * width + tl.arange(0, BLOCK), 0.0)\n",
        "row * width",
        "row.to(tl.int64) * width",
        "row * width",
    ),
    # An address that was loaded is a pointer, whatever its element type is made of.
    "a_loaded_address": (
        "def f(ref_ptr, addresses, indices, stride_block, BLOCK: tl.constexpr):\n"
        "    base = tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(ref_ptr.dtype.element_ty))\n"
        "    state = tl.load(indices + tl.program_id(2))\n"
        "    here = base + state * stride_block\n"
        "    tl.store(here + tl.arange(0, BLOCK), 0.0)\n",
        "tl.load(indices + tl.program_id(2))",
        "tl.load(indices + tl.program_id(2)).to(tl.int64)",
        "state * stride_block",
    ),
    # Copies into shared memory load as well.
    "a_copy_to_shared_memory": (
        "def f(smem, cache_ptr, page, PAGE: tl.constexpr, H: tl.constexpr, D: tl.constexpr):\n"
        "    tokens = page * PAGE + tl.arange(0, PAGE)\n"
        "    async_copy.global_load_to_shared(smem, cache_ptr + tokens[:, None] * H * D + tl.arange(0, D))\n",
        "page * PAGE",
        "page.to(tl.int64) * PAGE",
        "tokens[:, None] * H * D",
    ),
}


def found(path: Path, text: str) -> list[str]:
    """The operations that are reported."""
    path.write_text(text)
    report = audit([path])
    assert report.skipped_kernels == []
    lines = text.splitlines()
    spans = [finding.primary.span for finding in report.faults]
    return [lines[span.line - 1][span.col - 1 : span.end_col - 1] for span in spans]


@pytest.mark.parametrize("name", CASES)
def test_before_and_after_the_fix(tmp_path: Path, name: str) -> None:
    body, old, new, operation = CASES[name]
    head = HEADER + "from triton.experimental.gluon.language.amd.cdna4 import async_copy\n\n@triton.jit\n"
    assert body.count(old) == 1
    assert operation in found(tmp_path / "before.py", head + body)
    assert found(tmp_path / "after.py", head + body.replace(old, new)) == []


def test_a_helper_that_is_not_at_hand_gives_any_int32(tmp_path: Path) -> None:
    head = HEADER + "from elsewhere import place\n@triton.jit\ndef f(x_ptr, stride):\n    m, n = place(tl.program_id(0))\n"
    (tmp_path / "k.py").write_text(head + "    tl.store(x_ptr + m * stride, 1.0)\n")
    report = audit([tmp_path / "k.py"])
    (finding,) = report.faults
    assert (finding.confidence, finding.primary.span.line) == (Confidence.LOW, 9)
    assert "may not fit" in finding.message
    assert [note.rule for note in report.notes] == ["BP191"], "and that it was not followed is said too"
    assert found(tmp_path / "k.py", head + "    tl.store(x_ptr + m.to(tl.int64) * stride, 1.0)\n") == []


def test_helpers_of_the_own_package_are_read_where_they_are(tmp_path: Path) -> None:
    inside = tmp_path / "mine" / "kernels"
    inside.mkdir(parents=True)
    (tmp_path / "mine" / "grid.py").write_text(HEADER + "@triton.jit\ndef row():\n    return tl.program_id(0).to(tl.int64)\n")
    text = HEADER + "from mine.grid import row\n@triton.jit\ndef f(x_ptr, stride):\n    tl.store(x_ptr + row() * stride, 1.0)\n"
    assert found(inside / "k.py", text) == []
    (tmp_path / "mine" / "grid.py").write_text(HEADER + "@triton.jit\ndef row():\n    return tl.program_id(0)\n")
    assert found(inside / "k.py", text) == ["row() * stride"]


def test_fields_of_an_argument_that_holds_several_values(tmp_path: Path) -> None:
    text = HEADER + (
        "class State:\n"
        "    @triton.jit\n"
        "    def load(self, page):\n"
        "        return tl.load(self.cache_ptr + page * self.WIDTH + tl.load(self.table_ptr + page) * self.stride_page)\n"
    )
    assert found(tmp_path / "k.py", text) == ["tl.load(self.table_ptr + page) * self.stride_page"]
    fixed = text.replace("+ page)", "+ page).to(tl.int64)")
    assert found(tmp_path / "k.py", fixed) == []


GATED = """
@triton.jit
def f(x_ptr, stride, WIDE: tl.constexpr = False):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    tl.store(x_ptr + row * stride, 1.0)

def launch(x):
    f[(x.shape[0],)](x, x.stride(0){})
"""


@pytest.mark.parametrize(
    ("passed", "guarded"),
    [
        (", WIDE=x.numel() > 2**31", True),
        (", x.numel() > 2**31", True),
        (", WIDE=True", True),
        (", **options", True),
        (", *options", True),
        (", WIDE=False", False),
        (", False", False),
        ("", False),
    ],
)
def test_a_gate_that_no_launch_opens_guards_nothing(tmp_path: Path, passed: str, guarded: bool) -> None:
    text = HEADER + GATED.format(passed)
    assert found(tmp_path / "k.py", text) == ([] if guarded else ["row * stride"])
    report = audit([tmp_path / "k.py"])
    assert report.trusted == ({"f: WIDE"} if guarded else set())
    note = "every launch in this file takes the narrow branch of WIDE by a constant"
    assert [note in finding.notes for finding in report.faults] == ([] if guarded else [True])
    assert found(tmp_path / "other.py", HEADER + GATED.partition("def launch")[0]) == [], "no launch in sight: trusted"


def test_the_term_that_was_judged_is_the_one_that_is_named(tmp_path: Path) -> None:
    text = HEADER + (
        "@triton.jit\n"
        "def f(cache_ptr, slots, stride_page: tl.constexpr, stride_head: tl.constexpr, BH: tl.constexpr):\n"
        "    page = tl.load(slots + tl.program_id(0))\n"
        "    heads = tl.program_id(1) * BH + tl.arange(0, BH)\n"
        "    tl.store(cache_ptr + (page * stride_page + heads * stride_head), 0.0)\n"
    )
    assert found(tmp_path / "k.py", text) == ["page * stride_page"]


def test_tiles_of_the_same_axis_do_not_hide_where_it_starts(tmp_path: Path) -> None:
    body = CASES["start_of_a_group"][0]
    # The tiles are counted elsewhere, so that nothing but the start grows with the data.
    body = body.replace("tl.program_id(0) % tl.cdiv(size, BM)", "tl.program_id(1) % 8")
    assert "(start + rows[:, None]) * N" in found(tmp_path / "k.py", HEADER + "@triton.jit\n" + body)


def test_a_stride_that_is_a_constexpr_counts_as_a_row(tmp_path: Path) -> None:
    body = "@triton.jit\ndef f(x_ptr, {name}: tl.constexpr):\n    tl.store(x_ptr + tl.program_id(0) * {name}, 1.0)\n"
    severities = []
    for name in ("stride_row", "N"):
        (tmp_path / "k.py").write_text(HEADER + body.format(name=name))
        (finding,) = audit([tmp_path / "k.py"]).faults
        severities.append(finding.severity)
    assert severities == [Severity.ERROR, Severity.WARNING]


def test_a_function_of_triton_that_is_not_known_gives_any_int32(tmp_path: Path) -> None:
    text = HEADER + "@triton.jit\ndef f(x_ptr, stride):\n    tl.store(x_ptr + tl.not_yet_known(1) * stride, 1.0)\n"
    assert found(tmp_path / "k.py", text) == ["tl.not_yet_known(1) * stride"]


def test_every_term_of_a_loaded_address_is_seen(tmp_path: Path) -> None:
    text = HEADER + (
        "@triton.jit\n"
        "def f(ref_ptr, addresses, strides, indices, BLOCK: tl.constexpr):\n"
        "    base = tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(ref_ptr.dtype.element_ty))\n"
        "    block_step, step = tl.load(strides), tl.load(strides + 1)\n"
        "    here = base + tl.load(indices + tl.program_id(2)) * block_step\n"
        "    tl.store(here + (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)) * step, 0.0)\n"
    )
    operations = found(tmp_path / "k.py", text)
    assert operations == [
        "tl.load(indices + tl.program_id(2)) * block_step",
        "(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)) * step",
    ]


DOUBTS = {
    "pieces": (
        "def f(part_ptr, {name}, BLOCK: tl.constexpr):\n"
        "    cols = tl.arange(0, BLOCK)\n"
        "    tl.load(part_ptr + tl.program_id(0) * {name} + cols, mask=cols < {name})\n",
        ("n_cols", "num_blocks"),
        "a row has one entry for each block of a larger tensor, which would be beyond memory first",
    ),
    "rows": (
        "def f(part_ptr, {name}):\n"
        "    split = tl.arange(0, 8)\n"
        "    tl.load(part_ptr + split[:, None] * (M * 2048) + tl.program_id(0) * 2048 + tl.arange(0, 256))\n",
        ("M", "M: tl.constexpr"),
        "the number of rows is a constexpr: the axis around it has a step of so many",
    ),
}


@pytest.mark.parametrize("name", DOUBTS)
def test_what_lowers_the_confidence(tmp_path: Path, name: str) -> None:
    body, names, reason = DOUBTS[name]
    confidences = []
    for one in names:
        (tmp_path / "k.py").write_text(HEADER + "@triton.jit\n" + body.format(name=one))
        faults = audit([tmp_path / "k.py"]).faults
        (finding,) = (item for item in faults if item.wall is not None and item.wall.formula.startswith("program_id"))
        confidences.append(finding.confidence)
    assert confidences == [Confidence.HIGH, Confidence.MEDIUM]
    assert reason in finding.notes
