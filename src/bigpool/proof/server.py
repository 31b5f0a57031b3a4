"""A fork server: loads torch and triton once, then forks a child for each job, so that a run starts in milliseconds.

Run as a script, with nothing but the standard library until the first line on stdin says what to load. It speaks JSON lines:
jobs come on stdin, exits go to stdout. It lives in a session of its own, so that a Ctrl-C reaches only the parent, which kills
the whole group; when the parent dies, stdin ends, and the server kills the children and removes their files.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import resource
import selectors
import shutil
import signal
import sys
import time
import traceback
from typing import Any

CHUNK = 1 << 16


class Server:
    def __init__(self) -> None:
        self.children: dict[int, tuple[str, float]] = {}
        self.buffer = b""
        self.folder = ""
        self.own_fds: list[int] = []
        self.reply_fd = os.dup(1)
        os.dup2(2, 1)

    def serve(self) -> None:
        hello = self._first_line()
        if hello is None:
            return
        self.folder = hello["folder"]
        sys.path[:] = hello["path"]
        try:
            if self._preloaded(hello["preload"]):
                self._loop()
        except BrokenPipeError:
            pass  # The parent is gone.
        finally:
            for pid in self.children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _preloaded(self, names: list[str]) -> bool:
        try:
            for name in names:
                importlib.import_module(name)
        except Exception as error:
            self._reply(ready=False, error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
            return False
        gc.collect()
        gc.freeze()
        self._reply(ready=True)
        return True

    def _first_line(self) -> Any:
        while b"\n" not in self.buffer:
            data = os.read(0, CHUNK)
            if not data:
                return None
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    def _loop(self) -> None:
        woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        with selectors.EpollSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            self.own_fds = [self.reply_fd, woken, waker, selector.fileno()]
            while True:
                for key, _ in selector.select():
                    if key.fd == woken:
                        with contextlib.suppress(BlockingIOError):
                            os.read(woken, CHUNK)
                        continue
                    data = os.read(0, CHUNK)
                    if not data:
                        return
                    self.buffer += data
                    *lines, self.buffer = self.buffer.split(b"\n")
                    for line in lines:
                        self._obey(json.loads(line))
                self._reap()

    def _obey(self, request: dict[str, Any]) -> None:
        if "kill" in request:
            for pid, (job, _) in self.children.items():
                if job == request["kill"]:
                    os.kill(pid, signal.SIGKILL)
            return
        pid = os.fork()
        if pid == 0:
            run_child(request, self.own_fds)
        self.children[pid] = (request["id"], time.monotonic())

    def _reap(self) -> None:
        for pid, (job, since) in list(self.children.items()):
            done, status, usage = os.wait4(pid, os.WNOHANG)
            if done:
                del self.children[pid]
                code = os.waitstatus_to_exitcode(status)
                self._reply(id=job, code=code, seconds=time.monotonic() - since, rss_kib=usage.ru_maxrss)

    def _reply(self, **message: Any) -> None:
        os.write(self.reply_fd, json.dumps(message).encode() + b"\n")


def run_child(job: dict[str, Any], server_fds: list[int]) -> None:
    """In the forked child: log to a file, no core dumps, a line number for a death by signal; never returns."""
    code = 70
    try:
        log = os.open(os.path.join(job["folder"], "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # noqa: PTH118
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # A child that held the reply pipe would keep the parent from seeing that the server died.
        for fd in (*server_fds, log, null):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.enable(file=2, all_threads=False)
        os.environ.update(job["env"])
        module = importlib.import_module(job["module"])
        code = module.perform(job)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    Server().serve()
