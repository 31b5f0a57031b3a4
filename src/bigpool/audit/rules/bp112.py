"""BP112: the element type of an index tensor decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..expr import Origin
from ._rule import Rule, by

if TYPE_CHECKING:
    from ..candidate import Candidate

TEXT = """
An index is loaded from a tensor whose element type the kernel does not fix, and multiplied by a stride. The same text
is safe when the caller passes int64 and wraps when it passes int32: a change far from the kernel breaks it.

```python
i = tl.load(which_ptr + pid)
x = tl.load(x_ptr + i * stride_x)  # as wide as the elements of which_ptr
```

Fix the width in the kernel:

```python
i = tl.load(which_ptr + pid).to(tl.int64)
```
"""


def matches(found: Candidate) -> bool:
    return found.origin is Origin.LOAD


def noun(found: Candidate) -> str:
    return f"loaded index, as wide as the caller's tensor, {by(found)}"


RULE = Rule("BP112", "pointer type decides safety", TEXT, matches, noun)
