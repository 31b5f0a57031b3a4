"""Loops that the interpreter counts otherwise than a GPU."""

from __future__ import annotations

import pytest

from bigpool.proof.loops import list_loops

KERNEL = """@triton.jit
def kernel(p, n, N: tl.constexpr):
    for i in {loop}:
        {body}
"""


@pytest.mark.parametrize(
    ("loop", "body", "lines"),
    [
        ("range(n)", "tl.store(p + i * n, 0)", [3]),
        ("tl.range(0, n, num_stages=2)", "x = p + i", [3]),
        ("tl.static_range(N)", "x = p + i", []),
        ("range(n)", "p += n", []),
        ("names", "x = p + i", []),
    ],
)
def test_loops_whose_variable_is_used(loop: str, body: str, lines: list[int]) -> None:
    assert list_loops(KERNEL.format(loop=loop, body=body)) == lines


def test_a_loop_outside_kernels_is_python_s_own() -> None:
    assert list_loops(KERNEL.replace("@triton.jit", "@cache").format(loop="range(n)", body="print(i)")) == []
