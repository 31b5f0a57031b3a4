"""Files that a command writes."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(text: str, path: Path) -> None:
    """The file whole or not at all, whatever happens meanwhile."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, "utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
