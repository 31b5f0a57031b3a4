"""BP191: an address that the auditor cannot follow."""

from __future__ import annotations

from ._rule import Rule, never

TEXT = """
An address depends on something that the auditor does not understand: a function that is not among the audited files, an
unsupported construct. It says so rather than call the kernel safe. The finding names the reason and is a note: it does
not change the exit status.

```python
from other_package import offsets_of  # not among the audited paths

x = tl.load(x_ptr + offsets_of(pid))
```

Audit the file that defines the function too, or bound the value: `# bigpool: assume offs < 2**20, one tile`.
"""

RULE = Rule("BP191", "unanalysable address", TEXT, never, lambda found: "")
