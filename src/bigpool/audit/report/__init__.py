"""Reports: one module a format. Each turns a Report into text."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..run import Report
from . import concise, full, github, jsonfile, sarif

FORMATS: dict[str, Callable[[Report, bool], Iterable[str]]] = {
    "full": full.lines,
    "concise": concise.lines,
    "json": jsonfile.lines,
    "sarif": sarif.lines,
    "github": github.lines,
}
