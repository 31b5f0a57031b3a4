"""BP101: an id out of a table, times a stride."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..expr import Origin
from ._rule import EXPERT, TABLE, Rule, by, names

if TYPE_CHECKING:
    from ..candidate import Candidate

TEXT = """
A page id, slot or state index is loaded from a table of int32 and multiplied by a stride. Triton evaluates the product
in 32 bits. It wraps as soon as the tensor view that it addresses has 2^31 elements: 4 GiB of bf16, 2 GiB of an 8-bit
dtype. The kernel then reads or writes below the pool. The values of the table, not its length, decide, so the kernel
breaks without an edit when the pool grows.

```python
page = tl.load(block_table_ptr + col)
k = tl.load(k_ptr + page * stride_k_page + offs)  # 32 bits
```

Widen once, on the load:

```python
page = tl.load(block_table_ptr + col).to(tl.int64)
```

Not a bug where the number of pages is bounded below the wall: say so with `--assume "block_table < 2048"` or `#
bigpool: assume page < 2048, the pool is fixed`.
"""


def matches(found: Candidate) -> bool:
    return found.origin is Origin.LOAD and bool(TABLE.search(names(found))) and not EXPERT.search(names(found))


def noun(found: Candidate) -> str:
    kind = next((word for word in ("page", "slot", "block", "state") if word in names(found).lower()), "table")
    return f"{kind} index {by(found)}"


RULE = Rule("BP101", "table id times a stride", TEXT, matches, noun)
