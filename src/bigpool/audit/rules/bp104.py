"""BP104: an expert id, times the stride of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..expr import Origin
from ._rule import EXPERT, Rule, by, names

if TYPE_CHECKING:
    from ..candidate import Candidate

TEXT = """
The weights of one expert have 2^22 to 2^26 elements, so an int32 expert id wraps at expert 512 down to 32. The id is
loaded, or is computed in the kernel from a scan of group sizes, or is a program id.

```python
expert = tl.load(expert_ids_ptr + pid_m)
w = tl.load(w_ptr + expert * stride_w_expert + offs)  # 32 bits
```

Widen once, where the id is made:

```python
expert = tl.load(expert_ids_ptr + pid_m).to(tl.int64)
```
"""


def matches(found: Candidate) -> bool:
    return found.origin in (Origin.LOAD, Origin.PROGRAM_ID, Origin.LOOP) and bool(EXPERT.search(names(found)))


def noun(found: Candidate) -> str:
    return f"expert id {by(found)}"


RULE = Rule("BP104", "expert id times the stride of the weights", TEXT, matches, noun)
