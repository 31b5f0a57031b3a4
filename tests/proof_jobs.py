"""Jobs for the isolation tests: each ends in a way of its own. Loaded in children by name, without torch."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def die_of_a_wild_read() -> None:
    ctypes.string_at(8)


def perform(job: Mapping[str, Any]) -> int:
    kind, folder = job["kind"], Path(job["folder"])
    if kind == "segv":
        print("about to die", flush=True)
        die_of_a_wild_read()
    if kind in ("SIGKILL", "SIGABRT", "SIGBUS"):
        os.kill(os.getpid(), getattr(signal, kind))
    if kind == "raise":
        raise ValueError("a text of its own")
    if kind == "exit":
        os._exit(3)
    if kind == "sleep":
        # Renamed when whole: the test reads it as soon as it is there.
        partial = Path(job["started"] + ".partial")
        partial.write_text(str(os.getpid()))
        partial.rename(job["started"])
        time.sleep(30)
    if kind == "answer":
        state = {
            "pid": os.getpid(),
            "env": os.environ.get("PROOF_TEST", ""),
            "stdin": os.read(0, 1).decode(),
            "path": sys.path[0],
        }
        (folder / "result.json").write_text(json.dumps({"outcome": "ok", **state}))
    return 0
