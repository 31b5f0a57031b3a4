"""Attention kernels of others, a file each. A peer is listed where it is missing or wrong, and timed only where it is right."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from bigpool.bench.peers._peer import Peer, PeerCannot
from bigpool.errors import ProofError

__all__ = ["Peer", "PeerCannot", "every", "named", "version_of"]


@cache
def every() -> dict[str, Peer]:
    """Name -> peer, of every module of this package. None of them imports its library before it is prepared."""
    modules = (info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))
    loaded = [import_module(f"{__name__}.{name}").PEERS for name in sorted(modules)]
    return {peer.name: peer for group in loaded for peer in group}


def named(name: str) -> Peer:
    """The peer of this name."""
    if name not in every():
        raise ProofError(f"--arm: expected peer:{'|'.join(every())}, got {name!r}; see bigpool bench verify --help")
    return every()[name]


def version_of(peer: Peer) -> str | None:
    """The version of the package that a peer comes from; None where it is not installed."""
    for package in peer.packages:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return None
