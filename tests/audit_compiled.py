"""TTIR of the development set, compiled once for a test session in a process without the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

from audit_cases._format import FOLDER


@cache
def compiled() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, str(FOLDER / "_compile.py"), "texts", "asserts"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result
