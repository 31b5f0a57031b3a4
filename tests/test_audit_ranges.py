"""The exact interval of every expression contains what brute force gives, and a value that fits 32 bits does not wrap."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigpool.audit.expr import Node, Origin, Var, binary, close, const, extend, phi, select, unary, variable
from bigpool.audit.ranges import Ranges

SMALL = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
OPERATIONS = ("add", "sub", "mul", "min", "max", "floordiv", "mod", "shl", "shr", "and", "or", "xor")


def var(name: str, low: int, high: int, origin: Origin = Origin.SCALAR) -> Node:
    return variable(Var(name, origin, 32, low, high))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Node, list[Node]]:
    """An expression over up to three variables."""
    bounds = draw(st.lists(st.tuples(st.integers(-5, 40), st.integers(0, 6)), min_size=1, max_size=3))
    variables = [var(f"x{place}", low, low + width) for place, (low, width) in enumerate(bounds)]
    pool = [*variables, *(const(value, 32) for value in draw(st.lists(st.integers(-70_000, 70_000), min_size=1, max_size=2)))]
    for _ in range(draw(st.integers(1, 7))):
        op = draw(st.sampled_from((*OPERATIONS, "neg", "abs", "select", "ext")))
        left, right = draw(st.sampled_from(pool)), draw(st.sampled_from(pool))
        if op in ("neg", "abs"):
            pool.append(unary(op, left))
        elif op == "select":
            pool.append(select(None, left, right))
        elif op == "ext":
            pool.append(extend(left, 64))
        elif op in ("shl", "shr"):
            pool.append(binary(op, left, const(draw(st.integers(0, 9)))))
        else:
            pool.append(binary(op, left, right))
    return pool[-1], variables


def value_of(node: Node, given_values: dict[Node, int], pick: int) -> int | None:
    """The exact value, None where it is not defined (a division by zero)."""
    if node in given_values:
        return given_values[node]
    if node.op == "const":
        return node.value
    args = [value_of(arg, given_values, pick) for arg in node.args]
    if None in args:
        return None
    first, second = args[0], args[-1]
    assert first is not None
    assert second is not None
    if node.op in ("floordiv", "mod"):
        if second == 0:
            return None
        quotient = abs(first) // abs(second) * (1 if (first < 0) == (second < 0) else -1)
        return quotient if node.op == "floordiv" else first - quotient * second
    table = {
        "add": first + second,
        "sub": first - second,
        "mul": first * second,
        "min": min(first, second),
        "max": max(first, second),
        "neg": -first,
        "abs": abs(first),
        "and": first & second,
        "or": first | second,
        "xor": first ^ second,
        "ext": first,
        "select": args[pick] if node.op == "select" else 0,
        "shl": first << second if 0 <= second < 64 else 0,
        "shr": first >> second if 0 <= second < 64 else 0,
    }
    return table[node.op]


@SMALL
@given(graphs(), st.data())
def test_every_value_lies_in_the_interval(graph: tuple[Node, list[Node]], data: st.DataObject) -> None:
    root, variables = graph
    low, high = Ranges().of(root)
    spans = [range(node.var.minimum, node.var.maximum + 1) for node in variables if node.var is not None]
    for values in itertools.islice(itertools.product(*spans), 200):
        chosen = dict(zip(variables, values, strict=True))
        for pick in (0, 1):
            value = value_of(root, chosen, pick)
            assert value is None or low <= value <= high


@SMALL
@given(
    st.lists(st.tuples(st.sampled_from(("add", "sub", "mul")), st.integers(0, 2)), min_size=1, max_size=6),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=3, max_size=3),
)
def test_a_chain_that_ends_in_range_is_right_in_32_bits(chain: list[tuple[str, int]], values: list[int]) -> None:
    # The principle that intermediates which cancel are no findings, against numpy's own int32.
    nodes = [var(f"x{place}", value, value) for place, value in enumerate(values)]
    narrow = [np.array([value], np.int32) for value in values]
    node, wrapped = nodes[0], narrow[0]
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    for op, place in chain:
        node, wrapped = binary(op, node, nodes[place]), operations[op](wrapped, narrow[place])
    low, high = Ranges().of(node)
    if low >= -(2**31) and high <= 2**31 - 1:
        assert low <= int(wrapped[0]) <= high


@pytest.mark.parametrize("trips", [0, 1, 2, 7])
@pytest.mark.parametrize("step", [-3, 0, 5])
def test_a_loop_carried_value_stays_in_its_interval(trips: int, step: int) -> None:
    start = var("start", 2, 4)
    carried = phi("x", start, const(trips, 32))
    close(carried, binary("add", carried, const(step)))
    low, high = Ranges().of(carried)
    for first, turn in itertools.product((2, 3, 4), range(trips + 1)):
        assert low <= first + turn * step <= high


@pytest.mark.parametrize(("size", "tile"), [(1, 1), (5, 2), (100, 7), (64, 64)])
def test_a_tile_times_its_loop_variable_stays_below_the_end(size: int, tile: int) -> None:
    # tile * i < n + tile for i in range(cdiv(n, tile)), whatever n is: correlated, so plain intervals would not know.
    n, block = var("n", 0, 2**31 - 2**23), var("block", 1, 2**20, Origin.CONSTEXPR)
    trips = binary("floordiv", binary("add", n, binary("sub", block, const(1))), block)
    i = variable(Var("i", Origin.LOOP, 32, 0, 2**31 - 1, low=const(0), high=binary("sub", trips, const(1))))
    assert Ranges().of(binary("mul", i, block))[1] <= 2**31 - 1
    exact = Ranges(bounds={n.var: (size, size), block.var: (tile, tile)})  # type: ignore[dict-item]
    assert exact.of(binary("mul", i, block))[1] >= (-(-size // tile) - 1) * tile


def test_a_program_id_times_its_share_stays_below_the_whole() -> None:
    pid = variable(Var("pid", Origin.PROGRAM_ID, 32, 0, 65534, axis=1))
    programs = variable(Var("programs", Origin.NUM_PROGRAMS, 32, 1, 65535, axis=1))
    n = var("n", 0, 2**31 - 2**23)
    share = binary("floordiv", binary("add", n, binary("sub", programs, const(1))), programs)
    assert Ranges().of(binary("mul", pid, share))[1] <= 2**31 - 1
    other = variable(Var("other", Origin.PROGRAM_ID, 32, 0, 65534, axis=2))
    assert Ranges().of(binary("mul", other, share))[1] > 2**31 - 1


def test_division_undoes_a_product() -> None:
    pid = variable(Var("pid", Origin.PROGRAM_ID, 32, 0, 2**31 - 2, axis=0))
    group, columns = var("GROUP", 1, 2**20, Origin.CONSTEXPR), var("columns", 1, 2**31 - 2**23)
    first = binary("mul", binary("floordiv", pid, binary("mul", group, columns)), group)
    assert Ranges().of(first)[1] <= 2**31 - 2
