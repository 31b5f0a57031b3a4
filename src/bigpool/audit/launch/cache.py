"""TTIR that was compiled before, kept in files, so that a second audit of the same launches does not compile again.

The key is the text of the kernel and of what it calls, its place, what it was compiled for, and the version of Triton. Files are
written whole or not at all; what cannot be read or written costs a compilation, never an error.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from .compile import Specialisation, ttir

VARIABLE = "BIGPOOL_CACHE"
# More files than this are too many: the older half is removed.
MAX_FILES = 2000


def default_folder() -> Path | None:
    """`$BIGPOOL_CACHE/ttir`, else the user's cache; None where BIGPOOL_CACHE is empty or 0: then nothing is kept."""
    given = os.environ.get(VARIABLE)
    if given in ("", "0"):
        return None
    if given is not None:
        return Path(given) / "ttir"
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "bigpool" / "ttir"


def cached_ttir(function: Any, specialisation: Specialisation, folder: Path | None) -> str:
    """`ttir`, from `folder` where it is known there.

    Raises:
        whatever the compiler raises; failures are not kept.
    """
    key = _key(function, specialisation) if folder is not None else None
    if folder is None or key is None:
        return ttir(function, specialisation)
    file = folder / f"{key}.ttir"
    with suppress(OSError, UnicodeDecodeError):
        return file.read_text("utf-8")
    text = ttir(function, specialisation)
    with suppress(OSError):
        _write(file, text)
    return text


def _key(function: Any, chosen: Specialisation) -> str | None:
    """None where a kernel has no key of its own, such as one whose globals Triton refuses."""
    import triton

    try:
        code = function.fn.__code__
        parts = [triton.__version__, function.cache_key, code.co_filename, str(code.co_firstlineno)]
        parts += [repr(sorted(chosen.signature.items())), repr(sorted(chosen.constexprs.items(), key=repr))]
        parts += [repr(sorted(chosen.attributes.items(), key=repr)), repr(sorted(chosen.options.items())), repr(chosen.target)]
    except Exception:  # Triton's search for dependencies raises what it meets
        return None
    return None if any(" at 0x" in part for part in parts[4:]) else hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, suffix=".new", delete=False) as new:
        new.write(text)
    Path(new.name).replace(file)
    known = list(file.parent.glob("*.ttir"))
    if len(known) > MAX_FILES:
        for old in sorted(known, key=lambda path: path.stat().st_mtime)[: MAX_FILES // 2]:
            old.unlink(missing_ok=True)
