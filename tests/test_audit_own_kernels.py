"""bigpool's own kernels: no finding, no suppression, and every single widening is missed when it is taken away."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import bigpool
from bigpool.audit import Finding, Options, Report, audit
from bigpool.cli import main
from bigpool.proof.narrow import list_widenings, narrow

KERNELS = Path(bigpool.__file__).parent / "kernels"
MUTANTS = [
    (path.name, place) for path in sorted(KERNELS.glob("*.py")) for place in range(len(list_widenings(path.read_text("utf-8"))))
]
# What is not found, in any kernel: a sum in 32 bits, such as that of all lengths, that becomes a 64-bit row afterwards.
MISSED = {("prefill_sm90.py", "keys = gl.load(seq_lens_ptr + other, mask=mask, other=0).to(gl.int64)")}


@cache
def clean(*files: Path) -> Report:
    return audit(files or [KERNELS])


@cache
def users_of(stem: str) -> frozenset[Path]:
    """A file of kernels, and those that import from it, also by way of others."""
    found = {KERNELS / f"{stem}.py"}
    for path in KERNELS.glob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        if any(isinstance(node, ast.ImportFrom) and node.level == 1 and node.module == stem for node in nodes):
            found |= users_of(path.stem)
    return frozenset(found)


def test_own_kernels_are_clean() -> None:
    report = clean()
    assert report.faults == []
    assert report.kernels >= 2
    assert (report.suppressed, report.baselined, report.skipped_files, report.skipped_kernels) == (0, 0, [], [])
    assert "bigpool: ignore" not in "".join(path.read_text("utf-8") for path in KERNELS.glob("*.py"))


def test_what_is_assumed_about_them_is_what_the_launcher_guarantees() -> None:
    assert {text.partition(" (")[0] for text in clean().assumed} == {
        "slot_mapping_ptr : int64",
        "split * stride_dest_split < 2**31",
        "split * stride_part_split < 2**31",
    }


def test_without_the_assumptions_there_are_findings() -> None:
    path = KERNELS / "verify.py"
    bare = "".join(line for line in path.read_text("utf-8").splitlines(keepends=True) if "bigpool: assume" not in line)
    report = audit([KERNELS], Options(overlay={path.resolve(): bare.encode()}))
    assert {finding.wall.formula for finding in report.faults if finding.wall is not None} == {
        "split * stride_dest_split",
        "split * stride_part_split",
    }


def test_the_command_that_ci_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(KERNELS)]) == 0
    assert "0 errors, 0 warnings" in capsys.readouterr().out


def test_there_is_something_to_take_away() -> None:
    assert len(MUTANTS) >= 6


@pytest.mark.parametrize(("name", "place"), MUTANTS)
def test_a_missing_widening_is_found(name: str, place: int) -> None:
    path = KERNELS / name
    source = path.read_text("utf-8")
    mutant = narrow(source, only=place)
    files = sorted(users_of(path.stem))
    report = audit(files, Options(overlay={path.resolve(): mutant.encode()}))
    # Where only a sum of 2^31 rows is out of range, it is a note: no memory holds as many.
    found = report.faults or {_place(note) for note in report.notes} - {_place(note) for note in clean(*files).notes}
    line = source.splitlines()[list_widenings(source)[place].line - 1].strip()
    assert bool(found) != ((name, line) in MISSED)


def _place(finding: Finding) -> tuple[str, str, int]:
    return finding.rule, finding.primary.span.file, finding.primary.span.line
