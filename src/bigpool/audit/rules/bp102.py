"""BP102: a token or row id out of an index tensor, times a stride."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..expr import Origin
from ._rule import EXPERT, TOKEN, Rule, by, names

if TYPE_CHECKING:
    from ..candidate import Candidate

TEXT = """
A token or row number is loaded from an index tensor (`cu_seqlens`, `sorted_token_ids`, `src2dst`, ...) as int32 and
multiplied by the length of a row. With rows of 8,192 elements the product wraps at row 262,144. What bounds it is the
largest number of tokens, times top-k, times ranks.

```python
token = tl.load(sorted_ids_ptr + offs)
x = tl.load(x_ptr + token[:, None] * stride_x_token + cols)  # 32 bits
```

Widen once, on the load:

```python
token = tl.load(sorted_ids_ptr + offs).to(tl.int64)
```
"""


def matches(found: Candidate) -> bool:
    return found.origin is Origin.LOAD and bool(TOKEN.search(names(found))) and not EXPERT.search(names(found))


def noun(found: Candidate) -> str:
    return f"row index from a load {by(found)}"


RULE = Rule("BP102", "token or row id times a stride", TEXT, matches, noun)
