"""Questions about the device, answered by torch."""

import torch


def is_cuda() -> bool:
    return torch.cuda.is_available() and torch.version.cuda is not None


def is_hip() -> bool:
    return False


def is_gfx95_supported() -> bool:
    return False


def is_gfx1250_supported() -> bool:
    return False


def get_bool_env_var(name: str, default: str = "false") -> bool:
    return False


def get_device_core_count(device_id: int = 0) -> int:
    return 132
