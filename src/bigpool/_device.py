"""Device properties, asked once per device and only when an operation needs them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from .tuning import INTERPRETER, DeviceProps

if TYPE_CHECKING:
    import torch


def device_props(device: torch.device) -> DeviceProps:
    """Properties of a CUDA device; CPU tensors stand for Triton's interpreter."""
    if device.type != "cuda":
        return INTERPRETER
    import torch

    return _cuda_props(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _cuda_props(index: int) -> DeviceProps:
    import torch
    from triton.runtime import driver

    limits = driver.active.utils.get_device_properties(index)
    major, minor = torch.cuda.get_device_capability(index)
    return DeviceProps(
        torch.cuda.get_device_name(index), 10 * major + minor, limits["multiprocessor_count"], limits["max_shared_mem"]
    )
