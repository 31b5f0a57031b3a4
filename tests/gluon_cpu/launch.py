"""Kernels as Python functions over the emulated language, and their launch."""

from __future__ import annotations

import itertools
import types
from collections.abc import Mapping
from typing import Any

import triton.language as tl

from .language import NAMES
from .memory import Descriptor
from .threads import Program, current
from .values import wrap


class Emulated:
    """A kernel to launch: `Emulated(kernel)[grid](arguments)`. `seed` decides the order in which warps run; `haste`: see
    `threads.Program`. `instead`: modules that stand for others, by the names of these. `launches`: the grids."""

    def __init__(
        self, kernel: Any, *, seed: int = 0, haste: float = 0.5, instead: Mapping[str, types.ModuleType] | None = None
    ) -> None:
        self.kernel, self.seed, self.haste, self.instead = kernel, seed, haste, instead or {}
        self.arg_names = kernel.arg_names
        self.launches: list[tuple[int, ...]] = []
        self._globals: dict[int, dict[str, Any]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*given: Any, **named: Any) -> None:
            self.launches.append(grid)
            function = self._emulated(self.kernel)
            arguments = dict(zip(self.arg_names, given, strict=False))
            arguments |= {name: value for name, value in named.items() if name in self.arg_names}
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

    def _emulated(self, kernel: Any) -> Any:
        """The Python function of a jitted one, where every name of Triton stands for what emulates it."""
        function = kernel.fn
        module = self.instead.get(function.__globals__["__name__"])
        if module is not None:
            function = getattr(module, function.__name__).fn
        original = function.__globals__
        if id(original) not in self._globals:
            made = self._globals[id(original)] = dict(original)
            for name, value in original.items():
                if name in NAMES:
                    made[name] = NAMES[name]
                elif isinstance(value, tl.constexpr):
                    made[name] = value.value
                elif hasattr(value, "fn") and hasattr(value, "arg_names"):
                    made[name] = self._emulated(value)
            made["range"] = NAMES["range"]
        return types.FunctionType(
            function.__code__, self._globals[id(original)], function.__name__, function.__defaults__, function.__closure__
        )


def _argument(value: Any) -> Any:
    return Descriptor(value) if hasattr(value, "block_shape") else wrap(value)
