"""Puts the capture between a launch and Triton, and takes it out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from .capture import Capture, has_device


class _OfInstances:
    """A hook for what older versions of Triton set on each instance: a data descriptor comes before the instance."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else partial(self.hook, instance)

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__["run"] = value


class Hooks:
    """The functions of Triton that lead to a kernel, each with a capture before it."""

    def __init__(self, found: Capture) -> None:
        import triton
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        self.found = found
        self.inside = found._inside
        self.run_jit, self.run_tuned = JITFunction.run, Autotuner.run
        self.run_interpreted: Any = InterpretedFunction.__dict__.get("run")
        self.compile = triton.compiler.compiler.compile
        interpreted: Any = self._method(self.on_interpreted)
        modules = [module for module in (triton, triton.compiler, triton.compiler.compiler) if hasattr(module, "compile")]
        self.patches: list[tuple[Any, str, Any]] = [
            (JITFunction, "run", self._method(self.on_launch)),
            (InterpretedFunction, "run", interpreted if self.run_interpreted is not None else _OfInstances(interpreted)),
            (Autotuner, "run", self._method(self.on_tuned)),
            *((module, "compile", self.on_compile) for module in modules),
        ]

        if "__getitem__" in InterpretedFunction.__dict__:
            # Before 3.6 the interpreter's functions launch without `run`.
            self.patches.append((InterpretedFunction, "__getitem__", self._method(self.on_subscript)))

    @staticmethod
    def _method(hook: Callable[..., Any]) -> Callable[..., Any]:
        """A plain function, so that it binds to the object that it is called on."""
        return lambda function, *args, **kwargs: hook(function, *args, **kwargs)

    @contextmanager
    def installed(self) -> Iterator[None]:
        before = [(owner, name, owner.__dict__.get(name)) for owner, name, _ in self.patches]
        for owner, name, hook in self.patches:
            setattr(owner, name, hook)
        try:
            yield
        finally:
            for owner, name, original in before:
                if original is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)

    def executes(self) -> bool:
        return has_device() if self.found.execute is None else self.found.execute

    def on_launch(self, function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        self.found.record(function, args, kwargs, grid)
        if not self.executes():
            return None
        self.inside.launch = True
        try:
            return self.run_jit(function, *args, grid=grid, warmup=warmup, **kwargs)
        finally:
            self.inside.launch = False

    def on_interpreted(self, function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        self.found.record(function, args, kwargs, grid)
        unreal = any(getattr(value, "is_meta", False) for value in (*args, *kwargs.values()))
        idle = unreal if self.found.execute is None else not self.found.execute
        if idle or getattr(self.inside, "record_only", False):
            return None
        run = partial(self.run_interpreted, function) if self.run_interpreted is not None else function.__dict__["run"]
        return run(*args, grid=grid, warmup=warmup, **kwargs)

    def on_subscript(self, function: Any, grid: Any) -> Any:
        return partial(self.on_interpreted, function, grid=grid, warmup=False)

    def on_tuned(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Without a GPU nothing can be timed: every config is recorded, and the first one executed if anything is."""
        if self.executes() and has_device():
            return self.run_tuned(function, *args, **kwargs)
        function.nargs = dict(zip(function.arg_names, args, strict=False))
        try:
            for place, config in enumerate(function.prune_configs(kwargs)):
                self.inside.record_only = place > 0
                function.fn.run(*args, **{**kwargs, **config.all_kwargs()})
        finally:
            self.inside.record_only = False
            function.nargs = None

    def on_compile(self, src: Any, target: Any = None, options: Any = None, *rest: Any, **more: Any) -> Any:
        self.found.record_source(src, target, options)
        return self.compile(src, target, options, *rest, **more)
