"""`bigpool sweep` and `bigpool audit --confirm` on the example: reports, records, files, exit statuses, interruption."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import bigpool
from bigpool.cli import main
from bigpool.cli.sweep import _warn_of_options_behind

EXAMPLE = Path(__file__).parents[1] / "examples" / "naive_gather"
SOURCE = str(Path(bigpool.__file__).parents[1])


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The example with the bug, and its launch, in a folder of their own."""
    folder = tmp_path / "gather"
    folder.mkdir()
    for name in ("naive_gather.py", "run_gather.py"):
        shutil.copy(EXAMPLE / name, folder)
    return folder


def run(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": SOURCE, "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": "", **more}
    command = [sys.executable, "-m", "bigpool", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=300)


def test_the_example_is_swept(copy: Path) -> None:
    before = (copy / "naive_gather.py").read_bytes()
    done = run("sweep", "--repeats", "8", "--json", "s.json", "--markdown", "s.md", "run_gather.py", cwd=copy)
    assert done.returncode == 1, done.stderr
    assert (copy / "naive_gather.py").read_bytes() == before
    lines = done.stdout.splitlines()
    assert lines[0] == "run_gather.py: 2 faults: 2 confirmed"
    assert "  wall: page_idx 2,097,152 at stride_cache_page = 1,024 (a fp16 tensor of 4.00 GiB)" in lines
    assert (
        "  confirmed: right with page_idx at 2,097,151; with page_idx at 2,097,152: at the wall, nothing around it: "
        "died (SIGSEGV at naive_gather.py:22)" in lines
    )
    assert "  fix: top equals bottom: page_idx at 2,097,152 and at 8,388,611 gives the bits of the captured launch" in lines
    assert "+    page_idx = tl.load(block_table_ptr + row).to(tl.int64)" in lines
    assert "--- naive_gather.py" in lines
    cost = next(line for line in lines if line.startswith("cost of the fix in gather_kernel: "))
    assert cost.endswith("; a time of Triton's interpreter, which says nothing about a GPU")
    assert "\x1b" not in done.stdout
    assert "confirming 1 of 2: BP101 at naive_gather.py:22" in done.stderr.splitlines()
    _check_record(json.loads((copy / "s.json").read_text()), str(copy))
    document = (copy / "s.md").read_text()
    assert document.startswith("# Sweep of `run_gather.py`\n\n2 faults: 2 confirmed.\n")
    assert "```diff\n--- naive_gather.py\n" in document


def _check_record(record: dict[str, Any], folder: str) -> None:
    assert record["schema"] == "bigpool-sweep/1"
    assert record["status"] == 1
    ids = [one["fingerprint"] for one in record["audit"]["findings"]]
    assert [one["id"] for one in record["confirmations"]] == ids
    assert [one["id"] for one in record["proofs"]] == ids
    assert [one["proven"] for one in record["proofs"]] == [True, True]
    assert {run["outcome"] for one in record["proofs"] for run in one["runs"]} == {"same bits"}
    assert [(price["kernel"], price["interpreted"]) for price in record["prices"]] == [("gather_kernel", True)]
    assert record["prices"][0]["verdict"]["rounds"] == 8
    assert folder not in json.dumps(record)


def test_write_puts_the_proven_fix_into_the_file(copy: Path) -> None:
    done = run("sweep", "--write", "--repeats", "8", "run_gather.py", cwd=copy)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "written: naive_gather.py"
    text = (copy / "naive_gather.py").read_text()
    assert "    page_idx = tl.load(block_table_ptr + row).to(tl.int64)\n" in text
    again = run("sweep", "run_gather.py", cwd=copy)
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[0] == "run_gather.py: no 32-bit index that can wrap was found in what it launched"


def test_audit_confirms_in_text_and_json(copy: Path) -> None:
    done = run("audit", "--confirm", "--format", "json", "--run", "run_gather.py", cwd=copy)
    assert done.returncode == 1, done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert [one["confirmation"]["id"] for one in findings] == [one["fingerprint"] for one in findings]
    assert {one["confirmation"]["outcome"] for one in findings} == {"confirmed"}
    done = run("audit", "--confirm", "--run", "run_gather.py", cwd=copy)
    assert done.returncode == 1
    notes = [line for line in done.stdout.splitlines() if " = note: confirmed (" in line]
    assert len(notes) == 2
    assert f"({findings[0]['fingerprint']}, interpreter): right with page_idx at 2,097,151; " in notes[0]


def _text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    return capsys.readouterr().err


def test_errors_in_full(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "none.py")
    environment = dict(os.environ)
    assert _text(capsys, "sweep", missing) == (
        f"error: bigpool sweep: SCRIPT: expected a file, got {missing!r}; pass -m to run a module\n"
    )
    assert _text(capsys, "sweep", "--repeats", "3", missing) == (
        "error: bigpool sweep: --repeats: expected at least 8, got 3; 100 is the default\n"
    )
    assert _text(capsys, "audit", "--confirm", missing) == (
        "error: bigpool audit: --confirm: expected --run with it, got none; add --run SCRIPT, or leave it out\n"
    )
    assert _text(capsys, "audit", "--confirm", "--write-baseline", "b.json", "--run", missing) == (
        "error: bigpool audit: --confirm: expected no --write-baseline with it, got both; a baseline needs no confirmation\n"
    )
    # A process that triton is loaded in later must not find itself in the interpreter.
    assert dict(os.environ) == environment


def test_a_script_that_launches_nothing(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("raise SystemExit(3)\n")
    done = run("sweep", "idle.py", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: bigpool sweep: no Triton kernel was launched (the script stopped early: it ended with status 3); "
        "run a script that launches one"
    )


def test_an_interrupt_leaves_no_process_and_no_file(copy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    env = {**os.environ, "PYTHONPATH": SOURCE, "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "bigpool", "sweep", "run_gather.py"]
    with subprocess.Popen(command, cwd=copy, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if line.startswith("confirming 2 of 2"):
                break
        assert any(folder.iterdir())
        os.kill(running.pid, signal.SIGINT)
        said = running.stderr.read()
        assert running.wait(60) == 130
    assert said.splitlines()[-1] == "error: interrupted"
    assert _settled(folder) == []


def _settled(folder: Path) -> list[str]:
    """What is left in the folder, and of the processes that had it as theirs, once there was time to go."""
    for _ in range(50):
        left = [str(path) for path in folder.iterdir()] + _processes(str(folder))
        if not left:
            return []
        time.sleep(0.1)
    return left


def _processes(word: str) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            if word.encode() in file.read_bytes():
                found.append(file.parent.name)
        except OSError:
            continue
    return found


def test_an_option_behind_the_script_is_the_script_s(capsys: pytest.CaptureFixture[str]) -> None:
    _warn_of_options_behind("bench.py", ("--pages", "100", "--json", "x.json", "--markdown=y"))
    note = "note: --json, --markdown=y after bench.py went to the script; options of bigpool sweep come before it\n"
    assert capsys.readouterr().err == note
    _warn_of_options_behind("bench.py", ("--pages", "100"))
    assert capsys.readouterr().err == ""
