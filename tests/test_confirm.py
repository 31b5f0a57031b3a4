"""Confirmation: each way a fault shows, a finding that is refuted, and what cannot be reproduced, with the full text."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import bigpool
import confirm_kernels as zoo
from bigpool.audit.finding import Confidence, Finding, Label, Severity, Span, Wall
from bigpool.audit.run import Options, Report
from bigpool.confirm import record
from bigpool.confirm.confirm import Confirmer
from bigpool.confirm.outcome import COULD_NOT, Confirmation, Run, judge
from bigpool.confirm.record import Recorder

FILE = Path(zoo.__file__).resolve()
LINES = FILE.read_text("utf-8").splitlines()


@pytest.fixture(scope="module")
def confirmer() -> Iterator[Confirmer]:
    with Confirmer() as made:
        yield made


def line_of(text: str) -> int:
    return next(at for at, line in enumerate(LINES, 1) if text in line)


def confirmed(confirmer: Confirmer, found: Recorder, line: str) -> Confirmation:
    """Of the one finding on the line."""
    report = found.report(Options())
    assert report.skipped_kernels == []
    chosen = [finding for finding in report.findings if finding.severity and finding.primary.span.line == line_of(line)]
    assert len(chosen) == 1
    report.findings = chosen
    (made,) = confirmer.confirm(report, found)
    assert made.id == report.fingerprint(chosen[0])
    return made


def outcomes(made: Confirmation) -> dict[tuple[str, str], str]:
    return {(run.place, run.guard): run.outcome for run in made.runs}


GOOD = {(place, guard): "same bits" for place in ("bottom", "below") for guard in ("unmapped", "mapped")}


def test_a_wild_read_dies_and_is_nan(confirmer: Confirmer) -> None:
    found = zoo.recorded(zoo.read_pages, (3,), torch.zeros(3, 64), torch.randn(4, 1024), zoo.table(2, 0, 3), 1024, BLOCK=64)
    made = confirmed(confirmer, found, "tl.load(pool_ptr + page * stride_page + offs))")
    assert made.outcome == "confirmed"
    assert (made.variable, made.below, made.at, made.top) == ("page", 2_097_151, 2_097_152, 8_388_611)
    line = line_of("tl.load(pool_ptr + page * stride_page + offs))")
    assert made.text == (
        "right with page at 2,097,151; with page at 2,097,152: at the wall, nothing around it: "
        f"died (SIGSEGV at confirm_kernels.py:{line})"
    )
    assert outcomes(made) == {
        **GOOD,
        ("at", "unmapped"): "killed",
        ("at", "mapped"): "nan",
        ("top", "unmapped"): "killed",
        ("top", "mapped"): "nan",
    }


def test_two_views_of_one_buffer_move_together(confirmer: Confirmer) -> None:
    pages = torch.randn(4, 2, 1024)
    found = zoo.recorded(
        zoo.add_two_pools, (3,), torch.zeros(3, 64), pages[:, 0], pages[:, 1], zoo.table(2, 0, 3), 2048, BLOCK=64
    )
    (snapshot,) = found.snapshots.values()
    assert sorted(snapshot.spaces) == ["k_ptr", "out_ptr", "table_ptr"]
    made = confirmed(confirmer, found, "offs = page * stride_page + tl.arange(0, BLOCK)")
    assert (made.outcome, made.below, made.at) == ("confirmed", 1_048_575, 1_048_576)
    assert GOOD.items() <= outcomes(made).items()


def test_what_is_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> list[str]:
        found = zoo.recorded(zoo.cancels, (1,), torch.zeros(4096), zoo.table(3), 1024, BLOCK=64)
        return [snapshot.missing for snapshot in found.snapshots.values()]

    assert missing() == [""]
    monkeypatch.setattr(record, "MAX_ALL_BYTES", 16_000)
    assert missing() == ["the launches before it hold 0 bytes of the 16,000 that are kept; run fewer"]
    monkeypatch.setattr(record, "MAX_KEPT_BYTES", 16_000)
    assert missing() == ["its tensors hold 16,388 bytes, more than 16,000 are kept; run the script with smaller ones"]


def test_a_stored_id_that_grew_is_no_difference(confirmer: Confirmer) -> None:
    told = torch.zeros(3, dtype=torch.int32)
    pool = torch.randn(4, 1024)
    found = zoo.recorded(zoo.read_and_tell, (3,), torch.zeros(3, 64), told, pool, zoo.table(2, 0, 3), 1016, BLOCK=64)
    finding = invented("page.to(tl.int64) * 8 + page * stride_page", "page * stride_page", "read_and_tell", "page")
    (made,) = confirmer.confirm(Report(findings=[finding]), found)
    assert made.outcome == "confirmed"
    assert (made.below, made.at) == (2_113_665, 2_113_666)
    assert GOOD.items() <= outcomes(made).items()


def test_a_wild_write_dies_and_breaks_a_canary_and_the_row_count_grows_with_it(confirmer: Confirmer) -> None:
    found = zoo.recorded(zoo.write_rows, (3,), torch.zeros(3, 2048), torch.randn(3, 64), 2048, 3, BLOCK=64)
    # The audit believes the bound; a grid and a row count that grow together get past it.
    finding = invented("tl.store(out_ptr + row * stride_row + offs, -x)", "row * stride_row", "write_rows", "row")
    (made,) = confirmer.confirm(Report(findings=[finding]), found)
    assert made.outcome == "confirmed"
    assert (made.variable, made.below, made.at, made.along) == ("row", 1_048_575, 1_048_576, ("n_rows",))
    assert outcomes(made)["at", "unmapped"] == "killed"
    assert outcomes(made)["at", "mapped"] == "canary"
    assert next(run for run in made.runs if run.outcome == "canary").text.startswith(
        "at the wall, canaries around it: wrote outside its tensors "
        "(out_ptr: guard: expected untouched memory outside the mapped pages, got "
    )


def test_a_wrapped_mask_gives_other_bits(confirmer: Confirmer) -> None:
    # No address is wrong: what must be written is not. The output holds the right answer beforehand, as after a warm-up.
    x = torch.ones(2, 64)
    found = zoo.recorded(zoo.masked_by_product, (2,), x.clone(), x, 100, 4096, BLOCK=64)
    made = confirmed(confirmer, found, "total = rows * columns")
    assert made.outcome == "confirmed"
    assert (made.variable, made.below, made.at) == ("rows", 524_287, 524_288)
    assert {outcome for place, outcome in outcomes(made).items() if place[0] == "at"} == {"nan"}
    integers = torch.ones(2, 64, dtype=torch.int32)
    found = zoo.recorded(zoo.masked_by_product, (2,), integers.clone(), integers, 100, 4096, BLOCK=64)
    made = confirmed(confirmer, found, "total = rows * columns")
    assert made.text == (
        "right with rows at 524,287; with rows at 524,288: at the wall, nothing around it: "
        "other bits (out_ptr: 128 values differ, the first is -1 in place of 1)"
    )


def test_two_faults_are_told_apart(confirmer: Confirmer) -> None:
    found = zoo.recorded(zoo.two_walls, (2,), torch.zeros(2, 4096), torch.randn(2, 8192), 8192, 4096, BLOCK=64)
    first = confirmed(confirmer, found, "x = tl.load(in_ptr + row * stride_in + offs)")
    assert (first.outcome, first.at, first.shadowed) == ("confirmed", 262_144, "")
    second = confirmed(confirmer, found, "tl.store(out_ptr + row * stride_out + offs, x)")
    assert (second.outcome, second.below, second.at) == ("confirmed", 524_287, 524_288)
    read, written = line_of("x = tl.load(in_ptr + row * stride_in"), line_of("tl.store(out_ptr + row * stride_out + offs, x)")
    assert second.text == (
        "right with row at 524,287; with row at 524,288: at the wall, nothing around it: "
        f"died (SIGSEGV at confirm_kernels.py:{written}); every other operation was held in 64 bits, since another one fails "
        f"first (just below the wall, nothing around it: died (SIGSEGV at confirm_kernels.py:{read}))"
    )


COMPILED = """
import torch, confirm_kernels as zoo
from bigpool.audit.launch.compile import ttir
from bigpool.confirm.exact import Setting
from bigpool.confirm.patch import first_programs
found = zoo.recorded(zoo.two_walls, (2,), torch.zeros(2, 4096), torch.randn(2, 8192), 8192, 4096, BLOCK=64)
(launch,) = found.launches.values()
plain = ttir(launch.function, launch.specialisation)
with first_programs(Setting(first=(12_345, 0, 0))):
    moved = ttir(launch.function, launch.specialisation)
