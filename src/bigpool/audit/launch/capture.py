"""Hooks the JIT: every launch is recorded, and executed only where there is something to execute it on.

Without a GPU nothing of Triton's driver is touched, so tensors may be meta tensors, sparse ones or ordinary ones on the CPU.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..run import Options, Report
from .compile import Specialisation, Target

_LIMIT = 100_000


@dataclass(frozen=True, slots=True)
class Argument:
    """What one launch passed. `value` of an integer; shape and strides (in elements) of a tensor."""

    name: str
    type: str
    value: int | None = None
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(slots=True)
class Launch:
    """One specialisation, and the largest launch of it that was seen.

    Attributes:
        function: the function object that was launched, of the JIT or of the interpreter.
        grid: the most programs of each axis over all launches.
        count: how many launches.
        failed: why it cannot be audited, empty if it can.
    """

    name: str
    function: Any
    specialisation: Specialisation | None
    arguments: dict[str, Argument]
    grid: tuple[int, ...]
    count: int = 1
    failed: str = ""


@dataclass(slots=True)
class Capture:
    """The launches inside a `with capture()` block."""

    target: Target = field(default_factory=Target)
    execute: bool | None = None
    launches: dict[str, Launch] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _inside: threading.local = field(default_factory=threading.local)

    def report(self, options: Options | None = None) -> Report:
        """Audits what was captured.

        Returns a report of one finding for each operation, at its nearest wall over all specialisations.
        """
        from .audit import audit_launches

        return audit_launches(list(self.launches.values()), options or Options())

    # What the hooks call.

    def record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any) -> None:
        jit = as_jit(function)
        name = getattr(jit, "__name__", str(jit))
        try:
            launch = self._bound(jit, function, name, args, kwargs, grid)
        except Exception as error:  # whatever a user's arguments do to Triton's binder
            launch = Launch(name, function, None, {}, (), failed=f"{type(error).__name__}: {error}")
        self._add(launch)

    def record_source(self, source: Any, target: Any, options: dict[str, Any] | None) -> None:
        """A compilation that no launch through `JITFunction.run` asked for, such as Inductor's."""
        if getattr(self._inside, "launch", False) or not hasattr(source, "signature") or not hasattr(source, "fn"):
            return
        chosen = self.target
        if target is not None:
            chosen = Target(target.backend, target.arch, target.warp_size)
        specialisation = Specialisation(
            dict(source.signature), dict(source.constants), dict(source.attrs), _plain(options or {}), chosen
        )
        arguments = {name: Argument(name, str(kind)) for name, kind in source.signature.items()}
        self._add(Launch(source.fn.__name__, source.fn, specialisation, arguments, ()))

    def _add(self, launch: Launch) -> None:
        key = _key(launch)
        with self._lock:
            known = self.launches.get(key)
            if known is None:
                if len(self.launches) < _LIMIT:
                    self.launches[key] = launch
                return
            known.count += 1
            width = max(len(known.grid), len(launch.grid))
            pairs = zip(_padded(known.grid, width), _padded(launch.grid, width), strict=True)
            known.grid = tuple(max(pair) for pair in pairs)

    def _bound(self, jit: Any, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any) -> Launch:
        from triton.compiler.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        if type(jit).__name__ not in ("JITFunction", "InterpretedFunction"):
            return Launch(name, function, None, {}, (), failed=f"{type(jit).__name__} is not read yet")
        backend = make_backend(self.target.triton())
        kwargs = {**kwargs, "debug": False}
        bound, specialised, _ = create_function_from_signature(jit.signature, jit.params, backend)(*args, **kwargs)
        options, signature, constexprs, attributes = (
            jit._pack_args(backend, kwargs, bound, specialised, None)
            if hasattr(jit, "_pack_args")
            else _packed(jit, backend, kwargs, bound, specialised)
        )
        del options
        grid = grid(bound) if callable(grid) else grid
        extents = tuple(int(extent) for extent in (grid or ()))
        names = set(jit.arg_names)
        chosen = {key: value for key, value in kwargs.items() if key not in names}
        specialisation = Specialisation(signature, constexprs, attributes, _plain(chosen), self.target)
        arguments = {key: _argument(key, str(signature.get(key, "")), value) for key, value in bound.items()}
        return Launch(name, function, specialisation, arguments, extents)


