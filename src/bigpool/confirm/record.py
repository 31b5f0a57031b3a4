"""Captures launches with what their tensors held, so that each can be launched again in another process."""

from __future__ import annotations

import inspect
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bigpool.audit.launch.capture import Capture, Launch, parse_target
from bigpool.audit.launch.hooks import Hooks
from bigpool.audit.launch.script import Job

# A launch that holds more than this is not kept: run the script with smaller tensors.
MAX_KEPT_BYTES = 1 << 30
# And all launches of a script together.
MAX_ALL_BYTES = 1 << 32
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of a launch: `offset` (in bytes) into the space `space`, which it may share with other arguments."""

    space: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JitReference:
    """A jitted function that was passed as an argument, by its name."""

    module: str
    name: str
    file: str


@dataclass(slots=True)
class Snapshot:
    """One launch.

    Attributes:
        module, name, file: where the kernel is found again; module "__main__" is the script itself.
        arguments: by parameter: an int, float, bool, None, string, `Held` or `JitReference`.
        spaces: uint8 CPU tensors: the bytes of each piece of memory before the launch.
        alignment: the address of each space modulo 256.
        grid: programs of the three axes.
        missing: why it cannot be launched again, empty if it can.
    """

    module: str
    name: str
    file: str
    arguments: dict[str, Any] = field(default_factory=dict)
    spaces: dict[str, Any] = field(default_factory=dict)
    alignment: dict[str, int] = field(default_factory=dict)
    grid: tuple[int, int, int] = (1, 1, 1)
    options: dict[str, Any] = field(default_factory=dict)
    missing: str = ""


class Recorder(Capture):
    """A capture that keeps the values too: of the first launch of each kind."""

    def __init__(self, target: str | None = None, execute: bool | None = None) -> None:
        super().__init__(parse_target(target), execute)
        self.snapshots: dict[int, Snapshot] = {}
        self.path: list[str] = []
        self.kept_bytes = 0

    def record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any) -> None:
        known = set(map(id, self.launches.values()))
        super().record(function, args, kwargs, grid)
        fresh = [launch for launch in self.launches.values() if id(launch) not in known]
        for launch in fresh:
            made = self.snapshots[id(launch)] = snapshot(function, args, kwargs, grid)
            size = sum(data.numel() for data in made.spaces.values())
            if self.kept_bytes + size > MAX_ALL_BYTES:
                made.spaces = {}
                made.missing = (
                    f"the launches before it hold {self.kept_bytes:,} bytes of the {MAX_ALL_BYTES:,} that are kept; run fewer"
                )
                size = 0
            self.kept_bytes += size

    @contextmanager
    def importable(self) -> Iterator[None]:
        """What the script could import can be imported inside, in child processes too."""
        before = sys.path[:]
        sys.path[:] = self.path or before
        try:
            yield
        finally:
            sys.path[:] = before

    def of(self, launch: Launch) -> Snapshot | None:
        return self.snapshots.get(id(launch))


def snapshot(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any) -> Snapshot:
    """What a launch was given, copied to the CPU."""
    made = Snapshot(function.fn.__module__, function.fn.__qualname__, function.fn.__code__.co_filename)
    try:
        signature = inspect.signature(function.fn)
        named = {name: value for name, value in kwargs.items() if name in signature.parameters}
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        values = dict(bound.arguments)
        extents = tuple(int(extent) for extent in (grid(values) if callable(grid) else grid))
        x, y, z = (*extents, 1, 1, 1)[:3]
        made.grid = (x, y, z)
        made.options = {name: kwargs[name] for name in OPTIONS if kwargs.get(name) is not None}
        _hold(made, values)
    except Exception as error:  # a user's grid, or arguments that Triton would not take either
        made.missing = f"its arguments cannot be kept: {type(error).__name__}: {error}"
    return made


def _hold(made: Snapshot, values: dict[str, Any]) -> None:
    import torch

    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    for name, value in values.items():
        if name in tensors:
            continue
        held = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
        if hasattr(held, "fn") and hasattr(held.fn, "__code__"):
            held = JitReference(held.fn.__module__, held.fn.__qualname__, held.fn.__code__.co_filename)
        elif type(held).__name__ == "dtype":
            pass  # of triton.language; it pickles
        elif held is not None and not isinstance(held, (int, float, bool, str)):
            made.missing = f"{name}: expected a tensor, a number or None, got {type(value).__name__}"
            return
        made.arguments[name] = held
    unreal = [name for name, tensor in tensors.items() if tensor.is_meta]
    if unreal:
        made.missing = f"{unreal[0]} is a meta tensor, which has no values; run the script with real ones"
        return
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
    total = sum(storage.nbytes() for storage in storages.values())
    if total > MAX_KEPT_BYTES:
        made.missing = (
            f"its tensors hold {total:,} bytes, more than {MAX_KEPT_BYTES:,} are kept; run the script with smaller ones"
        )
        return
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in names:
            names[address] = name
            made.spaces[name] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).to("cpu", copy=True)
            made.alignment[name] = address % 256
        made.arguments[name] = Held(
            names[address],
            tensor.data_ptr() - address,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tuple(tensor.stride()),
        )


def run_recorded(job: Job) -> tuple[Recorder, str]:
    """Runs the program as `python` would, and returns what it launched and how it failed, if it did.

    What the script prints goes to stderr: stdout is the report's.
    """
    failed = ""
    before = sys.argv, sys.path[:]
    sys.argv = list(job.program)
    found = Recorder(job.target, job.execute)
    with Hooks(found).installed(), redirect_stdout(sys.stderr):
        try:
            if job.module:
                sys.path.insert(0, str(Path.cwd()))
                runpy.run_module(job.program[0], run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(job.program[0]).resolve().parent))
                runpy.run_path(job.program[0], run_name="__main__")
        except SystemExit as stop:
            failed = f"it ended with status {stop.code}" if stop.code not in (None, 0) else ""
        except Exception as error:  # the user's script: what was launched until then is still worth a look
            where = traceback.extract_tb(error.__traceback__)[-1]
            failed = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        finally:
            found.path = sys.path[:]
            sys.argv, sys.path[:] = before
    return found, failed
