"""What the source front end and the core say about the arithmetic of public reports, without any fact about the launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from audit_texts import HEADER, audited, only, text_of
from bigpool.audit import audit

PAGES = """
    @triton.jit
    def gather(k_ptr, block_table_ptr, out_ptr, stride_k_page, stride_k_slot, N: tl.constexpr):
        pid = tl.program_id(0)
        page = tl.load(block_table_ptr + pid){cast}
        offs_n = tl.arange(0, N)
        k = tl.load(k_ptr + page * stride_k_page + offs_n * stride_k_slot)
        tl.store(out_ptr + offs_n, k)
"""


def test_a_page_times_its_stride_is_found_with_its_wall(tmp_path: Path) -> None:
    found = only(audited(tmp_path, PAGES.format(cast=""), "stride_k_page = 901_120"))
    assert (found.rule, str(found.severity), str(found.confidence)) == ("BP101", "error", "medium")
    assert text_of(found, tmp_path) == "page * stride_k_page"
    assert found.wall is not None
    assert (found.wall.variable, found.wall.value, found.wall.tensor_bytes) == ("page", 2384, 2**32)
    assert found.wall.others == (("stride_k_page", 901_120),)
    assert [(label.span.line, label.text) for label in found.secondary] == [(8, "int32 from here, if the tensor holds int32")]


def test_without_the_stride_the_wall_is_symbolic(tmp_path: Path) -> None:
    wall = only(audited(tmp_path, PAGES.format(cast=""))).wall
    assert wall is not None
    assert (wall.value, wall.formula, wall.example) == (None, "page * stride_k_page", ("stride_k_page", 901_120, 2384))


@pytest.mark.parametrize("cast", [".to(tl.int64)", ".to(dtype=tl.int64)", ".cast(tl.int64)"])
def test_a_widened_page_is_clean(tmp_path: Path, cast: str) -> None:
    assert audited(tmp_path, PAGES.format(cast=cast)).faults == []


def test_a_table_that_holds_int64_is_clean_once_said(tmp_path: Path) -> None:
    assert audited(tmp_path, PAGES.format(cast=""), "block_table: int64").faults == []


ROW = "tl.load(rows_ptr + pid)"
PAGE = ("stride = 4096",)


@pytest.mark.parametrize(
    ("body", "bounds", "rule", "wall"),
    [
        ("page = tl.load(t_ptr + pid)\n    x = tl.load(p_ptr + page * 480 * 576 + lane)", (), "BP101|BP112", 7768),
        ("slot = tl.load(slot_ptr + pid)\n    x = tl.load(p_ptr + slot * 576 + lane)", (), "BP101", 3_728_271),
        ("row = tl.program_id(0)\n    x = tl.load(p_ptr + row * 36_864 + lane)", (), "BP103", 58_255),
        ("row = tl.program_id(0)\n    x = tl.load(p_ptr + row * stride + lane)", ("stride = 50_257",), "BP103", 42_731),
        (f"row = {ROW}\n    x = tl.load(p_ptr + row * stride + lane)", ("stride = 8192",), "BP102", 262_144),
        (f"row = {ROW}\n    x = tl.load(p_ptr + tl.multiple_of(row * 4096, 16) + lane)", (), "BP102", 524_288),
        (f"row = {ROW}\n    c = tl.arange(0, 8192)\n    x = tl.load(p_ptr + (row * 7168 + c))", (), "BP102", 299_593),
        ("page = tl.load(t_ptr + pid)\n    x = tl.load(p_ptr + (page << 17) + lane)", (), "BP101|BP112", 16_384),
        ("expert = tl.load(e_ptr + pid)\n    x = tl.load(p_ptr + expert * stride + lane)", ("stride = 2**24",), "BP104", 128),
        (f"row = {ROW}\n    o = (row * stride).to(tl.int64)\n    x = tl.load(p_ptr + o)", ("stride = 4096",), "BP107", 524_288),
        (f"row = {ROW}.to(tl.int64)\n    o = (row * stride).to(tl.int32)\n    x = tl.load(p_ptr + o)", PAGE, "BP108", 2**19),
    ],
)  # fmt: skip
def test_walls_of_public_reports(tmp_path: Path, body: str, bounds: tuple[str, ...], rule: str, wall: int) -> None:
    text = (
        "@triton.jit\ndef f(p_ptr, t_ptr, slot_ptr, rows_ptr, e_ptr, o_ptr, stride, N: tl.constexpr):\n"
        f"    pid = tl.program_id(0)\n    lane = tl.arange(0, N)\n    {body}\n    tl.store(o_ptr + lane, x)\n"
    )
    found = only(audited(tmp_path, text, *bounds))
    assert found.rule in rule.split("|")
    assert found.wall is not None
    assert found.wall.value == wall


CLEAN = {
    "int32 offsets of a block pointer": """
        p = tl.make_block_ptr(x_ptr, (n, 64), (stride, 1), (pid * 64, 0), (64, 64), (1, 0))
        tl.store(y_ptr + lane, tl.load(p))
    """,
    "a tile times a stride": "tl.store(y_ptr + lane, tl.load(x_ptr + lane * stride))",
    "a remainder of a constexpr": "tl.store(y_ptr + lane, tl.load(x_ptr + (tl.load(i_ptr + pid) % N) * stride))",
    "a hash that reaches no address": """
        h = (tl.load(i_ptr + pid) * 2654435761) ^ 12345
        tl.store(y_ptr + lane, h)
    """,
    "a grid axis of 65,535 times a small tile": "tl.store(y_ptr + tl.program_id(1) * 64 + lane, 1.0)",
    "terms that cancel before they are widened": """
        a = tl.load(i_ptr + pid) * 901120
        tl.store(y_ptr + ((a + lane) - a), 1.0)
    """,
    "the offset of a row that is widened": """
        rows = (pid * 64 + tl.arange(0, 64)).to(tl.int64)
        mask = pid * 64 + tl.arange(0, 64) < n
        tl.store(y_ptr + rows * stride, 1.0, mask=mask)
    """,
    "a swizzle": """
        columns = tl.cdiv(n, 64)
        width = 8 * columns
        group = pid // width
        size = tl.minimum(tl.cdiv(stride, 64) - group * 8, 8)
        m = group * 8 + (pid % width) % size
        n0 = (pid % width) // size
        desc = tl.make_tensor_descriptor(x_ptr, [stride, n], [n, 1], [64, 64])
        desc.store([m * 64, n0 * 64], desc.load([m * 64, n0 * 64]))
    """,
}


@pytest.mark.parametrize("name", CLEAN)
def test_what_is_not_a_bug(tmp_path: Path, name: str) -> None:
    from textwrap import dedent, indent

    head = "@triton.jit\ndef f(x_ptr, y_ptr, i_ptr, stride, n, N: tl.constexpr):\n    pid = tl.program_id(0)\n"
    head += "    lane = tl.arange(0, N)\n"
    report = audited(tmp_path, head + indent(dedent(CLEAN[name]).strip(), "    ") + "\n")
    assert report.faults == []
    assert report.skipped_kernels == []


def test_the_base_of_a_block_pointer_can_be_one(tmp_path: Path) -> None:
    body = """
        @triton.jit
        def f(x_ptr, y_ptr, stride_b, n):
            p = tl.make_block_ptr(x_ptr + tl.program_id(0) * stride_b, (n, 64), (64, 1), (0, 0), (64, 64), (1, 0))
            tl.store(y_ptr + tl.arange(0, 64), tl.load(p))
    """
    assert only(audited(tmp_path, body)).rule == "BP103"


def test_a_loop_carried_offset(tmp_path: Path) -> None:
    body = """
        @triton.jit
        def f(x_ptr, y_ptr, n, stride):
            offset = 0
            for i in range(n):
                tl.store(y_ptr + tl.arange(0, 64), tl.load(x_ptr + offset + tl.arange(0, 64)))
                offset += stride
    """
    found = only(audited(tmp_path, body))
    assert text_of(found, tmp_path) == "offset += stride"
    # The same as a pointer: each turn is added in 64 bits.
    assert (
        audited(
            tmp_path, body.replace("offset = 0", "p = x_ptr").replace("x_ptr + offset", "p").replace("offset +=", "p +=")
        ).faults
        == []
    )


def test_helpers_are_followed_across_files(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text(HEADER + "@triton.jit\ndef where(base, i, stride):\n    return base + i * stride\n")
    body = """
        from .helpers import where

        @triton.jit
        def f(x_ptr, t_ptr, y_ptr, stride):
            page = tl.load(t_ptr + tl.program_id(0))
            tl.store(y_ptr + tl.arange(0, 64), tl.load(where(x_ptr, page, stride)))
    """
    report = audited(tmp_path, body)
    found = only(report)
    assert Path(found.primary.span.file).name == "helpers.py"
    assert [label.text for label in found.secondary] == ["int32 from here, if the tensor holds int32", "called here"]
    assert report.kernels == 1


GATE = """
    @triton.jit
    def f(x_ptr, y_ptr, i_ptr, stride, WIDE: tl.constexpr):
        row = tl.load(i_ptr + tl.program_id(0))
        if WIDE:
            {wide}
        else:
            offset = row * stride
        tl.store(y_ptr + tl.arange(0, 64), tl.load(x_ptr + offset))