def as_jit(function: Any) -> Any:
    """A JITFunction of what was launched; of the interpreter's functions too."""
    from triton.runtime.jit import JITFunction

    if isinstance(function, JITFunction) or not hasattr(function, "rewriter"):
        return function
    made = getattr(function, "_bigpool_jit", None)
    if made is None:
        accepted = inspect.signature(JITFunction.__init__).parameters
        options = {name: value for name, value in getattr(function, "kwargs", {}).items() if name in accepted}
        made = JITFunction(function.fn, **options)
        function._bigpool_jit = made
    return made


def _packed(jit: Any, backend: Any, kwargs: dict[str, Any], bound: dict[str, Any], specialised: list[Any]) -> tuple[Any, ...]:
    """What `JITFunction._pack_args` does, for the versions that have it inside `run`."""
    from triton._utils import find_paths_if, get_iterable_path

    kinds = [entry[0] for entry in specialised]
    signature = dict(zip([parameter.name for parameter in jit.params], kinds, strict=False))
    values = list(bound.values())
    constexprs = {path: get_iterable_path(values, path) for path in find_paths_if(kinds, lambda _, kind: kind == "constexpr")}
    hints = [entry[1] for entry in specialised]
    paths = find_paths_if(hints, lambda _, hint: isinstance(hint, str))
    return None, signature, constexprs, {path: backend.parse_attr(get_iterable_path(hints, path)) for path in paths}


def _argument(name: str, kind: str, value: Any) -> Argument:
    if isinstance(value, bool) or value is None:
        return Argument(name, kind)
    if isinstance(value, int):
        return Argument(name, kind, value)
    base: Any = getattr(value, "base", None)
    tensor: Any = base if kind.startswith("tensordesc") and hasattr(base, "dtype") else value
    if not hasattr(tensor, "dtype") or not hasattr(tensor, "shape"):
        return Argument(name, kind)
    strides = tensor.stride() if callable(getattr(tensor, "stride", None)) else ()
    shape = tuple(int(size) for size in tensor.shape)
    return Argument(name, kind, None, shape, tuple(int(stride) for stride in strides), str(tensor.dtype).removeprefix("torch."))


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Options that say how to compile, without those that a newer or older version does not know."""
    return {name: value for name, value in options.items() if name in ("num_warps", "num_stages", "num_ctas", "enable_fp_fusion")}


def _key(launch: Launch) -> str:
    chosen = launch.specialisation
    if chosen is None:
        return f"{launch.name} {launch.failed}"
    where = getattr(getattr(launch.function, "fn", None), "__code__", None)
    values = sorted(
        (name, argument.value, argument.strides)
        for name, argument in launch.arguments.items()
        if argument.strides or argument.value
    )
    return repr((launch.name, where and (where.co_filename, where.co_firstlineno), chosen.signature, chosen.constexprs, values))


def _padded(grid: tuple[int, ...], width: int) -> tuple[int, ...]:
    return grid + (1,) * (width - len(grid))


def has_device() -> bool:
    """Whether a launch can be executed."""
    return _present() is not None


def _present() -> Target | None:
    """The GPU of this process."""
    try:
        from triton.runtime.driver import driver

        driver.active.get_current_device()
        found = driver.active.get_current_target()
    except Exception:  # no driver, no device, or one that does not work: each has its own exception
        return None
    return Target(found.backend, found.arch, found.warp_size)


@contextmanager
def capture(target: Target | str | None = None, execute: bool | None = None) -> Iterator[Capture]:
    """Records every Triton launch inside the block.

    Args:
        target: what to compile for, such as "cuda:90" or "hip:gfx942". None: the GPU that is there, else an H100.
        execute: whether launches are executed as well. None: where there is a GPU, or the interpreter is on and no tensor
            of the launch is a meta tensor.

    Yields a Capture; call its `report()` after (or inside) the block. Launches of other threads are recorded too.
    """
    from .hooks import Hooks

    found = Capture(parse_target(target), execute)
    with Hooks(found).installed():
        yield found


def parse_target(target: Target | str | None) -> Target:
    """Reads `cuda:90`, `hip:gfx942`."""
    from ...errors import ArgumentError

    if isinstance(target, Target):
        return target
    if target is None and (present := _present()) is not None:
        return present
    backend, _, arch = (target or "cuda:90").partition(":")
    if backend == "cuda" and arch.isdigit():
        return Target("cuda", int(arch), 32)
    if backend == "hip" and arch.startswith("gfx"):
        return Target("hip", arch, 64 if arch.startswith("gfx9") else 32)
    raise ArgumentError("bigpool audit", f"--target: expected cuda:ARCH or hip:gfxARCH, got {target!r}; such as cuda:90")
