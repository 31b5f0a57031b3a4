"""The torch operators behind the public functions, and who computes a call of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._check import Contract
from ..errors import BackendError

BACKENDS = ("auto", "triton", "torch")


class Operator:
    """`bigpool::name`, which writes in place: what torch.compile sees, and where CPU tensors meet the plain-torch twin.

    `schema`: its arguments. `launch` is for CUDA tensors; `plain` launches the kernels in plain Triton, whatever the card.
    """

    def __init__(
        self, name: str, schema: str, *, launch: Callable[..., None], twin: Callable[..., None], plain: Callable[..., None]
    ) -> None:
        self.name, self.twin, self.plain = name, twin, plain
        library: Any = torch.library.Library("bigpool", "FRAGMENT")  # type: ignore[no-untyped-call]
        tags = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
        library.define(f"{name}({schema}) -> ()", tags=tags)
        library.impl(name, launch, "CUDA")
        library.impl(name, twin, "CPU")
        # There is no shape to infer.
        torch.library.register_fake(f"bigpool::{name}", lambda *_: None, lib=library)
        # What was registered goes with it.
        self._library = library

    def run(self, backend: str, arguments: tuple[Any, ...], *, device: torch.device, dtype: torch.dtype) -> None:
        """`backend` of BACKENDS; `dtype`: what is computed in. Raises BackendError where the backend cannot run."""
        if backend == "torch":
            self.twin(*arguments)
        elif backend == "triton":
            if device.type == "cpu":
                require_interpreter(dtype)
            self.plain(*arguments)
        else:
            getattr(torch.ops.bigpool, self.name)(*arguments)


def require_backend(contract: Contract, backend: object) -> None:
    contract.require(backend in BACKENDS, "backend", " or ".join(map(repr, BACKENDS)), repr(backend), "'auto' chooses")


def require_interpreter(dtype: torch.dtype) -> None:
    """Raises BackendError unless Triton's interpreter is on and computes `dtype` rightly."""
    try:
        import triton
    except ImportError as error:
        raise BackendError("backend: expected triton to be installed, got none; pip install 'bigpool[kernels]'") from error
    if not triton.knobs.runtime.interpret:
        raise BackendError(
            "backend: expected CUDA tensors or Triton's interpreter, got CPU tensors; "
            "set TRITON_INTERPRET=1 before triton is imported, or pass backend='torch'"
        )
    if dtype == torch.bfloat16:
        raise BackendError(
            "backend: expected float16|float32 in Triton's interpreter, got bfloat16, which it computes wrongly; call .half()"
        )
