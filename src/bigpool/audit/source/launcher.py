"""One function that launches kernels: what its names stand for, what it checks before a launch, how large values are then."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from .modules import dotted

MAX_DEPTH = 8
# Methods after which a tensor has the same sizes, functions that make another of the same size, reshapes of the same elements.
SAME_SHAPE = frozenset({"contiguous", "to", "detach", "clone", "float", "half", "bfloat16", "cuda", "requires_grad_"})
LIKE = frozenset({"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"})
SAME_NUMBER = frozenset({"view", "reshape", "flatten", "ravel", "unflatten", "squeeze", "unsqueeze"}) | SAME_SHAPE
ALLOCATE = frozenset({"empty", "zeros", "ones", "new_empty", "new_zeros", "new_ones"})
FILL = frozenset({"full", "new_full"})
DIVIDE = frozenset({"cdiv", "ceil_div", "div_up"})
TILE = re.compile(r"block|tile|chunk", re.I)
EXTENT = re.compile(r"\((\w+)\.shape\[0\] \* \1\.stride\[0\]\)|\((\w+)\.stride\[0\] \* \2\.shape\[0\]\)|(\w+)\.numel")
_INVERSE = {ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.NotEq: ast.Eq}
_SWAPPED = {ast.Gt: ast.Lt, ast.GtE: ast.LtE, ast.Eq: ast.Eq}


def launched(call: ast.Call) -> str:
    """The name of the kernel that a call launches, `kernel[grid](...)`; empty if it launches none."""
    return call.func.value.id if isinstance(call.func, ast.Subscript) and isinstance(call.func.value, ast.Name) else ""


class Launcher:
    """`checked(call)` gives the largest values of expressions before a launch, `bound(node, known)` that of one."""

    def __init__(self, function: ast.FunctionDef, constants: Mapping[str, ast.expr]) -> None:
        self.function = function
        self.constants = constants
        self.assigned: dict[str, list[tuple[int, ast.expr | None]]] = {}
        spec = function.args
        for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs):
            self.assigned[arg.arg] = [(function.lineno, None)]
        self.ranks: dict[str, tuple[int, int]] = {}
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(function):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
            self._assign(node)

    def _assign(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._targets(node.targets[0], node.value, node.lineno)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and not isinstance(self._statement(node), ast.Assign):
            self.assigned.setdefault(node.id, []).append((node.lineno, None))

    def _statement(self, node: ast.AST) -> ast.AST:
        while (
            not isinstance(node, ast.stmt) and not isinstance(node, (ast.comprehension, ast.NamedExpr)) and node in self.parents
        ):
            node = self.parents[node]
        return node if not isinstance(node, ast.Assign) or len(node.targets) == 1 else ast.Pass()

    def _targets(self, target: ast.expr, value: ast.expr | None, line: int) -> None:
        if isinstance(target, ast.Name):
            self.assigned.setdefault(target.id, []).append((line, value))
        elif isinstance(target, (ast.Tuple, ast.List)):
            plain = not any(isinstance(part, ast.Starred) for part in target.elts)
            if plain and (whole := _shape_of(value)):
                self.ranks[whole] = line, len(target.elts)
            for place, part in enumerate(target.elts):
                self._targets(part.value if isinstance(part, ast.Starred) else part, _item(value, place) if plain else None, line)

    def _alias(self, name: str) -> ast.expr | None:
        """What a name stands for: it is assigned once, and what that is made of does not change later."""
        found = self.assigned.get(name, [])
        if len(found) == 1 and found[0][1] is not None:
            line, value = found[0][0], found[0][1]
            assert value is not None
            used = {part.id for part in ast.walk(value) if isinstance(part, ast.Name)}
            return None if any(self._changed(other, line, 10**9) for other in used if other != name) else value
        if not found and name in self.constants:
            return self.constants[name]
        return None

    def _changed(self, name: str, first: int, last: int) -> bool:
        """Whether a name gets another value, or a tensor of another shape, between two lines."""
        return any(first < line <= last and not _keeps(value, name) for line, value in self.assigned.get(name, []))

    def resolved(self, node: ast.expr, depth: int = 0) -> ast.expr:
        """An expression behind its name; the stride of a buffer that is allocated here as the sizes inside it."""
        if depth > MAX_DEPTH:
            return node
        if isinstance(node, ast.Name) and (value := self._alias(node.id)) is not None:
            return self.resolved(value, depth + 1)
        if isinstance(node, ast.Call) and dotted(node.func) == "int" and len(node.args) == 1:
            return self.resolved(node.args[0], depth + 1)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "stride"
            and len(node.args) == 1
        ):
            owner, axis = node.func.value, node.args[0]
            inside = self._inside(self.resolved(owner, depth + 1), axis) or self._packed(owner, axis)
            return self.resolved(inside, depth + 1) if inside is not None else node
        return node

    def _inside(self, value: ast.expr, axis: ast.expr) -> ast.expr | None:
        """The stride of an axis of a new contiguous buffer: the product of the sizes behind it."""
        sizes = self._allocated(value)
        place = axis.value if isinstance(axis, ast.Constant) and isinstance(axis.value, int) else None
        if place is None or not 0 <= place < len(sizes):
            return None
        product: ast.expr | None = None
        for size in sizes[place + 1 :]:
            product = size if product is None else ast.BinOp(product, ast.Mult(), size)
        return product or ast.Constant(1)

    def _allocated(self, value: ast.expr) -> list[ast.expr]:
        """The sizes of a buffer that is allocated here."""
        name = dotted(value.func).rpartition(".")[2] if isinstance(value, ast.Call) and value.args else ""
        if not isinstance(value, ast.Call) or name not in ALLOCATE | FILL:
            return []
        first = self.resolved(value.args[0])
        # One name may be a whole shape.
        varied = value.args if len(value.args) > 1 and name in ALLOCATE else []
        sizes = list(first.elts) if isinstance(first, (ast.Tuple, ast.List)) else varied
        return [] if any(isinstance(size, ast.Starred) for size in sizes) else sizes

    def sizes(self, node: ast.expr) -> tuple[str, ...]:
        """The sizes of a tensor that is allocated here, or whose shape is taken apart; empty if they are not known."""
        value = self.resolved(node)
        if isinstance(value, ast.Call) and dotted(value.func).rpartition(".")[2] in LIKE and value.args:
            node = value.args[0]
        found = tuple(self.text(size) for size in self._allocated(self.resolved(node)))
        rank = self.ranks.get(node.id) if isinstance(node, ast.Name) else None
        if not found and isinstance(node, ast.Name) and rank is not None and not self._changed(node.id, rank[0], 10**9):
            found = tuple(f"{node.id}.shape[{axis}]" for axis in range(rank[1]))
        return found

    def _packed(self, owner: ast.expr, axis: ast.expr) -> ast.expr | None:
        """The stride of the last axis of a tensor that was made contiguous: 1."""
        name = owner.id if isinstance(owner, ast.Name) else ""
        line, value = max(self.assigned.get(name, []), key=lambda item: item[0], default=(0, None))
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute) or value.func.attr != "contiguous":
            return None
        if not any(isinstance(part, ast.Assign) and part.lineno == line for part in self.function.body):
            return None
        first, axes = self.ranks.get(name, (0, 0))
        last = {"-1"} if not axes or self._changed(name, first, 10**9) else {"-1", str(axes - 1)}
        return ast.Constant(1) if ast.unparse(axis) in last else None

    def text(self, node: ast.expr, depth: int = 0) -> str:
        """An expression in a form in which equal ones look equal."""
        node = self.resolved(node, depth)
        if depth > MAX_DEPTH:
            return ast.unparse(node)
        if isinstance(node, ast.BinOp):
            return f"({self.text(node.left, depth + 1)} {_SIGNS.get(type(node.op), '?')} {self.text(node.right, depth + 1)})"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = node.func.value, node.func.attr
            if name in ("size", "stride") and len(node.args) <= 1:
                attribute = f"{self.text(owner, depth + 1)}.{'shape' if name == 'size' else name}"
                return attribute + (f"[{ast.unparse(node.args[0])}]" if node.args else "")
            if name == "numel" and not node.args:
                return f"{self.text(owner, depth + 1)}.numel"
        if isinstance(node, ast.Attribute):
            return f"{self.text(node.value, depth + 1)}.{node.attr}"
        if isinstance(node, ast.Subscript):
            return f"{self.text(node.value, depth + 1)}[{ast.unparse(node.slice)}]"
        return ast.unparse(node)

    # What is checked.

    def checked(self, call: ast.Call) -> dict[str, int]:
        """Upper bounds of expressions that hold where a call is made."""
        known: dict[str, int] = {}
        node: ast.AST = call
        while node in self.parents and node is not self.function:
            parent = self.parents[node]
            if isinstance(parent, ast.If) and node in parent.body:
                self._learn(parent.test, True, parent.lineno, call, known)
            elif isinstance(parent, ast.If) and node in parent.orelse:
                self._learn(parent.test, False, parent.lineno, call, known)
            for block in _blocks(parent):
                if node in block:
                    for before in block[: block.index(node)]:
                        if isinstance(before, ast.Assert):
                            self._learn(before.test, True, before.lineno, call, known)
                        elif isinstance(before, ast.If) and not before.orelse and _ends(before.body):
                            self._learn(before.test, False, before.lineno, call, known)
            node = parent
        return known

    def _learn(self, test: ast.expr, holds: bool, line: int, call: ast.Call, known: dict[str, int]) -> None:
        for node, most in self._facts(test, holds):
            text = self.text(node)
            if not any(self._changed(name, line, call.lineno) for name in re.findall(r"[A-Za-z_]\w*", text)):
                known[text] = min(most, known.get(text, most))

    def _facts(self, test: ast.expr, holds: bool) -> Iterator[tuple[ast.expr, int]]:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield from self._facts(test.operand, not holds)
        elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == holds:
            for part in test.values:
                yield from self._facts(part, holds)
        elif isinstance(test, ast.Compare) and (holds or len(test.ops) == 1):
            sides = [test.left, *test.comparators]
            for left, op, right in zip(sides, test.ops, test.comparators, strict=False):
                if isinstance(op, ast.In) and holds and isinstance(right, (ast.Tuple, ast.List, ast.Set)):
                    values = [self.bound(item, {}) for item in right.elts]
                    if values and None not in values:
                        yield left, max(value for value in values if value is not None)
                    continue
                sign = type(op) if holds else _INVERSE.get(type(op))
                for one, relation, other in ((left, sign, right), (right, _SWAPPED.get(sign) if sign else None, left)):
                    most = self.bound(other, {}) if relation in (ast.Lt, ast.LtE, ast.Eq) else None
                    if most is not None and not isinstance(one, ast.Constant):
                        yield one, most - (relation is ast.Lt)

    # How large values are.

    def grid(self, node: ast.expr) -> list[ast.expr]:
        """The sizes of the axes of a grid."""
        node = self.resolved(node)
        if isinstance(node, ast.Lambda):
            node = self.resolved(node.body)
        return list(node.elts) if isinstance(node, (ast.Tuple, ast.List)) else []

    def bound(self, node: ast.expr, known: Mapping[str, int], depth: int = 0) -> int | None:
        """The largest value of an integer that is not negative, None if nothing bounds it."""
        node = self.resolved(node, depth)
        if depth > MAX_DEPTH:
            return None
        if isinstance(node, ast.Constant):
            return node.value if type(node.value) is int else None
        if (found := known.get(self.text(node, depth))) is not None:
            return found
        if isinstance(node, ast.IfExp):
            return _largest([self.bound(side, known, depth + 1) for side in (node.body, node.orelse)])
        if isinstance(node, ast.Call):
            return self._bound_of_call(node, known, depth)
        if not isinstance(node, ast.BinOp):
            return 2**31 - 1 if ast.unparse(node) == "torch.iinfo(torch.int32).max" else None
        left, right = self.bound(node.left, known, depth + 1), self.bound(node.right, known, depth + 1)
        if isinstance(node.op, (ast.Pow, ast.LShift, ast.Sub)) and left is not None and right is not None:
            return _exact(node, left, right)
        if isinstance(node.op, ast.FloorDiv) and left is not None:
            return left // right if right and _constant(node.right) else left
        if isinstance(node.op, (ast.Mult, ast.Add)) and left is not None and right is not None:
            return left * right if isinstance(node.op, ast.Mult) else left + right
        return None

    def _bound_of_call(self, node: ast.Call, known: Mapping[str, int], depth: int) -> int | None:
        name = dotted(node.func).rpartition(".")[2]
        values = [self.bound(arg, known, depth + 1) for arg in node.args]
        if name == "min" and len(values) > 1:
            return min((value for value in values if value is not None), default=None)
        if name == "max" and len(values) > 1:
            return _largest(values)
        if name in DIVIDE and len(values) == 2 and values[0] is not None:
            divisor = values[1] if values[1] and _constant(node.args[1]) else 1
            return -(-values[0] // divisor)
        if name == "next_power_of_2" and len(values) == 1 and values[0] is not None:
            return int(1 << max(0, values[0] - 1).bit_length())
        return None

    def counts_tiles(self, node: ast.expr) -> bool:
        """Whether a value is a number of tiles: `cdiv(n, BLOCK)`, however it is written."""
        node = self.resolved(node)
        divisor: ast.expr | None = None
        if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in DIVIDE and len(node.args) == 2:
            divisor = node.args[1]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv) and isinstance(node.left, ast.BinOp):
            # (n + BLOCK - 1) // BLOCK
            named = {part.id for part in ast.walk(node.left) if isinstance(part, ast.Name)}
            divisor = node.right if isinstance(node.right, ast.Name) and node.right.id in named else None
        return divisor is not None and (isinstance(divisor, ast.Constant) or TILE.search(ast.unparse(divisor)) is not None)

    def fits(self, node: ast.expr, known: Mapping[str, int], limit: int) -> str:
        """The check that keeps a tensor from having more than `limit` elements; empty if there is none."""
        root = self._tensor(node)
        for text, most in known.items():
            found = EXTENT.fullmatch(text)
            if root and found is not None and root in found.groups() and most <= limit:
                return f"{re.sub(r'stride.0.', 'stride(0)', text.strip('()')).replace('.numel', '.numel()')} <= {most:,}"
        return ""

    def _tensor(self, node: ast.expr, depth: int = 0) -> str:
        """The name of the tensor that has as many elements."""
        if isinstance(node, ast.Name):
            value = self._alias(node.id)
            return (self._tensor(value, depth + 1) if value is not None and depth < MAX_DEPTH else "") or node.id
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in LIKE and node.args:
                return self._tensor(node.args[0], depth + 1)
            if node.func.attr in SAME_NUMBER:
                return self._tensor(node.func.value, depth + 1)
        return ""


_SIGNS: dict[type[ast.operator], str] = {ast.Mult: "*", ast.Add: "+", ast.Sub: "-", ast.FloorDiv: "//", ast.Mod: "%"}


def _exact(node: ast.BinOp, left: int, right: int) -> int | None:
    """A difference, a shift or a power, where the bound of an operand is its value."""
    if not _constant(node.right) or right < 0:
        return None
    if isinstance(node.op, ast.Sub):
        return left - right
    if not _constant(node.left) or right > 64 or left > 64:
        return None
    return int(left**right) if isinstance(node.op, ast.Pow) else left << right


def _largest(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def _item(value: ast.expr | None, place: int) -> ast.expr | None:
    """One of what a tuple is assigned from: an element, or an axis of a shape."""
    if isinstance(value, (ast.Tuple, ast.List)):
        return value.elts[place] if place < len(value.elts) else None
    if isinstance(value, ast.Attribute) and value.attr == "shape":
        return ast.Subscript(value, ast.Constant(place), ast.Load())
    if (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr in ("size", "stride")
        and not value.args
    ):
        return ast.Call(value.func, [ast.Constant(place)], [])
    return None


def _shape_of(value: ast.expr | None) -> str:
    """The tensor whose whole shape an expression is."""
    if isinstance(value, ast.Call) and not value.args and isinstance(value.func, ast.Attribute) and value.func.attr == "size":
        return dotted(value.func.value)
    return dotted(value.value) if isinstance(value, ast.Attribute) and value.attr == "shape" else ""


def _keeps(value: ast.expr | None, name: str) -> bool:
    """Whether `name = value` leaves the shape of a tensor alone: `x = x.contiguous()`."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in SAME_SHAPE:
        value = value.func.value
    return isinstance(value, ast.Name) and value.id == name


def _constant(node: ast.expr) -> bool:
    return all(isinstance(part, (ast.Constant, ast.BinOp, ast.operator)) for part in ast.walk(node))


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block


def _ends(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], (ast.Raise, ast.Return, ast.Continue))