again = ttir(launch.function, launch.specialisation)
print("12345 : i32" in moved, "12345" in plain, again == plain)
"""


def test_a_compiled_kernel_counts_programs_from_the_first() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(FILE.parent), str(Path(bigpool.__file__).parents[1])])
    done = subprocess.run([sys.executable, "-c", COMPILED], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "True False True\n", done.stderr


def invented(line: str, operation: str, kernel: str, variable: str) -> Finding:
    at, text = line_of(line), LINES[line_of(line) - 1]
    col = text.index(operation) + 1
    span = Span(str(FILE), at, col, at, col + len(operation))
    wall = Wall(variable, 2_097_152, (), f"{variable} * stride_row", 2**31 - 1, 2**32)
    return Finding("BP102", Severity.ERROR, Confidence.HIGH, kernel, "made up", Label(span, "here"), wall=wall)


def test_what_cancels_is_refuted(confirmer: Confirmer) -> None:
    found = zoo.recorded(zoo.cancels, (1,), torch.zeros(4096), zoo.table(3), 1024, BLOCK=64)
    report = Report(findings=[invented("far = row * stride_row", "row * stride_row", "cancels", "row")])
    (made,) = confirmer.confirm(report, found)
    assert made.outcome == "refuted"
    assert made.text == ("the auditor was wrong: row at 2,097,152 and at 8,388,611 gives the same bits as 2,097,151")
    assert set(outcomes(made).values()) == {"same bits"}
    assert len(made.runs) == 8


def test_a_kernel_without_the_fault_is_not_confirmed(confirmer: Confirmer) -> None:
    # The product that the finding speaks of is 64 bits wide.
    found = zoo.recorded(zoo.write_rows, (3,), torch.zeros(3, 2048), torch.randn(3, 64), 2048, 3, BLOCK=64)
    finding = invented("x = tl.load(in_ptr + row.to(tl.int64) * BLOCK + offs)", "row.to(tl.int64) * BLOCK", "write_rows", "row")
    (made,) = confirmer.confirm(Report(findings=[finding]), found)
    assert made.outcome == COULD_NOT
    assert made.text == (
        "the interpreter sees no 32-bit integer operation on the finding's line in this launch "
        "(a branch that is not taken, or a loop variable, which it holds in 64 bits)"
    )


def launched(name: str) -> tuple[Recorder, str]:
    """A launch that cannot be reproduced, and the line of its finding."""
    ids = zoo.table(3)
    if name == "meta":
        out = torch.zeros(3, 2048, device="meta")
        return zoo.recorded(zoo.add_one, (3,), out, 2048, BLOCK=64), "tl.store(in_ptr + row * stride_row + offs, x + 1.0)"
    if name == "outside":
        return zoo.recorded(
            zoo.beside, (1,), torch.zeros(64), ids, 1024, BLOCK=64
        ), "row * stride_row + tl.arange(0, BLOCK), 1.0)"
    out = torch.zeros(4096, dtype=torch.int32)
    return zoo.recorded(zoo.by_asm, (1,), out, ids, 1024, BLOCK=64), "tl.store(out_ptr + row * stride_row + offs, x)"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("meta", "in_ptr is a meta tensor, which has no values; run the script with real ones"),
        ("outside", "as captured it reads or writes outside of its tensors, in line {}"),
    ],
)
def test_what_cannot_be_reproduced_says_why(confirmer: Confirmer, name: str, text: str) -> None:
    found, line = launched(name)
    made = confirmed(confirmer, found, line)
    assert made.outcome == COULD_NOT
    assert made.text == text.format(line_of(line))
    assert made.runs == []


def test_what_the_interpreter_cannot_run_says_so(confirmer: Confirmer) -> None:
    found, line = launched("asm")
    made = confirmed(confirmer, found, line)
    assert made.outcome == COULD_NOT
    assert made.text.startswith("the interpreter cannot run it: InterpreterError: ")
    assert "inline_asm not supported in interpreter mode" in made.text


def test_no_launch_no_wall_no_name(confirmer: Confirmer) -> None:
    finding = invented("far = row * stride_row", "row * stride_row", "cancels", "row")
    assert confirmer.one("id", finding, []).text == "no launch of cancels was captured"
    found = zoo.recorded(zoo.cancels, (1,), torch.zeros(4096), zoo.table(3), 1024, BLOCK=64)
    (snapshot,) = found.snapshots.values()
    assert confirmer.one("id", replace(finding, wall=None), [snapshot]).text == (
        "the finding has no wall: it is about a type or a comment, not about a size"
    )
    hidden = replace(snapshot, name="test.<locals>.kernel")
    assert confirmer.one("id", finding, [hidden]).text == (
        "kernel: expected one that its module can name, got test.<locals>.kernel; define it outside of functions"
    )
    lost = replace(snapshot, name="gone")
    assert confirmer.one("id", finding, [lost]).text == (
        "kernel: expected gone in confirm_kernels.py, got no jitted function of that name"
    )


def runs(**said: str) -> list[Run]:
    """A run for each place; "same bits" unless `said`."""
    return [Run(place, "unmapped", said.get(place, "same bits"), "x") for place in ("bottom", "below", "at", "top")]


WRONG_BEFORE = "it is wrong before it reaches its wall: just below the wall, nothing around it: died (x)"
AT, TOP = "at the wall, nothing around it", "far above the wall, nothing around it"


@pytest.mark.parametrize(
    ("said", "outcome", "text"),
    [
        ({"below": "killed"}, COULD_NOT, WRONG_BEFORE),
        ({"at": "unable"}, COULD_NOT, f"{AT}: unable (x)"),
        ({"bottom": "unable", "at": "nan"}, COULD_NOT, "as captured, nothing around it: unable (x)"),
        ({"top": "unequal"}, "confirmed", f"right with page at 9; with page at 40: {TOP}: other bits (x)"),
        ({"at": "nan"}, "confirmed", f"right with page at 9; with page at 10: {AT}: NaN (x); the auditor says 8, of any launch"),
    ],
)
def test_the_judge(said: dict[str, str], outcome: str, text: str) -> None:
    made = judge(Confirmation("id", "", "", "page", 9, 10, 40, runs=runs(**said)), 8 if "at" in said else None)
    assert (made.outcome, made.text) == (outcome, text)


def interrupted(folder: Path) -> int:
    """The process group of a server that was made in `folder` and interrupted."""
    with contextlib.suppress(KeyboardInterrupt), Confirmer() as made:
        server: Any = made.host._server
        assert list(folder.iterdir()) != []
        raise KeyboardInterrupt
    return int(server.pid)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    group = interrupted(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)
