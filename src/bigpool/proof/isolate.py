"""Runs each job in a process of its own, forked from a warm server; a death is an answer like any other."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from bigpool.errors import BackendError, ProofError

PRELOAD = ("numpy", "torch", "triton", "triton.language", "bigpool.proof.worker")
# Signals that a wild pointer causes; any other death says nothing about an index.
MEMORY_FAULTS = {signal.SIGSEGV: "SIGSEGV", signal.SIGBUS: "SIGBUS"}
LOG_TAIL = 4000
# One thread a child: jobs run side by side, and a forked child must not inherit a thread pool.
# CUDA_LAUNCH_BLOCKING makes an illegal access name its launch.
SERVER_ENV = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_LAUNCH_BLOCKING": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
# What would change the kernels under proof, or mix their caches.
DROPPED_ENV = {
    "TRITON_INTERPRET", "TRITON_DEBUG", "TRITON_SANITIZE_OVERFLOW",
    "TRITON_KERNEL_OVERRIDE", "TRITON_OVERRIDE_DIR", "TRITON_CACHE_DIR",
}  # fmt: skip
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass(frozen=True)
class Exit:
    """How a job ended. `outcome`: "done" (see `result`), "killed" (a memory fault), "died" (any other death) or "timeout"."""

    id: str
    folder: Path
    outcome: str
    detail: str
    where: str
    seconds: float
    rss_mib: int
    log: str
    result: dict[str, Any]
    tensors: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class _Ticket:
    folder: Path
    deadline: float
    timeout: float
    frames: tuple[str, ...]
    timed_out: bool = False


@dataclass
class Session:
    """A context manager around one server and one temporary folder; leaves neither processes nor files behind.

    `interpreted` picks Triton's interpreter, which has to be known before triton is loaded.
    """

    interpreted: bool
    preload: Sequence[str] = PRELOAD
    folder: Path = field(init=False)
    _server: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _tickets: dict[str, _Ticket] = field(default_factory=dict, init=False)
    _buffer: bytes = field(default=b"", init=False)
    _ready: bool = field(default=False, init=False)
    _serial: int = field(default=0, init=False)

    def __enter__(self) -> Session:
        self.folder = Path(tempfile.mkdtemp(prefix="bigpool-proof-"))
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        env = {name: value for name, value in os.environ.items() if name not in DROPPED_ENV}
        env |= SERVER_ENV | ({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if self.interpreted else {})
        script = str(Path(__file__).with_name("server.py"))
        with (self.folder / "server.log").open("wb") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-I", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        self._send(
            {"path": [path or str(Path.cwd()) for path in sys.path], "preload": list(self.preload), "folder": str(self.folder)}
        )

    def submit(
        self, job: Mapping[str, Any], *, timeout: float, env: Mapping[str, str] | None = None, frames: Sequence[str] = ()
    ) -> str:
        """Start `job["module"].perform(job)` in a child; returns its id. `frames`: the files that a crash line may name."""
        self._serial += 1
        id = str(self._serial)
        folder = self.folder / "jobs" / id
        folder.mkdir(parents=True)
        self._await_ready()
        self._tickets[id] = _Ticket(folder, time.monotonic() + timeout, timeout, tuple(frames))
        self._send({"module": "bigpool.proof.worker", **job, "id": id, "folder": str(folder), "env": dict(env or {})})
        return id

    def wait(self, patience: float = 0.5) -> list[Exit]:
        """The jobs that ended; returns after `patience` seconds at the latest. Jobs past their time limit are killed."""
        now = time.monotonic()
        for id, ticket in self._tickets.items():
            if now > ticket.deadline and not ticket.timed_out:
                ticket.timed_out = True
                self._send({"kill": id})
        return [self._exit(message) for message in self._receive(patience)]

    def run(self, job: Mapping[str, Any], *, timeout: float = 300.0, env: Mapping[str, str] | None = None) -> Exit:
        """One job, waited for; only while no other is under way."""
        self.submit(job, timeout=timeout, env=env)
        while not (ended := self.wait()):
            pass
        return ended[0]

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(server.pid, signal.SIGKILL)
            for pipe in (server.stdin, server.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            server.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _await_ready(self) -> None:
        while not self._ready:
            for message in self._receive(60.0):
                if not message["ready"]:
                    raise BackendError(_preload_fault(message["error"]))
                self._ready = True

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._server is not None
        assert self._server.stdin is not None
        try:
            self._server.stdin.write(json.dumps(message).encode() + b"\n")
            self._server.stdin.flush()
        except BrokenPipeError:
            raise self._server_died() from None

    def _receive(self, patience: float) -> list[dict[str, Any]]:
        assert self._server is not None
        assert self._server.stdout is not None
        fd = self._server.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            if not selector.select(patience):
                return []
        data = os.read(fd, 1 << 16)
        if not data:
            raise self._server_died()
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def _server_died(self) -> ProofError:
        log = (self.folder / "server.log").read_text(errors="replace").strip()
        return ProofError(
            f"the process that runs the cases ended by itself (out of memory?); it said: {log[-LOG_TAIL:] or 'nothing'}"
        )

    def _exit(self, message: Mapping[str, Any]) -> Exit:
        ticket = self._tickets.pop(message["id"])
        log_file = ticket.folder / "log"
        log = log_file.read_text(errors="replace")[-64 * LOG_TAIL :] if log_file.exists() else ""
        result: dict[str, Any] = _left_behind(ticket.folder / "result.json", {})
        tensors: list[dict[str, Any]] = _left_behind(ticket.folder / "tensors.json", [])
        outcome, detail, where = "done", "", ""
        code = message["code"]
        if ticket.timed_out:
            outcome, detail = "timeout", f"no answer within {ticket.timeout:g} s"
        elif code < 0:
            number = signal.Signals(-code)
            outcome, detail = ("killed", MEMORY_FAULTS[number]) if number in MEMORY_FAULTS else ("died", _death(number))
            where = crash_line(log, ticket.frames)
        elif not result:
            outcome, detail = "died", f"the child ended with code {code} and no result"
        rss = message["rss_kib"] // 1024
        return Exit(
            message["id"], ticket.folder, outcome, detail, where, message["seconds"], rss, log[-LOG_TAIL:], result, tensors
        )


def _left_behind(file: Path, otherwise: Any) -> Any:
    return json.loads(file.read_text()) if file.exists() else otherwise


def crash_line(log: str, frames: Sequence[str]) -> str:
    """`file:line` of the innermost frame of a faulthandler dump that lies in one of the files `frames`, or "" if none does."""
    _, _, dump = log.rpartition("Fatal Python error")
    for found in FRAME.finditer(dump):
        if found["file"] in frames:
            return f"{Path(found['file']).name}:{found['line']}"
    return ""


def _death(number: signal.Signals) -> str:
    hint = "; the system kills a process this way when memory runs out" if number == signal.SIGKILL else ""
    return f"{number.name}, which is no memory fault{hint}"


def _preload_fault(error: str) -> str:
    if "No module named" in error:
        return (
            f"backend: expected torch and triton to be importable, got {error}; "
            "pip install 'bigpool[kernels]' on a machine with an NVIDIA GPU, 'bigpool[cpu]' on any other"
        )
    return f"backend: torch or triton could not be loaded: {error}"
