"""Checks of tensor arguments: named axes bound across arguments, one error grammar, all faults listed together.

slot_mapping: expected int64 [num_tokens=512], got int32 [512]; call slot_mapping.long()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.int64` -> `int64`."""
    return str(dtype).removeprefix("torch.")


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether two indices may share an element: some stride is shorter than what lies inside it."""
    inside = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        if stride < inside:
            return True
        inside = stride * (size - 1) + inside
    return False


def usable_device(function: str, device: Any) -> torch.device:
    """`device` as torch has it. Raises ArgumentError where it is none, or none of this machine."""
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ArgumentError(function, f"device: expected a device of torch, got {device!r}; pass 'cuda' or 'cpu'") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(function, f"device: expected one of this machine, got {found}, and torch finds no GPU; pass 'cpu'")
    return found


class Contract:
    """Collects the faults of one call. Axes are bound by the first tensor that names them."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.axes: dict[str, int] = {}
        self.faults: list[str] = []

    def fault(self, name: str, expected: str, got: str, remedy: str) -> None:
        """Adds `name: expected ..., got ...; remedy`."""
        self.faults.append(f"{name}: expected {expected}, got {got}; {remedy}")

    def tensor(
        self,
        name: str,
        value: Any,
        axes: str,
        dtypes: Sequence[torch.dtype],
        remedy: str,
        *,
        device: torch.device | None = None,
        written: bool = False,
        any_strides: bool = False,
    ) -> bool:
        """Checks dtype, rank, named axes ("num_reqs+1" is arithmetic on a bound axis), device and strides.

        The last stride has to be 1 unless `any_strides`. A tensor that is `written` must not hold an element twice.
        """
        import torch

        names = axes.split()
        if not isinstance(value, torch.Tensor):
            self.fault(name, f"a tensor {self._shape(names)}", type(value).__name__, "pass a torch.Tensor")
            return False
        ok = value.dtype in dtypes and value.dim() == len(names)
        if ok:
            for axis, size in zip(names, value.shape, strict=True):
                base, _, plus = axis.partition("+")
                extra = int(plus) if plus else 0
                if base not in self.axes:
                    self.axes[base] = size - extra
                elif self.axes[base] + extra != size:
                    ok = False
        if not ok:
            got = f"{dtype_name(value.dtype)} {list(value.shape)}"
            self.fault(name, f"{self._dtypes(dtypes)} {self._shape(names)}", got, remedy)
            return False
        if device is not None and value.device != device:
            self.fault(name, f"device {device}", str(value.device), f"call {name}.to({str(device)!r})")
            return False
        if not any_strides and value.shape[-1] > 1 and value.stride(-1) != 1:
            self.fault(name, "stride 1 in the last axis", str(value.stride(-1)), f"call {name}.contiguous()")
            return False
        if written and overlaps(value):
            self.fault(name, "strides that hold no element twice", str(list(value.stride())), f"call {name}.contiguous()")
            return False
        return True

    def require(self, condition: bool, name: str, expected: str, got: str, remedy: str) -> bool:
        """A fault of an argument unless `condition` holds."""
        if not condition:
            self.fault(name, expected, got, remedy)
        return condition

    def finish(self) -> None:
        """Raises one ArgumentError that lists every fault."""
        if self.faults:
            raise ArgumentError(self.function, *self.faults)

    def _dtypes(self, dtypes: Sequence[torch.dtype]) -> str:
        return "|".join(dtype_name(d) for d in dtypes)

    def _shape(self, names: Sequence[str]) -> str:
        def one(axis: str) -> str:
            base, _, plus = axis.partition("+")
            if base not in self.axes:
                return axis
            return f"{axis}={self.axes[base] + (int(plus) if plus else 0)}"

        return "[" + ", ".join(one(axis) for axis in names) + "]"
