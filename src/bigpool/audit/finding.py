"""What the audit says: places in files, findings, and the order in which they are shown."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import IntEnum


class Severity(IntEnum):
    """ERROR and WARNING make exit status 1. A NOTE needs a tensor beyond --max-memory, or a size that nobody has."""

    NOTE = 0
    WARNING = 1
    ERROR = 2

    def __str__(self) -> str:
        return self.name.lower()


class Confidence(IntEnum):
    """How much of a finding was read from the code, and how much was assumed about its types and bounds."""

    LOW = 0
    MEDIUM = 1
    HIGH = 2

    def __str__(self) -> str:
        return self.name.lower()


# From which confidence on a finding makes exit status 1.
FAIL_ON = {"low": Confidence.LOW, "medium": Confidence.MEDIUM, "high": Confidence.HIGH, "never": None}


@dataclass(frozen=True, slots=True)
class Span:
    """A place in a file. Lines and columns count from 1; columns count characters; `end_col` is one past the last."""

    file: str
    line: int
    col: int
    end_line: int
    end_col: int

    def within(self, other: Span) -> bool:
        start, stop = (self.line, self.col), (self.end_line, self.end_col)
        inside = (other.line, other.col) <= start and stop <= (other.end_line, other.end_col)
        return self.file == other.file and inside


@dataclass(frozen=True, slots=True)
class Label:
    """A span and what is to be said under it."""

    span: Span
    text: str


@dataclass(frozen=True, slots=True)
class Wall:
    """From where on a 32-bit value is wrong.

    Attributes:
        variable: the name of what grows.
        value: its first bad value with everything else at what `others` says; None where that is not known.
        others: (name, value) of the factors that are known.
        formula: the overflowing value in names, such as `page * stride_k_page`.
        limit: the last good value of the formula.
        tensor_bytes: bytes of the smallest tensor in which the wall is reached; None where nothing is addressed.
        example: (name, value, wall) for a factor that is not known.
        base: (name, first bad value) of the variable that `variable` is computed from.
        form: "product" where the product alone leaves the range, "sum" where what is added to it counts.
        item_bytes: bytes of an element; 0 if unknown, and then `tensor_bytes` supposes 2.
        dtype: the element type, if it is known.
    """

    variable: str
    value: int | None
    others: tuple[tuple[str, int], ...]
    formula: str
    limit: int
    tensor_bytes: int | None
    example: tuple[str, int, int] | None = None
    element: str = ""
    base: tuple[str, int] | None = None
    form: str = "product"
    item_bytes: int = 0
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Fix:
    """Text to insert: (file, line, column, text). `safe` where only the width of one index changes."""

    title: str
    inserts: tuple[tuple[str, int, int, str], ...]
    safe: bool


@dataclass(slots=True)
class Finding:
    """One fault. `primary` is the operation that is evaluated too narrow."""

    rule: str
    severity: Severity
    confidence: Confidence
    kernel: str
    message: str
    primary: Label
    secondary: list[Label] = field(default_factory=list)
    wall: Wall | None = None
    fix: Fix | None = None
    notes: list[str] = field(default_factory=list)
    key: str = ""

    def fingerprint(self, lines: list[str]) -> str:
        """Survives moved lines: the rule, the file, the kernel and the text of the operation."""
        span = self.primary.span
        text = " ".join("".join(lines[span.line - 1 : span.end_line]).split()) if span.line <= len(lines) else ""
        parts = (self.rule, span.file.replace("\\", "/"), self.kernel, self.key, text)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    @property
    def order(self) -> tuple[str, int, int, str]:
        span = self.primary.span
        return (span.file, span.line, span.col, self.rule)
