"""Public functions on CPU tensors as they run on an H200: the same plans, the Hopper kernels emulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch

from bigpool import formats
from bigpool._device import device_props
from bigpool.kernels import merge_sm90, prefill_fp8_sm90, prefill_sm90, verify_sm90, verify_ws_sm90
from bigpool.ops import _prefill_launch, _prefill_sm90, _verify_launch, _verify_sm90
from bigpool.proof.cases import hopper as cases
from bigpool.tuning import DeviceProps

from .launch import Emulated

H200 = DeviceProps("NVIDIA H200", 90, 132, 227 * 1024)
KERNELS = (
    (verify_sm90, "verify_partial_sm90_kernel"),
    (verify_ws_sm90, "verify_partial_ws_sm90_kernel"),
    (merge_sm90, "verify_merge_sm90_kernel"),
    (prefill_sm90, "prefill_sm90_kernel"),
    (prefill_fp8_sm90, "prefill_fp8_sm90_kernel"),
)


@dataclass
class Hopper:
    """The emulated kernels by name."""

    kernels: dict[str, Emulated] = field(default_factory=dict)

    @property
    def launched(self) -> list[str]:
        return [name for name, kernel in self.kernels.items() if kernel.launches]


def hopper(
    patch: pytest.MonkeyPatch, *, seed: int = 0, haste: float = 0.5, instead: Mapping[str, ModuleType] | None = None
) -> Hopper:
    """Until `patch` is undone, CPU tensors have an H200, whatever the backend. Arguments: see `Emulated`."""
    made = Hopper()
    for module, name in KERNELS:
        made.kernels[name] = Emulated(getattr(module, name), seed=seed, haste=haste, instead=instead)
        patch.setattr(module, name, made.kernels[name])
    for module in (_verify_launch, _prefill_launch):
        patch.setattr(module, "device_props", lambda device: H200)
        patch.setattr(module.OPERATOR, "run", lambda backend, arguments, launch=module.launch, **_: launch(*arguments))
    # The passes over keys are plain kernels, and run in Triton's interpreter.
    interpreted, passes = device_props(torch.device("cpu")), _prefill_launch.pick_key_passes
    patch.setattr(_prefill_launch, "pick_key_passes", lambda props, pv="exact": passes(interpreted, pv))
    for module in (_verify_sm90, _prefill_sm90, cases):
        patch.setattr(module, "has_gluon", lambda: True)
    patch.setattr(_verify_sm90, "rotate_queries", lambda q: formats.rotate(q.float()))
    return made
