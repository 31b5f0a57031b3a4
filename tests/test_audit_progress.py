"""What a sweep says while it runs, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from audit_texts import write
from bigpool.audit import audit
from bigpool.cli import main
from bigpool.cli.audit import _Progress

KERNEL = """
    @triton.jit
    def f{number}(x_ptr, stride):
        row = tl.program_id(0).to(tl.int64)
        tl.store(x_ptr + row * stride, 1.0)
"""


def test_files_and_kernels_are_counted_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    progress = _Progress(launched=False)
    for done in range(1, 402):
        progress(done, 0)
    for done in range(1, 202):
        progress(done, 201)
    said = capsys.readouterr()
    assert said.out == ""
    parts = [part.strip() for part in said.err.rstrip("\n").split("\r")[1:]]
    counted = [f"{done} of 201 kernels" for done in (50, 100, 150, 200, 201)]
    assert parts == ["200 files read", "400 files read", *counted]
    assert said.err.endswith("\n")


def test_few_kernels_need_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    progress = _Progress(launched=False)
    for done in range(1, 100):
        progress(done, 99)
    progress(0, 0)
    assert capsys.readouterr().err == ""


def test_nothing_is_said_to_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(210):
        write(tmp_path, KERNEL.format(number=number), f"k{number}.py")
    assert main(["audit", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "210 kernels in 210 files audited" in said.out


def test_a_folder_without_python_files_could_not_be_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path)]) == 2
    assert f"file skipped: {tmp_path}: no Python file in it" in capsys.readouterr().out
    file = write(tmp_path, KERNEL.format(number=0))
    for paths in ([tmp_path], [file, tmp_path], [tmp_path, tmp_path]):
        assert audit(paths).skipped_files == []


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of POSIX")
def test_an_interrupted_sweep_says_so_on_a_line_of_its_own(tmp_path: Path) -> None:
    import pty

    for number in range(3000):
        write(tmp_path, KERNEL.format(number=number), f"k{number}.py")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "bigpool", "audit", str(tmp_path)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, start_new_session=True)
    os.close(theirs)
    said = b""
    until = time.monotonic() + 60
    while b"of 3,000 kernels" not in said and time.monotonic() < until:
        said += os.read(ours, 4096)
    job.send_signal(signal.SIGINT)
    out, _ = job.communicate(timeout=60)
    try:
        while part := os.read(ours, 4096):
            said += part
    except OSError:
        pass
    os.close(ours)
    assert (job.returncode, out) == (130, b"")
    assert b"\n\x1b[31m\x1b[1merror: \x1b[0minterrupted" in said.rpartition(b"kernels")[2]
