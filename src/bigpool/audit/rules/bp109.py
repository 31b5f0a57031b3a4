"""BP109: a mask or a loop bound wraps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._rule import Rule

if TYPE_CHECKING:
    from ..candidate import Candidate

TEXT = """
A product of 32 bits decides a mask or the bounds of a loop. When it wraps, no address goes astray: the mask is false,
or the loop does not run, and the kernel computes silent garbage.

```python
mask = row * num_cols + cols < numel  # 32 bits
```

Widen the index before the product:

```python
mask = row.to(tl.int64) * num_cols + cols < numel
```
"""


def matches(found: Candidate) -> bool:
    return found.compared


def noun(found: Candidate) -> str:
    where = "loop bound" if found.kind == "bound" else "mask"
    return f"{where} {found.wall.formula}"


RULE = Rule("BP109", "32-bit mask or loop bound", TEXT, matches, noun)
