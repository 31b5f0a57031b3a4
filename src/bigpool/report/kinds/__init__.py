"""A file for each kind of record: its schema, and what it gives to the page. A new kind is a new file."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from bigpool.report.chapter import Chapter

PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True)
class Kind:
    """Records of `name`/`version`, as `made_by` writes them. `schema_path` is relative to the package bigpool.

    `holds`: keys under which a record of another kind lies -> the name of that kind.
    """

    name: str
    version: int
    title: str
    made_by: str
    schema_path: str
    chapter: Callable[[Mapping[str, Any]], Chapter]
    order: int
    holds: Mapping[str, str] = field(default_factory=dict)

    @property
    def schema(self) -> str:
        return f"{self.name}/{self.version}"

    @property
    def schema_file(self) -> Path:
        return PACKAGE / self.schema_path


@cache
def every() -> dict[str, Kind]:
    """Name of the schema -> kind, in the order of the page."""
    modules = (info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))
    loaded: list[Kind] = [import_module(f"{__name__}.{name}").KIND for name in modules]
    return {kind.name: kind for kind in sorted(loaded, key=lambda kind: kind.order)}
