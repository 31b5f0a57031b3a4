"""What a peer is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
