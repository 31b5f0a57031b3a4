"""Files that commands write."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ArgumentError


def write_whole(text: str, path: Path) -> None:
    """The file whole or not at all, whatever happens meanwhile. A link is followed; a pipe or a device is written to.

    Raises:
        ArgumentError: it cannot be written.
    """
    try:
        path = path.resolve()
        if path.exists() and not path.is_file():
            path.write_text(text, "utf-8")
            return
        partial = path.with_name(f".{path.name[:200]}.{os.getpid()}.partial")
        try:
            partial.write_text(text, "utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        expected = f"a file that can be written, got {path}: {error.strerror or error}"
        raise ArgumentError("bigpool", f"output: expected {expected}; name another one") from error
