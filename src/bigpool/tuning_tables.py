"""Tables of `bigpool tune`: those that ship with bigpool, and the one that BIGPOOL_TUNED names.

They are read when the first plan for a GPU is made, never at import.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from .errors import ArgumentError
from .tuning import (
    INT4_BYTES,
    NO_TABLE,
    PAGE_TILES,
    DeviceProps,
    Tuned,
    TunedKey,
    VerifyConfig,
    config_supports,
    verify_smem_bytes,
)  # fmt: skip

TABLE_SCHEMA, TABLE_VARIABLE, TUNED_OP = "bigpool-tuned/1", "BIGPOOL_TUNED", "verify_attention"
SHIPPED_TABLES = Path(__file__).with_name("tuned")
_CARD: dict[str, type] = {"name": str, "sm": int, "num_sms": int, "smem_bytes": int}
_KEY: dict[str, tuple[Any, ...]] = {
    "rows": (16, 32, 64, 128, 256), "head_dim_pad": (16, 32, 64, 128, 256, 512), "itemsize": (2, 4),
    "kv_bytes": (None, INT4_BYTES, 1.0), "page_tile": (0, *PAGE_TILES), "heavy": (False, True),
}  # fmt: skip
_CONFIG: dict[str, tuple[Any, ...]] = {
    "block_m": (16, 32, 64, 128), "tile": (16, 32, 64, 128), "num_warps": (1, 2, 4, 8, 16), "num_stages": (1, 2, 3, 4, 5, 6),
}  # fmt: skip


def parse_table(text: str, source: str) -> tuple[DeviceProps, Tuned]:
    """(card, what is faster than the rule on it) of a table of `bigpool tune`. Raises ArgumentError, all faults listed."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _table_error(source, f"file: expected JSON, got {error}") from None
    schema = _part(data, "schema")
    if schema != TABLE_SCHEMA:
        raise _table_error(source, f"schema: expected {TABLE_SCHEMA!r}, got {schema!r}")
    given, entries = {name: _part(data.get("card"), name) for name in _CARD}, _part(data, "entries")
    faults = [] if isinstance(entries, list) else [f"entries: expected a list, got {entries!r}"]
    op, refusals = data.get("op", TUNED_OP), data.get("refusals")
    if op != TUNED_OP:
        faults.append(f"op: expected {TUNED_OP!r}, got {op!r}")
    if refusals and entries:
        faults.append(f"refusals: expected no entries of a run whose numbers were refused, got {refusals!r}")
    faults += [f"card.{n}: expected {kind.__name__}, got {given[n]!r}" for n, kind in _CARD.items() if type(given[n]) is not kind]
    if faults:
        raise _table_error(source, *faults)
    card, configs = DeviceProps(**given), dict[TunedKey, VerifyConfig]()
    for index, entry in enumerate(entries):
        where, config = f"entries[{index}]", _part(entry, "config")
        wrong = [*_unlike(where, entry, _KEY), *_unlike(f"{where}.config", config, _CONFIG)]
        faults += wrong
        if wrong:
            continue
        key, found = TunedKey(**{n: entry[n] for n in _KEY}), VerifyConfig(**{n: config[n] for n in _CONFIG})
        if key in configs:
            faults.append(f"{where}: expected a key once, got that of an entry before it")
        if not config_supports(found, card, *key[1:4]):
            needs = verify_smem_bytes(found, *key[1:4])
            faults.append(f"{where}.config: expected at most {card.smem_bytes} bytes of shared memory, got {needs}")
        configs[key] = found
    if faults:
        raise _table_error(source, *faults)
    return card, configs


_NOTHING = type("Nothing", (), {"__repr__": lambda self: "nothing"})()


def _part(data: Any, name: str) -> Any:
    return data.get(name, _NOTHING) if isinstance(data, dict) else _NOTHING


def _unlike(where: str, given: Any, allowed: Mapping[str, tuple[Any, ...]]) -> list[str]:
    return [
        f"{where}.{name}: expected one of {', '.join(map(str, choices))}, got {_part(given, name)!r}"
        for name, choices in allowed.items()
        if not any(type(_part(given, name)) is type(choice) and _part(given, name) == choice for choice in choices)
    ]


def _table_error(source: str, *faults: str) -> ArgumentError:
    return ArgumentError(source, *(f"{fault}; make the table with bigpool tune verify --out FILE" for fault in faults))


@cache
def tuned_for(props: DeviceProps) -> Tuned:
    """What tables say of this card: those of the installation, and over them the one that BIGPOOL_TUNED names. Read once.

    Raises ArgumentError where a table is malformed or the named file cannot be read.
    """
    tables = [parse_table(path.read_text("utf-8"), path.name) for path in sorted(SHIPPED_TABLES.glob("*.json"))]
    if named := os.environ.get(TABLE_VARIABLE):
        try:
            text = Path(named).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or type(error).__name__
            raise _table_error(TABLE_VARIABLE, f"file: expected one that can be read, got {named}: {why}") from None
        tables.append(parse_table(text, TABLE_VARIABLE))
        if tables[-1][0] != props:
            said = f"{TABLE_VARIABLE}: the table is of {tables[-1][0]}, this is {props}: nothing of it is used here"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
    return {key: config for card, configs in tables if card == props for key, config in configs.items()}


_TRIAL: ContextVar[Tuned | None] = ContextVar("trial", default=None)


@contextmanager
def trying(tuned: Tuned) -> Iterator[None]:
    """While it is open, plans go by `tuned` and the rule, and by no table: for the tuner. In the interpreter too."""
    token = _TRIAL.set(tuned)
    try:
        yield
    finally:
        _TRIAL.reset(token)


def in_force(props: DeviceProps) -> Tuned:
    """What plans for this card go by: the trial of a tuner, or tables; none changes what the interpreter does."""
    trial = _TRIAL.get()
    if trial is not None:
        return trial
    return NO_TABLE if props.interpreted else tuned_for(props)
