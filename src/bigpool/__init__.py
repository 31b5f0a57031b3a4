"""bigpool: attention over paged KV caches that is right at any pool size, and the tools that prove it.

Importing this package loads neither torch nor triton. The names that need them load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import BackendError
from .layout import KVLayout

if TYPE_CHECKING:
    from .cache import KVCache
    from .ops.attention import attention
    from .ops.cache import gather_kv, write_kv
    from .ops.merge import merge_states
    from .ops.prefill import KeyCodes, PrefillWorkspace, prefill_attention
    from .ops.verify import pack_tree_mask, verify_attention
    from .pools import SparsePool
    from .workspace import Workspace

__version__ = "0.1.0.dev0"

__all__ = [
    "KVCache",
    "KVLayout",
    "KeyCodes",
    "PrefillWorkspace",
    "SparsePool",
    "Workspace",
    "__version__",
    "attention",
    "gather_kv",
    "merge_states",
    "pack_tree_mask",
    "prefill_attention",
    "verify_attention",
    "write_kv",
]

EXTRAS_REMEDY = "pip install 'bigpool[kernels]' on a machine with an NVIDIA GPU, 'bigpool[cpu]' on any other"

_LAZY = {
    "KVCache": "bigpool.cache",
    "KeyCodes": "bigpool.ops.prefill",
    "PrefillWorkspace": "bigpool.ops.prefill",
    "SparsePool": "bigpool.pools",
    "Workspace": "bigpool.workspace",
    "attention": "bigpool.ops.attention",
    "gather_kv": "bigpool.ops.cache",
    "merge_states": "bigpool.ops.merge",
    "pack_tree_mask": "bigpool.ops.verify",
    "prefill_attention": "bigpool.ops.prefill",
    "verify_attention": "bigpool.ops.verify",
    "write_kv": "bigpool.ops.cache",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'bigpool' has no attribute {name!r}")
    try:
        value = getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("bigpool"):
            raise
        raise BackendError(
            f"bigpool.{name}: expected {missing.name} to be installed, got no such module; {EXTRAS_REMEDY}"
        ) from missing
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
