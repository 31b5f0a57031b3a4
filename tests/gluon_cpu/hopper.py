"""Public functions on CPU tensors as they run on an H200: the same plans, the Hopper kernels emulated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from bigpool import formats
from bigpool.kernels import merge_sm90, prefill_sm90, verify_sm90, verify_ws_sm90
from bigpool.ops import _operator, _prefill_launch, _prefill_sm90, _verify_launch, _verify_sm90
from bigpool.tuning import DeviceProps

from .launch import Emulated

H200 = DeviceProps("NVIDIA H200", 90, 132, 227 * 1024)
KERNELS = (
    (verify_sm90, "verify_partial_sm90_kernel"),
    (verify_ws_sm90, "verify_partial_ws_sm90_kernel"),
    (merge_sm90, "verify_merge_sm90_kernel"),
    (prefill_sm90, "prefill_sm90_kernel"),
)


@dataclass
class Hopper:
    """The emulated kernels by name."""

    kernels: dict[str, Emulated] = field(default_factory=dict)

    @property
    def launched(self) -> list[str]:
        return [name for name, kernel in self.kernels.items() if kernel.launches]


def hopper(patch: pytest.MonkeyPatch, *, seed: int = 0, haste: float = 0.5) -> Hopper:
    """Until `patch` is undone, backend="triton" on CPU tensors is backend="auto" on an H200."""
    made = Hopper()
    for module, name in KERNELS:
        made.kernels[name] = Emulated(getattr(module, name), seed=seed, haste=haste)
        patch.setattr(module, name, made.kernels[name])
    for module in (_verify_launch, _prefill_launch):
        patch.setattr(module, "device_props", lambda device: H200)
        patch.setattr(module.OPERATOR, "plain", module.launch)
    for module in (_verify_sm90, _prefill_sm90):
        patch.setattr(module, "has_gluon", lambda: True)
    patch.setattr(_verify_sm90, "rotate_queries", lambda q: formats.rotate(q.float()))
    patch.setattr(_operator, "require_interpreter", lambda dtype: None)
    return made


def runs(call: Any, **options: Any) -> Any:
    return call(**options, backend="triton", return_lse=True)
