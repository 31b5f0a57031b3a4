"""Compiles the development set to TTIR without a GPU and prints what came of it as JSON."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import warnings
from typing import Any

from audit_cases._format import Kernel, kernels

TYPES = {"i32": "i32", "i64": "i64", "fp32": "fp32"}


def signature(kernel: Kernel) -> tuple[dict[str, str], dict[str, Any]]:
    """What Triton calls the signature and the constexprs of a specialisation."""
    import triton.language as tl

    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for name in kernel.params:
        value = kernel.meta["args"][name]
        note = kernel.annotations.get(name, "")
        if name in kernel.constexprs:
            types[name] = "constexpr"
            is_type = isinstance(value, str) and value.startswith("tl.")
            constants[name] = getattr(tl, value.removeprefix("tl.")) if is_type else value
        elif isinstance(value, str):
            types[name] = value
        else:
            types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        if "64" in note:
            types[name] = "i64"
    return types, constants


def wanted(kernel: Kernel) -> bool:
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return not (kernel.meta.get("triton") == "<3.9" and version >= (3, 9))


def ttir(kernel: Kernel, **options: Any) -> str:
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    function = getattr(importlib.import_module(kernel.module), kernel.name)
    types, constants = signature(kernel)
    target = GPUTarget("hip", "gfx942", 64) if kernel.meta.get("backend") == "hip" else GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    source = ASTSource(function, types, constants)
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    arguments = [parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context]
    if "target" in inspect.signature(source.make_ir).parameters:
        arguments.insert(0, target)
    return str(source.make_ir(*arguments))


def main() -> int:
    """Options: `texts` adds the TTIR of each kernel, `asserts` that with the frontend's own overflow checks."""
    import triton

    warnings.simplefilter("ignore")
    failed: dict[str, str] = {}
    made: dict[str, dict[str, Any]] = {}
    for kernel in kernels():
        if not wanted(kernel):
            continue
        try:
            types, _ = signature(kernel)
            made[str(kernel)] = {"types": types, "text": ttir(kernel, sanitize_overflow=False)}
            if "asserts" in sys.argv:
                made[str(kernel)]["asserts"] = ttir(kernel, sanitize_overflow=True, debug=True)
        except Exception as error:
            failed[str(kernel)] = f"{type(error).__name__}: {error}"
    result: dict[str, Any] = {"triton": triton.__version__, "compiled": len(made), "failed": failed}
    if "texts" in sys.argv:
        result["made"] = made
    json.dump(result, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
