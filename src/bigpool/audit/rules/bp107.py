"""BP107: the cast comes after the multiply."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._rule import Rule

if TYPE_CHECKING:
    from ..candidate import Candidate

TEXT = """
`(a * b).to(tl.int64)` widens a product that has already wrapped. A fix that mentions int64 is not yet a fix: the order
of the extension and the multiply decides.

```python
offset = (row * stride_row).to(tl.int64)  # the product is evaluated in 32 bits
```

Widen an operand, best where it is made:

```python
offset = row.to(tl.int64) * stride_row
```
"""


def matches(found: Candidate) -> bool:
    via = found.observed.via
    return via is not None and via.op == "ext" and via.detail == "explicit" and not found.compared


def noun(found: Candidate) -> str:
    return f"product {found.wall.formula}, widened only afterwards,"


RULE = Rule("BP107", "cast after the multiply", TEXT, matches, noun)
