"""Comments that steer the audit: `# bigpool: ignore[BP101] reason` and `# bigpool: assume page < 2**20, reason`."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ArgumentError
from . import assume
from .finding import Finding, Span

COMMENT = re.compile(r"#\s*bigpool:\s*(.*)")
IGNORE = re.compile(r"ignore\[([A-Z0-9,\s]+)\]\s*(.*)")


@dataclass(slots=True)
class Ignore:
    """Holds for findings whose primary span touches `line`, or the line below a comment that stands alone."""

    rules: tuple[str, ...]
    reason: str
    span: Span
    lines: tuple[int, int]
    used: bool = False

    def covers(self, finding: Finding) -> bool:
        span = finding.primary.span
        hit = span.file == self.span.file and span.line <= self.lines[1] and self.lines[0] <= span.end_line
        return hit and finding.rule in self.rules


@dataclass(slots=True)
class Steering:
    """What the comments of a file say. `faults` are comments that say nothing, with the reason."""

    ignores: list[Ignore]
    assumptions: list[assume.Assumption]
    faults: list[tuple[Span, str]]


def read(file: str, text: str, functions: list[Span], values: Mapping[str, int]) -> Steering:
    found = Steering([], [], [])
    if "bigpool:" not in text:
        return found
    try:
        tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT]
    except (tokenize.TokenError, SyntaxError):
        return found
    for token in tokens:
        comment = COMMENT.match(token.string)
        if comment is None:
            continue
        line, col = token.start
        span = Span(file, line, col + 1, line, token.end[1] + 1)
        alone = not token.line[:col].strip()
        _read_one(found, comment[1].strip(), span, (line, line + 1) if alone else (line, line), functions, values)
    return found


def _read_one(
    found: Steering, text: str, span: Span, lines: tuple[int, int], functions: list[Span], values: Mapping[str, int]
) -> None:
    if ignore := IGNORE.match(text):
        if not ignore[2].strip():
            found.faults.append((span, "a suppression needs a reason after the brackets"))
        else:
            rules = tuple(rule.strip() for rule in ignore[1].split(",") if rule.strip())
            found.ignores.append(Ignore(rules, ignore[2].strip(), span, lines))
        return
    if not text.startswith("assume "):
        found.faults.append((span, "expected ignore[RULE] reason, or assume NAME < BOUND, reason"))
        return
    bound, comma, reason = text[len("assume ") :].partition(",")
    if not comma or not reason.strip():
        found.faults.append((span, "an assumption needs a reason after a comma"))
        return
    try:
        assumption = assume.parse(bound, values, "comment")
    except ArgumentError:
        found.faults.append((span, f"expected assume {assume.GRAMMAR}, reason"))
        return
    # By lines: a comment at the end of the last line of a function lies behind it.
    around = [function for function in functions if function.line <= span.line <= function.end_line]
    assumption.where = min(around, key=lambda item: item.end_line - item.line) if around else Span(file_of(span), 1, 1, 10**9, 1)
    assumption.reason = reason.strip()
    found.assumptions.append(assumption)


def file_of(span: Span) -> str:
    return span.file
