"""Finds a captured kernel again in another process, from its file as it is or with other text in it."""

from __future__ import annotations

import importlib
import importlib.util
import linecache
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from bigpool.confirm.record import JitReference, Snapshot
from bigpool.errors import ProofError

MAIN = "__bigpool_confirm__"


@contextmanager
def edited(files: Mapping[str, bytes]) -> Iterator[None]:
    """Modules that are loaded inside have the text of `files` (by resolved path); tracebacks and Triton see it too."""
    read, stat = SourceFileLoader.get_data, SourceFileLoader.path_stats

    def get_data(self: SourceFileLoader, path: str) -> bytes:
        data = files.get(str(Path(path).resolve()))
        if data is None:
            return read(self, path)
        text = data.decode("utf-8-sig")
        # Without a time of change, linecache takes it for granted.
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        return data

    def path_stats(self: SourceFileLoader, path: str) -> Any:
        if str(Path(path).resolve()) in files:
            raise OSError("what was compiled of the file on disk is of no use here")
        return stat(self, path)

    SourceFileLoader.get_data, SourceFileLoader.path_stats = get_data, path_stats  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        SourceFileLoader.get_data, SourceFileLoader.path_stats = read, stat  # type: ignore[method-assign]


@contextmanager
def launching_nothing() -> Iterator[None]:
    """What a module launches when it is loaded was captured where it ran."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    owners: list[tuple[Any, str]] = [(JITFunction, "run"), (Autotuner, "run"), (GridExecutor, "__call__")]
    before = [getattr(owner, name) for owner, name in owners]
    for owner, name in owners:
        setattr(owner, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for (owner, name), original in zip(owners, before, strict=True):
            setattr(owner, name, original)


def load_kernel(wanted: Snapshot | JitReference) -> Any:
    """The jitted function, without autotuning and heuristics around it.

    Raises:
        ProofError: it cannot be found by its name.
    """
    if "<locals>" in wanted.name:
        raise ProofError(f"kernel: expected one that its module can name, got {wanted.name}; define it outside of functions")
    with launching_nothing():
        owner: Any = _main(wanted.file) if wanted.module == "__main__" else importlib.import_module(wanted.module)
        for part in wanted.name.split("."):
            owner = getattr(owner, part, None)
    while owner is not None and not hasattr(owner, "rewriter") and type(owner).__name__ != "JITFunction":
        owner = getattr(owner, "fn", None)
    if owner is None:
        raise ProofError(f"kernel: expected {wanted.name} in {Path(wanted.file).name}, got no jitted function of that name")
    return owner


def _main(file: str) -> Any:
    """The script as a module, so that what stands under `if __name__ == "__main__"` does not run again."""
    if MAIN in sys.modules:
        return sys.modules[MAIN]
    sys.path.insert(0, str(Path(file).resolve().parent))
    spec = importlib.util.spec_from_file_location(MAIN, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MAIN] = module
    spec.loader.exec_module(module)
    return module


def forget(files: Mapping[str, bytes], snapshot: Snapshot) -> None:
    """Lets the kernel's module and those of `files` be loaded anew."""
    chosen = {*files, str(Path(snapshot.file).resolve())}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and str(Path(file).resolve()) in chosen:
            del sys.modules[name]
