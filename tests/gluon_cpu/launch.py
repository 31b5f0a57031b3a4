"""Kernels as Python functions over the emulated language, and their launch."""

from __future__ import annotations

import itertools
import types
from typing import Any

import triton.language as tl

from .language import NAMES
from .memory import Descriptor
from .threads import Program, current
from .values import wrap

_globals: dict[int, dict[str, Any]] = {}


def emulate(kernel: Any) -> Any:
    """The Python function of a jitted one, where every name of Triton stands for what emulates it."""
    function = kernel.fn
    original = function.__globals__
    if id(original) not in _globals:
        made = _globals[id(original)] = dict(original)
        for name, value in original.items():
            if name in NAMES:
                made[name] = NAMES[name]
            elif isinstance(value, tl.constexpr):
                made[name] = value.value
            elif hasattr(value, "fn") and hasattr(value, "arg_names"):
                made[name] = emulate(value)
        made["range"] = NAMES["range"]
    return types.FunctionType(
        function.__code__, _globals[id(original)], function.__name__, function.__defaults__, function.__closure__
    )


class Emulated:
    """A kernel to launch: `Emulated(kernel)[grid](arguments)`. `seed` decides the order in which warps run; `haste`: see
    `threads.Program`. `launches`: what was launched, the name of the kernel and the grid."""

    def __init__(self, kernel: Any, *, seed: int = 0, haste: float = 0.5) -> None:
        self.kernel, self.seed, self.haste = kernel, seed, haste
        self.arg_names = kernel.arg_names
        self.launches: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*given: Any, **named: Any) -> None:
            self.launches.append(grid)
            function = emulate(self.kernel)
            names = self.arg_names
            arguments = dict(zip(names, given, strict=False)) | {name: value for name, value in named.items() if name in names}
            constants = self.kernel.fn.__annotations__
            ready = {name: value if name in constants else _argument(value) for name, value in arguments.items()}
            whole = (*grid, 1, 1)[:3]
            for ids in itertools.product(*(range(size) for size in whole)):
                running = Program(ids, whole, self.seed, self.haste)
                current.append(running)
                try:
                    running.run(lambda: function(**ready), named.get("num_warps", 4))
                finally:
                    current.pop()

        return launch


def _argument(value: Any) -> Any:
    return Descriptor(value) if hasattr(value, "block_shape") else wrap(value)
