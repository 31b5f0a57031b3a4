"""Finds 32-bit indices in Triton kernels, with the size at which each breaks.

`audit(paths)` reads source files with the standard library alone. `capture()` records what the JIT launches, and needs triton.
Importing this package loads neither torch nor triton; its names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .finding import Confidence, Finding, Severity, Span, Wall
    from .launch.capture import Capture, capture
    from .run import Options, Report, audit

__all__ = ["Capture", "Confidence", "Finding", "Options", "Report", "Severity", "Span", "Wall", "audit", "capture"]

_MODULES = {
    "finding": ("Confidence", "Finding", "Severity", "Span", "Wall"),
    "launch.capture": ("Capture", "capture"),
    "run": ("Options", "Report", "audit"),
}
_LAZY = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
