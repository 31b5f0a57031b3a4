"""Isolation: every way a child can end is an answer, and nothing outlives the session."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bigpool
import proof_jobs
from bigpool.errors import BackendError, ProofError
from bigpool.proof.isolate import Exit, Session, crash_line

JOBS = "proof_jobs"
DEADLY_LINE = proof_jobs.die_of_a_wild_read.__code__.co_firstlineno + 1


def light_session() -> Session:
    return Session(interpreted=True, preload=())


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with light_session() as opened:
        yield opened


def run(session: Session, kind: str, timeout: float = 60.0, **more: str) -> Exit:
    return session.run({"module": JOBS, "kind": kind, **more}, timeout=timeout)


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_an_answer_comes_back_from_another_process(session: Session) -> None:
    ended = session.run({"module": JOBS, "kind": "answer"}, env={"PROOF_TEST": "yes"})
    assert (ended.outcome, ended.detail, ended.where) == ("done", "", "")
    assert ended.result["pid"] != os.getpid()
    assert (ended.result["env"], ended.result["stdin"]) == ("yes", "")
    assert ended.result["path"] == (sys.path[0] or str(Path.cwd()))
    assert run(session, "answer").result["env"] == "", "the environment of one child leaked into the next"


def test_a_wild_read_is_a_killed_run_with_its_line(session: Session) -> None:
    session.submit({"module": JOBS, "kind": "segv"}, timeout=60.0, frames=[proof_jobs.__file__])
    (ended,) = until(session, 1)
    assert (ended.outcome, ended.detail, ended.where) == ("killed", "SIGSEGV", f"proof_jobs.py:{DEADLY_LINE}")
    assert ended.log.startswith("about to die\n")
    assert not list(Path.cwd().glob("core*"))


def until(session: Session, count: int) -> list[Exit]:
    ended: list[Exit] = []
    while len(ended) < count:
        ended += session.wait()
    return ended


@pytest.mark.parametrize(
    ("kind", "outcome", "detail"),
    [
        ("SIGBUS", "killed", "SIGBUS"),
        ("SIGABRT", "died", "SIGABRT, which is no memory fault"),
        (
            "SIGKILL",
            "died",
            "SIGKILL, which is no memory fault; the system kills a process this way when memory runs out",
        ),
        ("exit", "died", "the child ended with code 3 and no result"),
        ("raise", "died", "the child ended with code 70 and no result"),
        ("no such kind", "died", "the child ended with code 0 and no result"),
    ],
)
def test_only_memory_faults_count_as_killed(session: Session, kind: str, outcome: str, detail: str) -> None:
    ended = run(session, kind)
    assert (ended.outcome, ended.detail, ended.where) == (outcome, detail, "")
    assert ended.result == {}


def test_an_exception_leaves_its_traceback_in_the_log(session: Session) -> None:
    assert run(session, "raise").log.rstrip().endswith("ValueError: a text of its own")


def test_a_run_past_its_limit_is_ended(session: Session, tmp_path: Path) -> None:
    started = tmp_path / "started"
    ended = run(session, "sleep", timeout=0.3, started=str(started))
    assert (ended.outcome, ended.detail) == ("timeout", "no answer within 0.3 s")
    assert ended.seconds < 15, "it was waited for"
    assert eventually(lambda: not is_running(int(started.read_text())))


def test_runs_go_side_by_side(session: Session, tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    for file in files:
        session.submit({"module": JOBS, "kind": "sleep", "started": str(file)}, timeout=1.0)
    assert eventually(lambda: all(file.exists() for file in files))
    assert all(is_running(int(file.read_text())) for file in files)
    assert [ended.outcome for ended in until(session, 2)] == ["timeout", "timeout"]


def test_closing_leaves_neither_processes_nor_files(tmp_path: Path) -> None:
    started = tmp_path / "started"
    with light_session() as session:
        folder = session.folder
        session.submit({"module": JOBS, "kind": "sleep", "started": str(started)}, timeout=60.0)
        assert eventually(started.exists)
        child, server = int(started.read_text()), session._server.pid  # type: ignore[union-attr]
        assert folder.is_dir()
        assert is_running(child)
    assert not folder.exists()
    assert eventually(lambda: not is_running(child) and not is_running(server))


def test_when_the_parent_is_gone_the_server_cleans_up(tmp_path: Path) -> None:
    started = tmp_path / "started"
    with light_session() as session:
        session.submit({"module": JOBS, "kind": "sleep", "started": str(started)}, timeout=60.0)
        assert eventually(started.exists)
        server = session._server
        assert server is not None
        assert server.stdin is not None
        server.stdin.close()
        assert eventually(lambda: not is_running(int(started.read_text())) and not session.folder.exists())


def test_a_parent_that_dies_while_torch_loads_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_load.py").write_text(f"open({str(tmp_path / 'loading')!r}, 'w')\nimport time\ntime.sleep(0.5)")
    monkeypatch.syspath_prepend(tmp_path)
    with Session(interpreted=True, preload=("slow_to_load",)) as session:
        server = session._server
        assert server is not None
        assert eventually((tmp_path / "loading").exists)
        for pipe in (server.stdin, server.stdout):
            assert pipe is not None
            pipe.close()
        assert eventually(lambda: not session.folder.exists())
        assert eventually(lambda: server.poll() is not None)


def test_a_server_that_dies_is_an_error_and_no_hang(tmp_path: Path) -> None:
    started = tmp_path / "started"
    with light_session() as session:
        session.submit({"module": JOBS, "kind": "sleep", "started": str(started)}, timeout=60.0)
        assert eventually(started.exists)
        began = time.monotonic()
        os.kill(session._server.pid, signal.SIGKILL)  # type: ignore[union-attr]
        with pytest.raises(ProofError) as caught:
            until(session, 1)
    assert str(caught.value) == "the process that runs the cases ended by itself (out of memory?); it said: nothing"
    assert time.monotonic() - began < 15, "the child was waited for"
    assert eventually(lambda: not is_running(int(started.read_text())))


def test_what_cannot_be_loaded_is_named_with_a_remedy() -> None:
    with Session(interpreted=True, preload=("no_such_module",)) as session, pytest.raises(BackendError) as caught:
        session.run({"module": JOBS, "kind": "answer"})
    assert str(caught.value) == (
        "backend: expected torch and triton to be importable, got ModuleNotFoundError: No module named 'no_such_module'; "
        "pip install 'bigpool[kernels]' on a machine with an NVIDIA GPU, 'bigpool[cpu]' on any other"
    )


def test_a_crash_line_comes_from_the_arm_s_files_only() -> None:
    dump = (
        'File "/a/kernel.py", line 1 in warned\nFatal Python error: Segmentation fault\n\n'
        '  File "/x/triton/interpreter.py", line 7 in load\n  File "/a/kernel.py", line 88 in gather\n'
        '  File "/a/kernel.py", line 12 in outer\n'
    )
    assert crash_line(dump, ["/a/kernel.py"]) == "kernel.py:88"
    assert crash_line(dump, ["/b/kernel.py"]) == ""


def test_the_server_needs_nothing_from_the_package() -> None:
    source = (Path(bigpool.__file__).parent / "proof" / "server.py").read_text()
    assert "import bigpool" not in source
    assert "from bigpool" not in source
