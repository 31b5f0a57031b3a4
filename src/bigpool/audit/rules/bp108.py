"""BP108: a 64-bit value is narrowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..poly import Expander
from ._rule import Rule

if TYPE_CHECKING:
    from ..candidate import Candidate

TEXT = """
A 64-bit index is cut to 32 bits, `x.to(tl.int32)`, before it becomes an address: the cast undoes the width that the
tensor, or an earlier cast, had provided.

```python
offset = (row.to(tl.int64) * stride_row).to(tl.int32)  # narrowed
slot = tl.load(slot_mapping_ptr + i).to(tl.int32)  # an int64 tensor
x = tl.load(x_ptr + slot * stride_x_slot)
```

Leave the cast out.
"""


def matches(found: Candidate) -> bool:
    if found.observed.narrowing:
        return True
    through = Expander(lambda node: node.narrow and node.op != "trunc")
    return any(part.op == "trunc" for poly in through.ways(found.product.index) for mono in poly for part in mono)


def noun(found: Candidate) -> str:
    return f"value {found.wall.formula}, narrowed from 64 bits,"


RULE = Rule("BP108", "narrowing of a 64-bit value", TEXT, matches, noun)
