"""Launches kernels of the development set of the audit small enough for the interpreter."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from audit_cases._format import Kernel
from bigpool.audit.launch.hooks import Hooks
from bigpool.confirm.record import Recorder

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "i8": torch.int8,
    "u8": torch.uint8,
    "fp8e4nv": torch.float8_e4m3fn,
    "i1": torch.bool,
}
IDS = 4096
PROGRAMS = 2
SCALAR = 64


def launched(kernel: Kernel, elements: int) -> Recorder:
    """The captured launch: tables of small ids, tensors of so many elements, two programs an axis. Nothing is executed."""
    found = Recorder(execute=False)
    function = getattr(importlib.import_module(kernel.module), kernel.name)
    arguments = {name: _argument(given, elements) for name, given in kernel.meta["args"].items()}
    with Hooks(found).installed():
        function[tuple(min(int(most), PROGRAMS) for most in kernel.meta["grid"])](**arguments)
    return found


def _argument(given: Any, elements: int) -> Any:
    if not isinstance(given, str):
        return given
    if not given.startswith("*"):
        return SCALAR
    dtype = DTYPES[given[1:]]
    if dtype in (torch.int16, torch.int32, torch.int64):
        return (torch.arange(IDS) % 3).to(dtype)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(elements, generator=generator).to(dtype)
