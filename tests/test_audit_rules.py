"""Rules and their pages are one text; the command line prints them."""

from __future__ import annotations

from pathlib import Path

import pytest

from audit_texts import write
from bigpool.audit.rules import RULES
from bigpool.cli import main

PAGES = Path(__file__).parent.parent / "docs" / "rules"
BODY = """
    @triton.jit
    def f(x_ptr, block_table_ptr, stride_page):
        page = tl.load(block_table_ptr + tl.program_id(1))
        tl.store(x_ptr + page * stride_page, 1.0)
"""


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_page_is_the_text_of_the_rule(rule: object) -> None:
    from bigpool.audit.rules import Rule

    assert isinstance(rule, Rule)
    assert (PAGES / f"{rule.id}.md").read_text("utf-8") == rule.page
    assert rule.id.lower() in {path.stem for path in Path(str(__import__("bigpool").__file__)).parent.glob("audit/rules/bp*.py")}


def test_no_page_is_left_over() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == set(RULES)


def test_rule_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rule", "bp101"]) == 0
    assert capsys.readouterr().out == RULES["BP101"].page
    assert main(["rule"]) == 0
    assert capsys.readouterr().out.startswith("BP101  table id times a stride\n")


def test_rule_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rule", "BP999"]) == 2
    assert "RULE: expected one of BP101, " in capsys.readouterr().err


def test_audit_exits_with_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, BODY)
    assert main(["audit", str(path)]) == 1
    assert "error[BP101]" in capsys.readouterr().out
    assert main(["audit", str(path), "--assume", "page < 2**10", "--assume", "stride_page < 2**20"]) == 0
    assert main(["audit", str(path), "--max-memory", "2GiB"]) == 0
    assert main(["audit", str(tmp_path / "missing")]) == 2
    assert main(["audit"]) == 2
    assert "PATH: expected a file or a folder, got nothing; such as bigpool audit src/" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--format", "xml"], "--format: expected one of full, concise, json, sarif, github, got 'xml'; full is for people"),
        (["--max-memory", "lots"], "--max-memory: expected bytes or a size like 288GiB, got 'lots'; pass 288GiB"),
    ],
)
def test_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], text: str) -> None:
    assert main(["audit", str(tmp_path), *args]) == 2
    assert text in capsys.readouterr().err


def test_fix_writes_and_diff_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, BODY)
    before = path.read_text("utf-8")
    assert main(["audit", str(path), "--fix", "--diff"]) == 1
    assert "+    page = tl.load(block_table_ptr + tl.program_id(1)).to(tl.int64)\n" in capsys.readouterr().out
    assert path.read_text("utf-8") == before
    assert main(["audit", str(path), "--fix"]) == 0
    assert "fixed 1 of 1 findings in 1 files" in capsys.readouterr().err
    assert ".to(tl.int64)" in path.read_text("utf-8")


def test_a_written_baseline_is_read_again(tmp_path: Path) -> None:
    path, known = write(tmp_path, BODY), tmp_path / "baseline.json"
    assert main(["audit", str(path), "--write-baseline", str(known)]) == 0
    assert main(["audit", str(path), "--baseline", str(known)]) == 0
    assert main(["audit", str(path)]) == 1


def test_the_audit_loads_neither_torch_nor_triton() -> None:
    import subprocess
    import sys

    code = (
        "import sys, bigpool.audit.fix, bigpool.audit.report; sys.exit(not {'torch', 'triton', 'numpy'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