"""


def test_a_gate_whose_wide_branch_is_narrow(tmp_path: Path) -> None:
    assert only(audited(tmp_path, GATE.format(wide="offset = (row * stride).to(tl.int64)"))).rule == "BP111"


def test_the_narrow_branch_of_a_right_gate_is_a_note(tmp_path: Path) -> None:
    report = audited(tmp_path, GATE.format(wide="offset = row.to(tl.int64) * stride"))
    assert report.faults == []
    assert [finding.notes[-1] for finding in report.notes] == [
        "only in the narrow branch of a constexpr gate: trusted to be guarded on the host"
    ]


def test_a_mask_of_products_is_found(tmp_path: Path) -> None:
    body = """
        @triton.jit
        def f(x_ptr, lens_ptr, width):
            lane = tl.arange(0, 64)
            length = tl.load(lens_ptr + tl.program_id(0))
            tl.store(x_ptr + lane, 1.0, mask=lane < length * width)
    """
    found = only(audited(tmp_path, body, "width = 8192"))
    assert (found.rule, found.wall and found.wall.value) == ("BP109", 262_144)
    assert found.message == "32-bit mask length * width may not fit"


def test_memory_that_no_card_has_makes_a_note(tmp_path: Path) -> None:
    assert audited(tmp_path, PAGES.format(cast=""), max_memory=2**31).faults == []
    assert len(audited(tmp_path, PAGES.format(cast=""), max_memory=2**32).faults) == 1


def test_what_is_not_understood_is_said(tmp_path: Path) -> None:
    body = """
        from elsewhere import offsets_of

        @triton.jit
        def f(x_ptr, y_ptr):
            tl.store(y_ptr + tl.arange(0, 64), tl.load(x_ptr + offsets_of(tl.program_id(0))))
    """
    report = audited(tmp_path, body)
    assert report.faults == []
    assert [finding.message for finding in report.notes] == [
        "address that the auditor cannot follow: a call of elsewhere.offsets_of"
    ]


@pytest.mark.parametrize(
    ("imports", "mark"),
    [
        ("import triton as t\nimport triton.language as tl", "@t.jit"),
        ("from triton import jit, language as tl", "@jit"),
        ("import triton\nimport triton.language as tl", "@triton.autotune(configs=[], key=[])\n@triton.jit"),
        ("import triton\nimport triton.language as tl", "@triton.heuristics({})\n@triton.jit(do_not_specialize=['n'])"),
        ("from triton.experimental import gluon\nimport triton.language as tl", "@gluon.jit"),
        ("from project.compat import tl, triton", "@triton.jit"),
        ("import triton.language as tl\nfrom project.jit import triton_jit", "@triton_jit"),
    ],
)
def test_kernels_are_found_behind_any_decorator(tmp_path: Path, imports: str, mark: str) -> None:
    path = tmp_path / "k.py"
    path.write_text(f"{imports}\n\n{mark}\ndef f(x_ptr, stride):\n    tl.store(x_ptr + tl.program_id(0) * stride, 1.0)\n")
    report = audit([path])
    assert report.kernels == 1
    assert only(report).rule == "BP103"


@pytest.mark.parametrize("mark", ["@torch.jit.script", "@jax.jit", "@numba.njit"])
def test_other_peoples_jits_are_not_kernels(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "k.py"
    module = mark[1:].partition(".")[0]
    path.write_text(f"import triton\nimport {module}\n\n{mark}\ndef f(x, stride):\n    return x * stride\n")
    assert audit([path]).kernels == 0


def test_a_gate_by_type_is_trusted_and_named(tmp_path: Path) -> None:
    body = """
        @triton.jit
        def f(x_ptr, stride, INDEX: tl.constexpr):
            tl.store(x_ptr + tl.program_id(0).to(INDEX) * stride, 1.0)
    """
    report = audited(tmp_path, body)
    assert (report.faults, report.trusted) == ([], {"f: INDEX"})
    # It has to come before the product.
    assert only(audited(tmp_path, body.replace("tl.program_id(0).to(INDEX) * stride", "(tl.program_id(0) * stride).to(INDEX)")))


@pytest.mark.parametrize(
    "index",
    [
        "row.to(tl.int64) * stride",
        'row.to("int64") * stride',
        "tl.cast(row, tl.int64) * stride",
        "tl.int64(row) * stride",
        "tl.full((), 1, tl.int64) * row * stride",
        "(tl.zeros([64], dtype=tl.int64) + row) * stride",
        "row * wide",
        "tl.load(t_ptr) * stride",
        "row.to(tl.uint64) * stride",
        "(row if N > 4 else 0).to(tl.int64) * stride",
    ],
)
def test_every_spelling_of_64_bits(tmp_path: Path, index: str) -> None:
    head = "@triton.jit\ndef f(x_ptr, stride, wide: tl.int64, t_ptr: tl.pointer_type(tl.int64), N: tl.constexpr):\n"
    report = audited(tmp_path, f"{head}    row = tl.program_id(0)\n    tl.store(x_ptr + {index}, 1.0)\n")
    assert report.faults == []
    assert audited(tmp_path, f"{head}    row = tl.program_id(0)\n    tl.store(x_ptr + row * stride, 1.0)\n").faults != []


def test_an_optional_triton_is_no_reason_for_silence(tmp_path: Path) -> None:
    # A placeholder under the same name once made every kernel of a large project clean.
    (tmp_path / "compat.py").write_text(
        "try:\n    import triton\n    import triton.language as tl\nexcept ImportError:\n    triton = Fake()\n    tl = None\n"
    )
    path = tmp_path / "k.py"
    path.write_text(
        "from .compat import tl, triton\n\n@triton.jit\ndef f(x_ptr, n):\n    tl.store(x_ptr + tl.program_id(0) * n, 1.0)\n"
    )
    assert only(audit([path])).rule == "BP103"


def test_a_cast_to_a_type_that_a_project_hands_on_is_a_cast(tmp_path: Path) -> None:
    path = tmp_path / "k.py"
    path.write_text(
        "from project.compat import tl, triton\n\n@triton.jit\ndef f(x_ptr, n):\n"
        "    tl.store(x_ptr + tl.program_id(0).to(tl.int64) * n, 1.0)\n"
    )
    assert audit([path]).faults == []


def test_a_kernel_of_which_nothing_was_recognised_is_skipped_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "k.py"
    path.write_text("import triton\n\n@triton.jit\ndef f(x_ptr):\n    for made in where:\n        made[0](8).atomic_add(x_ptr)\n")
    report = audit([path])
    assert [why for _, why in report.skipped_kernels] == ["none of its loads and stores was recognised"]


def test_a_store_to_what_is_not_known_is_a_note(tmp_path: Path) -> None:
    path = tmp_path / "k.py"
    path.write_text("import triton\n\n@triton.jit\ndef f(x_ptr):\n    where.made(8).store(x_ptr)\n")
    (note,) = audit([path]).notes
    text = "address that the auditor cannot follow: a store of what comes from a call of made"
    assert (note.rule, note.message) == ("BP191", text)
