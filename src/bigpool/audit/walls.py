"""Where the wall is: the first value of an index at which a product or a sum no longer fits."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from math import prod

from .expr import Node, Origin, walk
from .facts import Copies
from .finding import Wall
from .growth import Growth
from .poly import Mono, Poly, plus, strip, without
from .ranges import MAX_IDENTITIES, Interval, Ranges
from .slices import Observed

# What an unknown stride is exemplified by.
EXAMPLE = {"page": 901_120, "expert": 2**24}
EXAMPLE_ROW = 8192
# A product of more is named by its first factors.
MAX_FACTORS = 12
MAX_PARTS = 200
# Nodes and terms that one evaluation of a search for a wall may look at, and all evaluations for a kernel together. A wall
# that takes more is given as a formula.
WORK, WORK_OF_A_KERNEL = 3_000, 200_000


@dataclass(frozen=True, slots=True)
class Product:
    """The operation that wraps: `index` times `factors`."""

    node: Node
    index: Node
    factors: tuple[Node, ...]


def culprit(root: Node, observed: Observed, ranges: Ranges, growth: Growth, mono: Mono = ()) -> list[Node]:
    """The way from `root` to the operation under it that leaves the range: a product of the sum rather than the sum.

    Of several, the one that `mono`, the term that was judged, is computed by.
    """
    node = root
    low, high = observed.limits
    way = [root]
    for _ in range(200):
        if node.op == "phi" and node.args[-1].op in ("add", "sub", "mul"):
            return [*way, node.args[-1]]
        if node.op in ("add", "sub", "neg", "ext", "select"):
            parts = [part for part in node.args[:2] if growth.kind(part) != "tile"]
            over = [part for part in parts if not low <= ranges.of(part)[0] <= ranges.of(part)[1] <= high]
            over = [part for part in over if part.op not in ("var", "const") and (part.narrow or observed.narrowing)]
            if not over:
                return way
            judged = [part for part in over if any(mono in poly for poly in ranges.expander.ways(part))]
            node = max(judged or over, key=lambda part: ranges.of(part)[1])
            way.append(node)
            continue
        return way
    return way


def earliest(way: list[Node], mono: Mono, coefficient: int, growth: Growth) -> Node:
    """The operation on a way that leaves the range first: the product at its end, or a sum that is a whole step ahead of it.

    `mono` times `coefficient` is the term that was judged; a step is what one more of its index adds.
    """
    ranges = growth.ranges
    last = ranges.expander.ways(way[-1])
    steps = [without(mono, (factor,)) for factor in mono if growth.kind(factor) == "index"]
    for node in reversed(way[:-1]):
        ways = ranges.expander.ways(node)
        if node.op != "add" or not node.narrow or way[-1].op not in ("mul", "shl") or len(ways) != 1 or len(last) != 1:
            continue
        ahead = plus(ways[0], last[0], -1)
        whole = any(step is not None and ahead.get(step, 0) >= coefficient > 0 for step in steps)
        if whole and all(amount > 0 and ranges.of_mono(other, amount)[0] >= 0 for other, amount in ahead.items()):
            return node
    return way[-1]


def product(node: Node, growth: Growth) -> Product:
    """Takes an operation apart: the index, and what it is multiplied with."""
    factors: list[Node] = []
    index = node
    while strip(index).op in ("mul", "shl") and len(factors) < MAX_FACTORS:
        inner = strip(index)
        left, right = inner.args
        if inner.op == "shl":
            factors.append(
                Node("const", (), 0, True, None, None, 1 << strip(right).value) if strip(right).op == "const" else right
            )
            index = left
            continue
        kinds = [growth.kind(left), growth.kind(right)]
        first = kinds[0] == "index" or (kinds[1] != "index" and kinds[0] != "tile")
        if kinds == ["index", "index"]:
            first = growth.main_variable(left) is not None and _rank(growth, left) <= _rank(growth, right)
        factors.append(right if first else left)
        index = left if first else right
    return Product(node, strip(index), tuple(strip(factor) for factor in reversed(factors)))


def _rank(growth: Growth, node: Node) -> int:
    main = growth.main_variable(node)
    order = [Origin.LOAD, Origin.PROGRAM_ID, Origin.LOOP, Origin.UNKNOWN]
    return 9 if main is None or main.var is None else order.index(main.var.origin)


@dataclass(slots=True)
class Effort:
    """What is left to spend on walls."""

    left: int = WORK_OF_A_KERNEL


def solve(
    observed: Observed, found: Product, growth: Growth, chosen: Node | None, effort: Effort, copies: Copies | None = None
) -> Wall:
    """The wall of a product, and of the sum around it where the rest of the sum is known.

    `copies` has values as the lanes have them that are not masked off.
    """
    lanes = _Lanes(observed, copies)
    name = describe(found.index)
    limit = observed.limits[1]
    step_bytes = observed.sink.item_bytes or 2
    size = (limit + 1) * (1 if observed.sink.offset_bytes else step_bytes) * max(1, observed.factor)
    known: list[tuple[str, int]] = []
    unknown: list[Node] = []
    main = chosen if chosen in growth.bases(found.index) else growth.main_variable(found.index)
    for factor in found.factors:
        if main is not None and main in growth.bases(factor) and _only(factor, main):
            continue
        value = _known(factor)
        if value is None:
            unknown.append(factor)
        else:
            known.append((describe(factor), value))
    formula = " * ".join([name, *(describe(factor) for factor in found.factors)]) if found.factors else name
    tensor = None if observed.context == "compared" else size
    others = tuple(pair for pair in known if not pair[0].lstrip("-").replace(",", "").isdigit())
    if not unknown:
        value = lanes.first_bad(found.index, effort)
        alone = limit // max(1, abs(prod(value for _, value in known))) + 1
        form = "sum" if value is not None and value < alone else "product"
        base = _base(lanes, found, main, effort)
        return Wall(name, value, others, formula, limit, tensor, None, _element(observed), base, form)
    stride = describe(unknown[0])
    example_value = next((value for word, value in EXAMPLE.items() if word in f"{name} {stride}".lower()), EXAMPLE_ROW)
    if len(unknown) > 1 or observed.context == "compared":
        return Wall(name, None, others, formula, limit, tensor, None, _element(observed))
    reach = growth.ranges.of(found.index)[1]
    while limit // example_value + 1 > reach and example_value < 2**30:
        example_value *= 2
    step = example_value * max(1, prod(value for _, value in known))
    return Wall(name, None, others, formula, limit, tensor, (stride, example_value, limit // step + 1), _element(observed))


def total(observed: Observed, counts: list[Node], effort: Effort) -> Wall:
    """The wall of a sum of counts, and how large the last of them is there."""
    value = _Lanes(observed, None).first_bad(counts[-1], effort)
    base = None if value is None else (describe(counts[-1]), value)
    formula = " + ".join(map(describe, counts))
    return Wall(describe(observed.root), observed.limits[1] + 1, (), formula, observed.limits[1], None, base=base)


def _base(lanes: _Lanes, found: Product, main: Node | None, effort: Effort) -> tuple[str, int] | None:
    """The variable that the index is computed from, and its own first bad value."""
    if main is None or main is found.index:
        return None
    value = lanes.first_bad(main, effort)
    return None if value is None else (describe(main), value)


def _only(node: Node, main: Node) -> bool:
    """Whether `main` is the one variable in `node`, as far as that is quickly seen."""
    parts = list(islice(walk(node), MAX_PARTS))
    return len(parts) < MAX_PARTS and all(part is main or part.var is None or part.var.declared for part in parts)


class _Lanes:
    """What is observed, on the lanes that are not masked off."""

    def __init__(self, observed: Observed, copies: Copies | None) -> None:
        self.limits = observed.limits
        self.copies = copies or Copies({})
        self.root = self.copies.of(observed.root)
        if self.copies.exhausted:
            self.copies, self.root = Copies({}), observed.root

    def first_bad(self, index: Node, effort: Effort) -> int | None:
        """Binary search: the interval only grows with the bound of the index."""
        low, high = 0, 2**40
        ranges = _Certain(dict.fromkeys((index, self.copies.of(index)), (0, 0)))
        if not self._leaves(ranges, high):
            return None
        while low < high:
            middle = (low + high) // 2
            if effort.left <= 0:
                return None
            if self._leaves(ranges, middle):
                high = middle
            else:
                low = middle + 1
            effort.left -= WORK - max(0, ranges.work)
        return low

    def _leaves(self, ranges: _Certain, value: int) -> bool:
        ranges.at(value)
        low, high = ranges.of(self.root)
        return low < self.limits[0] or high > self.limits[1]


class _Certain(Ranges):
    """Intervals in which what nobody stated is at its smallest: a wall must be certain."""

    def at(self, value: int) -> None:
        """Starts again, with what is pinned at another value: the polynomials stay."""
        self.pinned = dict.fromkeys(self.pinned, (value, value))
        self.known.clear()
        self.work = WORK

    def of_poly(self, poly: Poly, depth: int = 0, identities: int = MAX_IDENTITIES) -> Interval:
        self.work -= len(poly)
        return super().of_poly(poly, depth, identities)

    def of(self, node: Node, depth: int = 0) -> Interval:
        var = node.var
        if node.op in ("reduce", "scan") and len(node.args) == 1:
            # Over one lane at least.
            return super().of(node.args[0], depth)
        if var is None or node.uid in self.pinned or var.declared:
            return super().of(node, depth)
        if var.origin is Origin.ARANGE:
            last = _known(var.high) if var.high is not None else None
            return 0, last or 0
        if var.low is not None:
            return super().of(node, depth)
        low = min(max(var.minimum, 0), var.maximum)
        return low, low


def _known(node: Node) -> int | None:
    if node.op == "const":
        return node.value
    if node.var is not None and (node.var.declared or node.var.minimum == node.var.maximum):
        return node.var.maximum
    if node.op in ("mul", "add", "sub") and not node.name:
        values = [_known(strip(arg)) for arg in node.args]
        if None not in values:
            return Ranges().of(node)[1]
    return None


def _element(observed: Observed) -> str:
    return observed.sink.pointer


_OPERATIONS = ("add", "sub", "mul", "floordiv", "mod", "shl", "shr", "and", "or", "xor")
SIGNS = dict(zip(_OPERATIONS, ("+", "-", "*", "//", "%", "<<", ">>", "&", "|", "^"), strict=True))


def describe(node: Node, depth: int = 0) -> str:
    """A value in the author's names."""
    node = strip(node)
    if node.name:
        return node.name
    if node.var is not None:
        return node.var.name
    if node.op == "const":
        return f"{node.value:,}"
    if depth > 3:
        return "..."
    parts = [describe(arg, depth + 1) for arg in node.args[:2]]
    if node.op in SIGNS:
        text = f" {SIGNS[node.op]} ".join(parts)
        return f"({text})" if depth or node.op in ("add", "sub") else text
    if node.op == "phi":
        return node.detail
    return f"{node.op}({', '.join(parts)})"
