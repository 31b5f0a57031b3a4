"""From TTIR to the expression graph: control flow, calls, and where integers start to matter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ..expr import MAX_COUNT, MAX_GRID, Node, Origin, Program, Sink, Var, close, const, phi, select, unknown, variable
from ..facts import Fact, holds, refined
from ..finding import Span
from ..ranges import Ranges
from .places import given_name, loop_variable, span
from .ttir import Block, Function, Module, Op, Place, TtirError, element, item_bytes, width
from .values import DATA, Given, Pointer, Value, merge

MAX_DEPTH = 40
_SYMBOL = re.compile(r'@("[^"]*"|[\w$.]+)')
MAX_OPS = 200_000


class Lift:
    """Builds a Program of one module. `refined` holds, by place in `program.sinks`, the sinks with masks and branches applied."""

    def __init__(
        self,
        module: Module,
        given: Given,
        own_library: Callable[[str], bool] = lambda file: False,
        shown: Callable[[str], str] = str,
    ) -> None:
        from . import memory, ops

        del memory  # it adds to the handlers
        self.handlers = ops.HANDLERS
        self.module = module
        self.given = given
        self.own_library = own_library
        self.shown = shown
        self.frames: list[dict[str, Value]] = []
        self.calls: list[Span] = []
        self.names: list[str] = []
        self.facts: list[Fact] = []
        self.programs: dict[tuple[str, int], Node] = {}
        self.ranges = Ranges()
        self.count = 0
        entry = module.entry
        self.program = Program(entry.name, self.where(entry.loc) or Span("<unknown>", 1, 1, 1, 2))
        self.refined: dict[int, Sink] = {}
        self.unknown: list[tuple[Sink, str]] = []
        self.asserted: list[tuple[Node, Span]] = []
        self.callers: dict[int, tuple[Span, ...]] = {}
        self.frames.append({arg[0]: self._argument(*arg, at) for at, arg in enumerate(entry.args)})
        self.function(entry)

    def _argument(self, ssa: str, type_: str, loc: str, at: int) -> Value:
        place = self.module.place(loc)
        spare = self.given.names[at] if at < len(self.given.names) else ssa.lstrip("%")
        name = place.name if place is not None and place.name else spare
        kind = element(type_)
        if kind.startswith("ptr<"):
            self.program.dtypes[name] = kind[4:-1]
            return Pointer(name, (), (), item_bytes(type_))
        if "tensordesc" in kind:
            return Pointer(name, block=True)
        bits = width(type_)
        if not bits:
            return DATA
        where = self.where(loc)
        origin = Origin.STRIDE if name in self.given.strides or "stride" in name.lower() else Origin.SCALAR
        if name in self.given.values:
            fixed = const(self.given.values[name], bits, where)
            fixed.name = name
            return fixed
        if name in self.given.ranges:
            low, high = self.given.ranges[name]
            return variable(Var(name, origin, bits, low, high, "assumption", where), span=where)
        high = MAX_COUNT if bits == 32 else 2 ** (bits - 1) - 1
        return variable(Var(name, origin, bits, 0, high, "type", where), span=where)

    # What operations ask for.

    def get(self, name: str) -> Value:
        return self.frames[-1].get(name, DATA)

    def node(self, name: str, bits: int = 32) -> Node:
        """An integer operand."""
        value = self.get(name)
        return value if isinstance(value, Node) else unknown("made from something that is no integer", bits)

    def place(self, op: Op) -> Place | None:
        return self.module.place(op.loc)

    def where(self, loc: str, kind: str = "") -> Span | None:
        """A place in the user's own files: what stands in Triton's library counts as where it was called."""
        place = self.module.place(loc)
        if place is None or self.own_library(place.file):
            return self.calls[-1] if self.calls else None
        found = span(place, kind)
        return replace(found, file=self.shown(found.file))

    def name_of(self, op: Op, fallback: str, kind: str = "") -> str:
        place = self.place(op)
        if place is None or self.own_library(place.file):
            return self.names[-1] if self.names and self.names[-1] else fallback
        return given_name(place, kind) or fallback

    def bounded(self, name: str, low: int, high: int) -> tuple[int, int, str]:
        if name in self.given.ranges:
            return (*self.given.ranges[name], "assumption")
        return low, high, "type"

    def program_axis(self, origin: Origin, axis: int, op: Op) -> Node:
        key = (origin.value, axis)
        word = "program_id" if origin is Origin.PROGRAM_ID else "num_programs"
        own = self.name_of(op, "")
        if key not in self.programs:
            most, source = MAX_GRID[axis], "physics"
            if self.given.grid is not None:
                most, source = (self.given.grid[axis] if axis < len(self.given.grid) else 1), "captured"
            low, high = (0, max(0, most - 1)) if origin is Origin.PROGRAM_ID else (1, max(1, most))
            if own in self.given.ranges:
                (low, high), source = self.given.ranges[own], "assumption"
            var = Var(own or f"{word}({axis})", origin, 32, low, high, source, self.where(op.loc), axis=axis)
            self.programs[key] = variable(var)
        node = self.programs[key]
        assert node.var is not None
        if own and node.var.name.startswith(word):
            node.var.name = own
        return node

    def sink(self, kind: str, terms: tuple[Node, ...], op: Op, pointer: Pointer | None = None, mask: Node | None = None) -> None:
        where = self.where(op.loc) or self.program.span
        name, item, why = (pointer.name, pointer.item_bytes, pointer.unknown) if pointer is not None else ("", 0, "")
        self._sink(Sink(kind, terms, where, name, item, unknown=why), mask)
        if pointer is None or self.given.backend != "hip" or not item or kind not in ("address", "atomic"):
            return
        narrow = tuple(term for term, many in zip(terms, pointer.tensor, strict=False) if many and term.narrow)
        if narrow and item > 1:
            count = tuple(Node("mul", (term, const(item)), 32, True, term.span or where) for term in narrow)
            self._sink(Sink(kind, count, where, name, item, offset_bytes=True), mask)

    def _sink(self, sink: Sink, mask: Node | None) -> None:
        facts = self.facts + (holds(mask) if mask is not None else [])
        if facts and (terms := refined(sink.terms, facts, self.ranges)) is not None:
            fresh = Sink(sink.kind, terms, sink.span, sink.pointer, sink.item_bytes, sink.offset_bytes, sink.unknown)
            self.refined[len(self.program.sinks)] = fresh
        self.program.sinks.append(sink)

    # Control flow.

    def function(self, function: Function) -> list[Value]:
        """Runs the blocks of a function and returns what it returns."""
        before = len(self.facts)
        returned: list[list[Value]] = []
        incoming: dict[str, list[list[Value]]] = {}
        for block in function.blocks:
            if not block.reachable:
                continue
            self._enter(block, incoming.get(block.label, []))
            self._block(block, function.blocks, incoming, returned)
        del self.facts[before:]
        return [merge(values) for values in zip(*returned, strict=True)] if returned else []

    def _enter(self, block: Block, incoming: list[list[Value]]) -> None:
        for place, (name, type_, _) in enumerate(block.args):
            values = [values[place] for values in incoming if place < len(values)]
            bits = width(type_)
            if values:
                self.frames[-1][name] = merge(values)
            elif name not in self.frames[-1]:
                self.frames[-1][name] = unknown("a value that a jump carries", bits) if bits else DATA

    def _block(
        self, block: Block, blocks: list[Block], incoming: dict[str, list[list[Value]]], returned: list[list[Value]]
    ) -> None:
        for op in block.ops:
            if op.name in ("tt.return", "func.return"):
                returned.append([self.get(name) for name in op.operands])
            elif op.name in ("cf.br", "cf.cond_br"):
                self._jump(op, blocks, incoming)
            else:
                self.operation(op)

    def _jump(self, op: Op, blocks: list[Block], incoming: dict[str, list[list[Value]]]) -> None:
        by_label = {block.label: block for block in blocks}
        targets = op.text.split("^")[1:]
        labels = []
        for target in targets:
            label, _, rest = target.partition("(")
            label = label.strip().rstrip(",").split(":")[0].strip()
            labels.append(label)
            names = [word for word in rest.replace(",", " ").split() if word.startswith("%")]
            incoming.setdefault(label, []).append([self.get(name) for name in names])
        if op.name == "cf.cond_br" and len(labels) == 2:
            leaves = [_only_returns(by_label.get(label)) for label in labels]
            condition = self.node(op.operands[0], 1)
            self.sink("mask", (condition,), op)
            if leaves[0] != leaves[1]:
                # An early return: from here on the other side holds.
                self.facts += holds(condition, wanted=leaves[1])

    def region(self, blocks: list[Block], facts: list[Fact] | None = None) -> list[Value]:
        """Runs the block of a region and returns what it yields."""
        before = len(self.facts)
        self.facts += facts or []
        yielded: list[Value] = []
        for block in blocks:
            for op in block.ops:
                if op.name in ("scf.yield", "scf.condition", "tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return"):
                    yielded = [self.get(name) for name in op.operands]
                else:
                    self.operation(op)
        del self.facts[before:]
        return yielded

    def operation(self, op: Op) -> None:
        self.count += 1
        if self.count > MAX_OPS:
            raise TtirError(f"more than {MAX_OPS:,} operations")
        handler = self.handlers.get(op.name)
        results = handler(self, op) if handler is not None else self._unknown(op)
        for name, value in zip(op.results, results, strict=False):
            self.frames[-1][name] = value
            if self.calls and isinstance(value, Node):
                self.callers.setdefault(value.uid, tuple(self.calls))

    def _unknown(self, op: Op) -> list[Value]:
        for region in op.regions:
            self.region(region)
        kinds = (op.types.rpartition("->")[2] if "->" in op.types else op.types).strip().strip("()")
        bits = width(kinds)
        if not bits:
            reason = f"{op.name} makes an address that is not understood"
            return [
                Pointer("?", unknown=reason, item_bytes=item_bytes(kinds)) if element(kinds).startswith("ptr<") else DATA
                for _ in op.results
            ]
        return [unknown(f"{op.name} is not understood", bits, self.where(op.loc)) for _ in op.results]

    def call(self, op: Op) -> list[Value]:
        symbol = _SYMBOL.match(op.text)
        name = symbol[1].strip('"') if symbol is not None else op.text
        function = self.module.functions.get(name)
        if function is None or len(self.frames) > MAX_DEPTH:
            bits = width(op.types.rpartition("->")[2])
            return [unknown(f"{name} is not followed", bits) if bits else DATA for _ in op.results]
        where = self.where(op.loc)
        place = self.place(op)
        outer = self.frames[-1]
        self.calls.append(where or self.program.span)
        named = (
            given_name(place) if place is not None and not self.own_library(place.file) else self.names[-1] if self.names else ""
        )
        self.names.append(named)
        self.frames.append({arg[0]: outer.get(value, DATA) for arg, value in zip(function.args, op.operands, strict=False)})
        results = self.function(function)
        self.frames.pop()
        self.names.pop()
        self.calls.pop()
        if named and len(results) == 1:
            self.rename(results[0], named)
        return results

    def rename(self, value: Value, name: str) -> None:
        """The author's name for a value that a helper made without one."""
        if isinstance(value, Node):
            if value.var is not None and value.var.origin is Origin.LOAD and value.var.name.endswith("[...]"):
                value.var.name = name
            elif value.var is None and not value.name and value.op != "const":
                value.name = name

    @contextmanager
    def loop(self) -> Iterator[None]:
        before = len(self.facts)
        yield
        del self.facts[before:]

    def for_loop(self, op: Op) -> list[Value]:
        head = op.text
        start, end, step = op.operands[1:4] if op.operands[0] == head.split()[0] else op.operands[:3]
        low, high, by = self.node(start), self.node(end), self.node(step)
        where = self.where(op.loc)
        place = self.place(op)
        self.sink("bound", (high,), op)
        name = (loop_variable(place) if place is not None else "") or head.split()[0].lstrip("%")
        counter = Var(name, Origin.LOOP, high.width or 32, *high.limits, "type", where)
        counter.low, counter.high = low, Node("sub", (high, const(1)), 0, True, where)
        # A loop counter that starts below its end stays within both.
        carried = _iter_args(head)
        trips = Node("floordiv", (Node("sub", (high, low), 0), by), 0) if self.ranges.of(by)[0] > 0 else None
        frame = self.frames[-1]
        frame[head.split()[0]] = variable(counter)
        slots = self._carry(carried, trips)
        yielded = self.region(op.regions[0])
        return self._close(carried, slots, yielded, op)

    def while_loop(self, op: Op) -> list[Value]:
        carried = _iter_args(op.text)
        slots = self._carry(carried, None)
        condition_block, body = op.regions[0], op.regions[1] if len(op.regions) > 1 else []
        before = len(self.facts)
        passed: list[Value] = []
        for inner in condition_block[0].ops:
            if inner.name == "scf.condition":
                condition = self.node(inner.operands[0], 1)
                self.sink("bound", (condition,), inner)
                self.facts += holds(condition)
                passed = [self.get(name) for name in inner.operands[1:]]
            else:
                self.operation(inner)
        for (name, _, _), value in zip(body[0].args if body else [], passed, strict=False):
            self.frames[-1][name] = value
        yielded = self.region(body)
        del self.facts[before:]
        self._close(carried, slots, yielded, op)
        return passed

    def _carry(self, carried: list[tuple[str, str]], trips: Node | None) -> list[Value]:
        slots: list[Value] = []
        for inner, outer in carried:
            value = self.get(outer)
            if isinstance(value, Node):
                place_name = inner.lstrip("%").rstrip("0123456789").rstrip("_") or inner
                value = phi(place_name, value, trips, value.span)
            self.frames[-1][inner] = value
            slots.append(value)
        return slots

    def _close(self, carried: list[tuple[str, str]], slots: list[Value], yielded: list[Value], op: Op) -> list[Value]:
        results: list[Value] = []
        for slot, after in zip(slots, yielded, strict=False):
            if isinstance(slot, Node) and slot.op == "phi":
                close(slot, after if isinstance(after, Node) else unknown("carried by a loop", slot.width))
            elif isinstance(slot, Pointer) and isinstance(after, Pointer) and after.terms != slot.terms:
                # A pointer that moves is 64 bits wide; each step is extended on its own.
                if after.terms[: len(slot.terms)] == slot.terms:
                    moved = after.terms[len(slot.terms) :]
                    self.sink("address", moved, op, Pointer(after.name, moved, after.tensor, after.item_bytes, after.unknown))
                else:
                    self.sink("address", after.terms, op, after)
            results.append(slot)
        return results

    def if_op(self, op: Op) -> list[Value]:
        condition = self.node(op.operands[0], 1)
        self.sink("mask", (condition,), op)
        first = self.region(op.regions[0], holds(condition))
        if len(op.regions) < 2:
            return first
        second = self.region(op.regions[1], holds(condition, wanted=False))
        return [self.choose(condition, a, b) for a, b in zip(first, second, strict=False)]

    def choose(self, condition: Node, left: Value, right: Value) -> Value:
        if isinstance(left, Node) and isinstance(right, Node):
            yes = refined((left,), holds(condition), self.ranges) or (left,)
            no = refined((right,), holds(condition, wanted=False), self.ranges) or (right,)
            return select(condition, yes[0], no[0], left.span)
        return merge([left, right])


def _only_returns(block: Block | None) -> bool:
    return block is not None and bool(block.ops) and all(op.name == "tt.return" for op in block.ops)


def _iter_args(text: str) -> list[tuple[str, str]]:
    """(inside, before) of `iter_args(%a = %b, ...)` or of the arguments of a while."""
    start = text.find("iter_args(")
    inside = text[start + 10 :] if start >= 0 else text if text.startswith("(%") else ""
    inside = inside.lstrip("(").partition(")")[0]
    pairs = [part.split("=") for part in inside.split(",") if "=" in part]
    return [(inner.strip(), outer.strip()) for inner, outer in pairs]
