"""One server of one arm: started, waited for, and gone with everything that it started when the context closes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from bigpool.bench.serving.arms import PORT, ServingArm
from bigpool.errors import BackendError

POLL = 0.1
GRACE = 10.0
KILLED = 20.0
LOG_LINES = 12
LINE = 200


class Server:
    """`base_url` is where it answers. A server that was given is only asked, never stopped."""

    def __init__(self, arm: ServingArm, ready_timeout: float) -> None:
        self.arm, self.ready_timeout = arm, ready_timeout
        port = _free_port() if PORT in arm.command else 0
        self.command = arm.command.replace(PORT, str(port))
        self.base_url = (arm.base_url or f"http://127.0.0.1:{port}/v1").rstrip("/")
        self.process: subprocess.Popen[bytes] | None = None
        self.log: IO[bytes] | None = None

    async def __aenter__(self) -> Server:
        try:
            if self.command:
                if await _answers(self.base_url, self.arm.api_key):
                    raise BackendError(
                        f"{self.arm.name}: expected nothing at {self.base_url} before its server is started, got an answer; "
                        "stop what runs there, or use {port}"
                    )
                self._start()
            await self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _start(self) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self.process = subprocess.Popen(
                shlex.split(self.command), env={**os.environ, **self.arm.env}, stdin=subprocess.DEVNULL, stdout=self.log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise BackendError(f"{self.arm.name}: expected a command that starts, got {error.strerror}: {self.command}") from None

    async def _wait(self) -> None:
        began = time.monotonic()
        while not await _answers(self.base_url, self.arm.api_key):
            if self.process is not None and (how := _ended(self.process.pid)):
                raise BackendError(f"{self.arm.name}: expected a server that stays up, got {how}; its last lines:\n{self.tail()}")
            if time.monotonic() - began > self.ready_timeout:
                remedy = "raise --ready-timeout, or look at its log"
                lines = f"; its last lines:\n{self.tail()}" if self.process is not None else ""
                raise BackendError(
                    f"{self.arm.name}: expected {self.base_url}/models to answer within {self.ready_timeout:g} s, got nothing; "
                    f"{remedy}{lines}"
                )
            await asyncio.sleep(POLL)

    def tail(self) -> str:
        """The last lines of its log, indented."""
        if self.log is None:
            return "  (no log)"
        self.log.seek(max(self.log.seek(0, os.SEEK_END) - LOG_LINES * LINE, 0))
        lines = self.log.read().decode("utf-8", "replace").splitlines()[-LOG_LINES:]
        return "\n".join(f"  {line[:LINE]}" for line in lines) or "  (it wrote nothing)"

    def stop(self) -> None:
        """Ends the server and its process group: asked first, then killed."""
        process, self.process = self.process, None
        try:
            if process is not None:
                try:
                    _signal(process.pid, signal.SIGTERM)
                    _until(lambda: bool(_ended(process.pid)), GRACE)
                finally:
                    # The leader is not reaped yet, so that its group cannot be somebody else's.
                    _signal(process.pid, signal.SIGKILL)
                    process.wait()
                    # Memory of a GPU is free when the last of them is gone.
                    _until(lambda: not _lives(process.pid), KILLED)
        finally:
            if self.log is not None:
                self.log.close()
                self.log = None


async def _answers(base_url: str, api_key: str) -> bool:
    """Whether a server lists its models there."""
    import httpx

    async with httpx.AsyncClient(trust_env=False, timeout=5.0, headers=headers(api_key)) as client:
        try:
            return (await client.get(f"{base_url}/models")).status_code == httpx.codes.OK
        except (httpx.HTTPError, httpx.InvalidURL):
            return False


def headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _lives(group: int) -> bool:
    """Whether a process of the group still holds memory. A zombie, which waits for somebody to reap it, does not."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of = file.read_text("utf-8", "replace").rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                return True
    return False


def _until(done: Callable[[], bool], seconds: float) -> None:
    """Waits until `done`, but not longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)


def _ended(pid: int) -> str:
    """How a child ended, or "" while it runs. It is not reaped, so that its process group stays its own."""
    ended: Any = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return ""
    return f"exit status {ended.si_status}" if ended.si_code == os.CLD_EXITED else signal.Signals(ended.si_status).name


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
