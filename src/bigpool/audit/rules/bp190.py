"""BP190: a suppression that suppresses nothing."""

from __future__ import annotations

from ._rule import Rule, never

TEXT = """
A comment `# bigpool: ignore[...] reason` or `# bigpool: assume ...` has nothing to act on, names no reason, or cannot
be read. A stale suppression would hide the next bug on its line.

```python
x = tl.load(x_ptr + row.to(tl.int64) * stride)  # bigpool: ignore[BP103] checked on the host
```

Delete it, or say why it is needed.
"""

RULE = Rule("BP190", "unused suppression", TEXT, never, lambda found: "")
