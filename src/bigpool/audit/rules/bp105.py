"""BP105: a chained linear index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..expr import Origin
from ._rule import Rule, chain

if TYPE_CHECKING:
    from ..candidate import Candidate

TEXT = """
A linear index is built by a chain of products, `((b * NT + t) * H + h) * K * V`, into scratch or state. Each factor is
small, the product is not. Scratch may be larger than today's request, and a writer and a reader that wrap alike give
the right output while they overwrite foreign memory.

```python
offset = ((b * NT + t) * H + h) * K * V  # 32 bits
```

Widen the outermost index where it is made, so that every later product is evaluated in 64 bits:

```python
b = tl.program_id(0).to(tl.int64)
```
"""


def matches(found: Candidate) -> bool:
    return found.origin is Origin.SCALAR or (chain(found.product.node) > 1 and found.origin is not Origin.LOAD)


def noun(found: Candidate) -> str:
    return f"linear index {found.wall.formula}"


RULE = Rule("BP105", "chained linear index", TEXT, matches, noun)
