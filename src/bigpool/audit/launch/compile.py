"""TTIR of a specialisation, without a GPU, for Triton 3.4 and later."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# What is compiled for where there is no GPU: TTIR hardly depends on it.
DEFAULT_TARGET = ("cuda", 90, 32)
RECURSION = 10_000


@dataclass(frozen=True, slots=True)
class Target:
    backend: str = "cuda"
    arch: int | str = 90
    warp_size: int = 32

    def triton(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.backend, self.arch, self.warp_size)


@dataclass(frozen=True, slots=True)
class Specialisation:
    """What Triton compiles for: types by parameter, values of constexprs by position, attributes such as divisibility."""

    signature: Mapping[str, Any]
    constexprs: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    target: Target = Target()


def ttir(function: Any, specialisation: Specialisation, asserts: bool = False) -> str:
    """The TTIR of a JITFunction, before any pass: calls are calls, and every operation says where it stands.

    `asserts` keeps the frontend's own overflow checks in it (they need `debug`); the audit does not read those.
    """
    from triton._C.libtriton import ir
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    target = specialisation.target.triton()
    backend = make_backend(target)
    source = ASTSource(function, dict(specialisation.signature), dict(specialisation.constexprs), dict(specialisation.attributes))
    wanted = {**specialisation.options, "sanitize_overflow": asserts}
    if asserts:
        wanted["debug"] = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = backend.parse_options(wanted)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        make = source.make_ir
        arguments = [options, backend.get_codegen_implementation(options), backend.get_module_map(), context]
        if "target" in inspect.signature(make).parameters:
            arguments.insert(0, target)
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, RECURSION))
        try:
            return str(make(*arguments))
        finally:
            sys.setrecursionlimit(limit)


def argument_names(signature: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of what the compiled function takes: no constexprs, and shape and strides behind each descriptor."""
    names: list[str] = []
    for name, kind in signature.items():
        if kind == "constexpr":
            continue
        names.append(name)
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            rank = kind.partition("[")[2].count(",") + 1
            names += [f"{name}.shape.{axis}" for axis in range(rank)] + [f"{name}.stride.{axis}" for axis in range(rank)]
    return tuple(names)
