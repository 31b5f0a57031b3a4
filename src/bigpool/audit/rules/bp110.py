"""BP110: byte offsets of 32 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._rule import Rule

if TYPE_CHECKING:
    from ..candidate import Candidate

TEXT = """
The offset counts bytes, not elements: AMD buffer operations take a 32-bit byte offset, and a cache that is addressed
through an 8-bit pointer has byte strides. The limit is then 2^31 bytes, half (bf16) or a quarter (fp32) of where an
element offset would wrap.

```python
slot_ptr = cache_ptr.to(tl.pointer_type(tl.uint8)) + slot * stride_slot_bytes  # 32 bits
```

Widen the index where it is made, or move the large part of the offset into the pointer:

```python
slot = tl.load(slot_mapping_ptr + i).to(tl.int64)
```
"""


def matches(found: Candidate) -> bool:
    return found.observed.sink.offset_bytes and not found.compared


def noun(found: Candidate) -> str:
    return f"byte offset {found.wall.formula}"


RULE = Rule("BP110", "32-bit byte offset", TEXT, matches, noun)
