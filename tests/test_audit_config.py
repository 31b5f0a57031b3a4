"""Constexprs that hold several values, functions that warps run, positions that a loop counts."""

from __future__ import annotations

from pathlib import Path

from audit_texts import audited, only, text_of

ROW = """
@triton.jit
def kernel(x_ptr, stride, SPEC: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if SPEC.longest:
        row = {}
    tl.store(x_ptr + row * stride + tl.arange(0, BLOCK), 0)
"""


def test_a_field_of_a_constexpr_decides_when_it_is_compiled(tmp_path: Path) -> None:
    found = only(audited(tmp_path, ROW.format("tl.program_id(0) * SPEC.longest + tl.program_id(1)")))
    assert (found.rule, text_of(found, tmp_path)) == ("BP103", "row * stride")


def test_a_field_of_a_constexpr_after_a_widened_index(tmp_path: Path) -> None:
    assert audited(tmp_path, ROW.format("tl.program_id(0).to(tl.int64) * SPEC.longest + tl.program_id(1)")).faults == []


def test_fields_of_fields_and_methods_of_a_constexpr(tmp_path: Path) -> None:
    report = audited(
        tmp_path,
        """
        @triton.jit
        def kernel(x_ptr, stride, CFG: tl.constexpr):
            row = tl.program_id(0) * CFG.shape_of.rows + CFG.tile.bit_length()
            tl.store(x_ptr + row * stride + tl.arange(0, CFG.tile), 0)
        """,
    )
    assert only(report).rule in ("BP103", "BP105")


def test_a_count_in_a_config_is_no_row(tmp_path: Path) -> None:
    body = """
        @triton.jit
        def kernel(x_ptr, table_ptr, CFG: tl.constexpr, COLUMNS: tl.constexpr):
            tl.store(x_ptr, tl.load(table_ptr + tl.program_id(0) * {}))
        """
    assert audited(tmp_path, body.format("CFG.pages_per_tile")).faults == []
    assert only(audited(tmp_path, body.format("COLUMNS"))).rule == "BP103"


WORKERS = """
@gluon.jit
def store_rows(x_ptr, row, stride, n):
    gl.store(x_ptr + row * stride, n)


@gluon.jit
def idle(n):
    pass


@gluon.jit
def kernel(x_ptr, stride, n):
    gl.warp_specialize([(store_rows, (x_ptr, {}, stride, n)), (idle, (n,))], [4], [24])
"""
HEAD = "from triton.experimental import gluon\nfrom triton.experimental.gluon import language as gl\n\n"


def test_functions_that_warps_run_get_their_arguments(tmp_path: Path) -> None:
    found = only(audited(tmp_path, HEAD + WORKERS.format("gl.program_id(0)")))
    assert (found.kernel, text_of(found, tmp_path)) == ("kernel", "row * stride")
    assert [label.text for label in found.secondary] == ["int32 from here", "called here"]


def test_a_wide_index_that_warps_get_is_right(tmp_path: Path) -> None:
    report = audited(tmp_path, HEAD + WORKERS.format("gl.program_id(0).to(gl.int64)"))
    assert (report.faults, report.kernels) == ([], 1)


def test_a_position_that_a_loop_counts_is_a_note_until_it_is_a_row(tmp_path: Path) -> None:
    body = """
        @triton.jit
        def kernel(x_ptr, table_ptr, len_ptr, stride, TILE: tl.constexpr):
            for j in range(tl.load(len_ptr)):
                page = tl.load(table_ptr + j * TILE // 16).to(tl.int64)
                tl.store(x_ptr + {}, 0)
        """
    assert audited(tmp_path, body.format("page * stride")).faults == []
    found = only(audited(tmp_path, body.format("(j * TILE) * stride")))
    assert (found.rule, text_of(found, tmp_path)) == ("BP105", "(j * TILE) * stride")


def test_a_share_of_the_grid_of_a_loaded_count(tmp_path: Path) -> None:
    body = """
        @triton.jit
        def kernel(x_ptr, len_ptr):
            share = tl.cdiv(tl.load(len_ptr + tl.program_id(1)), tl.num_programs({}))
            first = tl.program_id(0) * share
            for tile in range(first, first + share):
                tl.store(x_ptr + tile, 0)
        """
    assert [finding.rule for finding in audited(tmp_path, body.format(0)).faults] == []
    assert audited(tmp_path, body.format(2)).faults != []
