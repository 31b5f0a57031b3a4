"""What a rule is."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..expr import Node, Origin
from ..poly import strip

if TYPE_CHECKING:
    from ..candidate import Candidate


@dataclass(frozen=True, slots=True)
class Rule:
    """The id and the words of a kind of finding. `text` is its documentation, in Markdown.

    `matches` says whether a candidate is of this kind, `noun` what is evaluated too narrow. Rules are asked in the order of the
    registry. They never decide whether something is a finding.
    """

    id: str
    title: str
    text: str
    matches: Callable[[Candidate], bool]
    noun: Callable[[Candidate], str]

    @property
    def page(self) -> str:
        """The documentation as a page."""
        return f"# {self.id}: {self.title}\n\n{self.text.strip()}\n"


TABLE = re.compile(r"page|block|slot|table|state|cache|kv_ind|req_to", re.I)
TOKEN = re.compile(r"tok|row|cu_|seq|src|dst|idx|ind(ex|ices)|ids?\b|start|offset|sorted|perm|pos|sample|batch", re.I)
EXPERT = re.compile(r"expert|\beid", re.I)


def names(found: Candidate) -> str:
    """Every name that the index goes by."""
    var = found.var
    parts = [found.product.index.name, found.wall.variable]
    if found.variable is not None:
        parts.append(found.variable.name)
    if var is not None:
        parts += [var.name, var.pointer]
    return " ".join(parts)


def by(found: Candidate) -> str:
    """What the index is multiplied with, in words."""
    if not found.product.factors:
        return "that grows with the data"
    return "multiplied by a stride" if "stride" in found.wall.formula else f"in the product {found.wall.formula}"


def chain(node: Node, outer: bool = True) -> int:
    """How many products a linear index is a chain of. A tile, `pid * BLOCK + arange(0, BLOCK)`, is none."""
    node = strip(node)
    if (node.name and not outer) or node.op not in ("mul", "shl", "add", "sub"):
        return 0
    inner = max(chain(arg, False) for arg in node.args)
    if node.op in ("mul", "shl"):
        return 1 + inner
    lanes = [part for part in map(strip, node.args) if part.var is not None and part.var.origin is Origin.ARANGE]
    return 0 if lanes else inner


def never(found: Candidate) -> bool:
    return False
