"""Compiles in a process of its own what the interpreter launched here: the interpreter replaces the functions of the compiler."""

from __future__ import annotations

import base64
import importlib
import json
import os
import pickle
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from .cache import cached_ttir
from .capture import Launch
from .compile import Specialisation

TIMEOUT = 600


def compile_elsewhere(launches: list[Launch], cache: Path | None = None) -> list[str | Exception]:
    """TTIR of each launch, or why there is none. `cache`: a folder for what was compiled."""
    jobs = [{**_packed(launch), "cache": str(cache) if cache is not None else ""} for launch in launches]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    package = __name__.rpartition(".")[0] + ".worker"
    done = subprocess.run(
        [sys.executable, "-m", package],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        env=environment,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return [RuntimeError(f"the compiling process ended with status {done.returncode}: {reason}") for _ in launches]
    answers = json.loads(done.stdout.splitlines()[-1])
    return [answer["ttir"] if "ttir" in answer else RuntimeError(answer["error"]) for answer in answers]


def _packed(launch: Launch) -> dict[str, str]:
    function, specialisation = launch.function.fn, launch.specialisation
    assert specialisation is not None
    constexprs = {
        path: _Reference(value) if hasattr(value, "rewriter") else value for path, value in specialisation.constexprs.items()
    }
    portable = Specialisation(
        specialisation.signature, constexprs, specialisation.attributes, specialisation.options, specialisation.target
    )
    try:
        data = base64.b64encode(pickle.dumps(portable)).decode()
    except Exception as error:  # pickle raises whatever the object's own methods raise
        return {"error": f"a constexpr cannot be passed on: {type(error).__name__}: {error}"}
    return {"module": function.__module__, "name": function.__qualname__, "file": function.__code__.co_filename, "data": data}


class _Reference:
    """A jit function as a constexpr, by its name."""

    def __init__(self, function: Any) -> None:
        self.job = (function.fn.__module__, function.fn.__qualname__, function.fn.__code__.co_filename)


def _function(module: str, name: str, file: str) -> Any:
    if "<locals>" in name:
        raise ValueError("a kernel that is defined inside a function is read without the interpreter only")
    if module == "__main__":
        space: dict[str, Any] = runpy.run_path(file, run_name="__bigpool_audit__")
        return _unwrapped(space[name])
    owner: Any = importlib.import_module(module)
    for part in name.split("."):
        owner = getattr(owner, part)
    return _unwrapped(owner)


def _unwrapped(owner: Any) -> Any:
    """The JITFunction behind autotune and heuristics."""
    from triton.runtime.jit import JITFunction

    while not isinstance(owner, JITFunction) and hasattr(owner, "fn"):
        owner = owner.fn
    return owner


def main() -> int:
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    # What a module launches when it is imported was captured where it ran.
    JITFunction.run = Autotuner.run = lambda *args, **kwargs: None
    answers = []
    for job in json.loads(sys.stdin.read()):
        if "error" in job:
            answers.append(job)
            continue
        try:
            specialisation = pickle.loads(base64.b64decode(job["data"]))
            constexprs = {
                path: _function(*value.job) if isinstance(value, _Reference) else value
                for path, value in specialisation.constexprs.items()
            }
            chosen = Specialisation(
                specialisation.signature, constexprs, specialisation.attributes, specialisation.options, specialisation.target
            )
            cache = Path(job["cache"]) if job["cache"] else None
            answers.append({"ttir": cached_ttir(_function(job["module"], job["name"], job["file"]), chosen, cache)})
        except Exception as error:  # a user's module or the compiler: whatever they raise
            answers.append({"error": f"{type(error).__name__}: {error}"[-2000:]})
    print(json.dumps(answers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
