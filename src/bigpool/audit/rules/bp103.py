"""BP103: a program id or a loop variable, times a stride."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..expr import Origin
from ._rule import Rule, by

if TYPE_CHECKING:
    from ..candidate import Candidate

TEXT = """
`tl.program_id` is an int32, and so is a loop variable over int32 bounds. Times a row stride (with or without a tile and
an `arange` added first) it wraps when the tensor has 2^31 elements. Axis 0 of a grid goes up to 2^31 - 1, axes 1 and 2
up to 65,535. The index may be harmless and the stride the surprise: a view of a fused projection, a batch stride.

```python
row = tl.program_id(0)
x = tl.load(x_ptr + row * stride_x_row + cols)  # 32 bits
```

Widen once, where the index is made:

```python
row = tl.program_id(0).to(tl.int64)
```

Do not widen all strides instead: that has cost others a factor of 60.
"""


def matches(found: Candidate) -> bool:
    return found.origin in (Origin.PROGRAM_ID, Origin.LOOP, Origin.UNKNOWN)


def noun(found: Candidate) -> str:
    kind = {Origin.PROGRAM_ID: "program id", Origin.LOOP: "loop variable"}.get(found.origin, "index")
    return f"{kind} {by(found)}"


RULE = Rule("BP103", "program id or loop variable times a stride", TEXT, matches, noun)
