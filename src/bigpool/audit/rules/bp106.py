"""BP106: a flat index over all elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..expr import Origin, walk
from ..growth import OFFSET_SCALE
from ._rule import Rule, chain

if TYPE_CHECKING:
    from ..candidate import Candidate

TEXT = """
`tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)` runs over all elements of a tensor. It wraps at 2^31 elements. Then the
mask `offs < numel` is true for a negative offset, and the kernel accesses memory below the tensor.

```python
offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # 32 bits
x = tl.load(x_ptr + offs, mask=offs < numel)
```

Widen the program id:

```python
offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
```
"""


def matches(found: Candidate) -> bool:
    var = found.var
    small = found.flat and found.shape.grows == 1 and found.shape.constant < OFFSET_SCALE
    if small and found.origin is Origin.LOOP and var is not None and var.low is not None:
        # A grid-stride loop starts at its program id.
        return any(node.var is not None and node.var.origin is Origin.PROGRAM_ID for node in walk(var.low))
    if chain(found.product.node) > 1 or (found.origin is Origin.PROGRAM_ID and found.product.index is not found.variable):
        return False
    if not found.flat or found.shape.grows != 1 or found.origin is not Origin.PROGRAM_ID or found.compared:
        return False
    # `BLOCK` lanes for each program, one after the other: the length of the arange is what the program id is multiplied with.
    lanes = [
        node.var.high
        for term in found.observed.sink.terms
        for node in walk(term)
        if node.var is not None and node.var.origin is Origin.ARANGE
    ]
    steps = found.product.factors
    return any(
        high is not None
        and len(steps) == 1
        and (
            high.args[:1] == steps
            or (
                high.op == steps[0].op == "const"
                and (not steps[0].name or steps[0].detail == "constexpr")
                and high.value + 1 == steps[0].value
            )
        )
        for high in lanes
    )


def noun(found: Candidate) -> str:
    return "index over all elements"


RULE = Rule("BP106", "flat index over all elements", TEXT, matches, noun)
