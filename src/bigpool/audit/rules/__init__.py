"""The rules, in the order in which they are asked. They name findings; they do not make them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import bp101, bp102, bp103, bp104, bp105, bp106, bp107, bp108, bp109, bp110, bp111, bp112, bp190, bp191
from ._rule import Rule

if TYPE_CHECKING:
    from ..candidate import Candidate

_ORDER = (bp109, bp111, bp108, bp110, bp107, bp106, bp104, bp101, bp102, bp112, bp105, bp103, bp190, bp191)
RULES: dict[str, Rule] = {module.RULE.id: module.RULE for module in sorted(_ORDER, key=lambda module: module.RULE.id)}


def rule_for(found: Candidate) -> Rule:
    """The first rule that a candidate matches."""
    return next((module.RULE for module in _ORDER if module.RULE.matches(found)), bp103.RULE)


__all__ = ["RULES", "Rule", "rule_for"]
