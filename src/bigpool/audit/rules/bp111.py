"""BP111: a constexpr gate whose wide branch is narrow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._rule import Rule

if TYPE_CHECKING:
    from ..candidate import Candidate

TEXT = """
A constexpr chooses between a 32-bit and a 64-bit path, and the path that is meant to be wide still multiplies in 32
bits, so the guard on the host guards nothing. (The narrow path of a gate that works is not reported: the host is
expected to choose it for small tensors only. The summary says which gates were trusted. Where every launch in the file
chooses the narrow path by a constant nothing is trusted, and the path is reported under the rule of its index.)

```python
if WIDE_INDEX:
    offset = (row * stride_row).to(tl.int64)  # evaluated in 32 bits
else:
    offset = row * stride_row
```

Widen the index inside the branch, before the product:

```python
if WIDE_INDEX:
    row = row.to(tl.int64)
offset = row * stride_row
```
"""


def matches(found: Candidate) -> bool:
    gates = found.program.gates
    return any(gates.get(gate) is not None and found.span.within(span) for gate, span in found.program.gated)


def noun(found: Candidate) -> str:
    return f"product {found.wall.formula} in the branch that is meant to be wide"


RULE = Rule("BP111", "constexpr gate whose wide branch is narrow", TEXT, matches, noun)
