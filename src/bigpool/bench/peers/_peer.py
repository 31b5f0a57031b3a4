"""What a peer is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from bigpool.bench.pairs import Call
from bigpool.bench.work import Work


class PeerCannot(Exception):
    """The peer does not do this shape, dtype or card; the text says which."""


@dataclass(frozen=True)
class Peer:
    """`prepare` gives a call that returns out, like q or like `Work.queries`. `packages`: the names it is distributed under.

    `paged` False: it is given keys and values without pages, copied outside of the timing.
    """

    name: str
    packages: tuple[str, ...]
    prepare: Callable[[Work], Call]
    paged: bool = True


def first_module(*names: str) -> Any:
    """The first of these modules that exists: versions of a library have moved it. An error within one is not hidden."""
    for name in names:
        try:
            return import_module(name)
        except ModuleNotFoundError as missing:
            if not f"{name}.".startswith(f"{missing.name}."):
                raise
    raise ModuleNotFoundError(f"no module of {', '.join(names)}", name=names[0])
