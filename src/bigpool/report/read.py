"""Records from files. Each is held to the schema of its kind before anything is made of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigpool.errors import BackendError, ReportError
from bigpool.report import kinds
from bigpool.report.kinds import Kind

EXTRA = "pip install 'bigpool[report]'"


@dataclass(frozen=True)
class Record:
    """`name`: the file's, without its folder."""

    name: str
    kind: Kind
    data: Mapping[str, Any]


def read(path: Path) -> Record:
    """The record in a file; ReportError names the file, what is wrong with it, and what to do."""
    data = _parsed(path)
    schema = data.get("schema") if isinstance(data, dict) else None
    kind = _kind(path, schema)
    if fault := _fault(kind, data):
        raise ReportError(f"{path}: expected a record that follows {schema}, got {fault}; make it anew with {kind.made_by}")
    return Record(path.name, kind, data)


def _parsed(path: Path) -> Any:
    wanted = "expected a record, a JSON file that bigpool wrote"
    try:
        return json.loads(path.read_text("utf-8"), parse_constant=_no_constant)
    except FileNotFoundError:
        raise ReportError(f"{path}: {wanted}, got no such file; see bigpool report --help") from None
    except OSError as error:
        raise ReportError(f"{path}: {wanted}, got {error.strerror}; see bigpool report --help") from None
    except UnicodeDecodeError:
        raise ReportError(f"{path}: {wanted}, got bytes that are no UTF-8; give the file of --json") from None
    except RecursionError:
        raise ReportError(f"{path}: {wanted}, got JSON that is nested too deep; give the file of --json") from None
    except ValueError as error:
        raise ReportError(f"{path}: {wanted}, got no JSON: {error}; give the file of --json") from None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _kind(path: Path, schema: object) -> Kind:
    """The reader of this schema. A newer version of a known one is told apart from a file of somebody else's."""
    known = kinds.every()
    found = re.fullmatch(r"([a-z-]+)/([0-9]{1,6})", schema) if isinstance(schema, str) else None
    if found is None or found[1] not in known:
        names = ", ".join(kind.schema for kind in known.values())
        raise ReportError(f"{path}: expected a record of {names}, got schema {schema!r:.80}; leave this file out")
    kind = known[found[1]]
    if int(found[2]) > kind.version:
        raise ReportError(f"{path}: expected {kind.schema}, got the newer {schema}; update bigpool")
    if int(found[2]) < kind.version:
        raise ReportError(f"{path}: expected {kind.schema}, got the older {schema}; make it anew with {kind.made_by}")
    return kind


def _fault(kind: Kind, data: Any) -> str:
    """What breaks the schema, or that of a record within it; "" where nothing does."""
    try:
        import jsonschema
    except ModuleNotFoundError:
        raise BackendError(f"bigpool report: expected jsonschema to be installed, got no such module; {EXTRA}") from None
    validator = jsonschema.Draft202012Validator(json.loads(kind.schema_file.read_text("utf-8")))
    error = jsonschema.exceptions.best_match(validator.iter_errors(data))
    if error is None:
        within = ((key, _fault(kinds.every()[name], data[key])) for key, name in kind.holds.items())
        return next((f"{key}: {fault}" for key, fault in within if fault), "")
    text = " ".join(error.message.split())
    return f"{error.json_path}: {text if len(text) <= 160 else text[:157] + '...'}"
