"""What a kind of record gives to the page: a chapter of its own, and its lines in the parts that all records share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# How a claim is marked, in colour and in shape.
GOOD, BAD, OPEN, PLAIN = "good", "bad", "open", "plain"


@dataclass(frozen=True)
class Claim:
    """A verdict in words; `mark` is one of the four above."""

    mark: str
    word: str
    text: str


@dataclass(frozen=True)
class Wall:
    """A size of one tensor, in bytes, from which on an index of it does not fit 32 bits.

    `guarded`: the kernel was shown to be right past it; None where nothing says so.
    """

    bytes: int
    label: str
    guarded: bool | None = None


@dataclass(frozen=True)
class Chapter:
    """`template` is drawn with `context`. `holds`, `timed`: sha256 of files that were proven, and that were timed, with a label.

    `unproven`: what nobody may take from this record. `facts`: (name, value) of where it comes from.
    """

    heading: str
    claim: Claim
    template: str
    context: Mapping[str, Any]
    unproven: Sequence[str] = ()
    walls: Sequence[Wall] = ()
    facts: Sequence[tuple[str, str]] = ()
    holds: frozenset[str] = frozenset()
    timed: Mapping[str, str] = field(default_factory=dict)
