"""The state of an audit of one kernel: variables, sinks, budgets."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from ..expr import MAX_TILE, Node, Origin, Program, Sink, Var, variable
from ..finding import Span
from .host import NOTHING, Host
from .modules import Library, Module
from .values import DType, Pointer, Term, Value, as_node

MAX_STEPS = 60_000
MAX_CALLS = 14


class Budget(Exception):
    """The kernel is larger than the auditor is willing to follow."""


@dataclass(frozen=True)
class Facts:
    """What was stated about parameters: element types of tensors, exact values of scalars. `host`: what launches say."""

    dtypes: dict[str, DType]
    values: dict[str, int]
    host: Host = NOTHING

    def dtype(self, name: str) -> DType | None:
        return self.dtypes.get(name) or self.dtypes.get(name.removesuffix("_ptr"))


@dataclass(eq=False)
class State:
    """What all frames of one kernel share. `muted` is above 0 while a loop is run to learn what it carries."""

    program: Program
    library: Library
    gates: dict[str, bool] = field(default_factory=dict)
    facts: Facts = field(default_factory=lambda: Facts({}, {}))
    steps: int = 0
    muted: int = 0
    accesses: int = 0
    inlined: set[tuple[str, str]] = field(default_factory=set)
    constexprs: set[str] = field(default_factory=set)
    recorded: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    fields: dict[str, Value] = field(default_factory=dict)

    def step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise Budget(f"more than {MAX_STEPS:,} operations after inlining")

    def sink(self, sink: Sink) -> None:
        key = (sink.kind, tuple(term.uid for term in (*sink.terms, *([] if sink.guard is None else [sink.guard]))))
        if not self.muted and key not in self.recorded:
            self.recorded.add(key)
            self.program.sinks.append(sink)

    def address(self, kind: str, pointer: Pointer, span: Span, item_bytes: int, guard: Node | None = None) -> None:
        terms = tuple(term.node for term in pointer.terms)
        if terms:
            self.sink(Sink(kind, terms, span, pointer.name, item_bytes, pointer.in_bytes, guard=guard))


@dataclass(eq=False)
class Frame:
    """One function that is being followed. `one_side`: it returns early by a condition that is decided when it is compiled."""

    state: State
    module: Module
    function: ast.FunctionDef
    names: dict[str, Value]
    depth: int = 0
    returned: list[Value] = field(default_factory=list)
    constants: dict[str, Value] = field(default_factory=dict)
    one_side: bool = False

    def span(self, node: ast.AST) -> Span:
        return self.module.span(node)

    def integer(self, value: Value, span: Span | None = None) -> Node | None:
        return as_node(value, span)


def constexpr(name: str, span: Span | None = None, high: int = MAX_TILE) -> Node:
    """A constexpr of unknown value."""
    return variable(Var(name, Origin.CONSTEXPR, 32, 0, high, "constexpr", span))


__all__ = ["MAX_CALLS", "Budget", "Frame", "State", "Term", "constexpr"]
