"""What the judge hands to the rules: a value that can leave its range."""

from __future__ import annotations

from dataclasses import dataclass, field

from .expr import Node, Origin, Program, Var
from .finding import Confidence, Severity, Span, Wall
from .growth import Shape
from .poly import Mono
from .slices import COMPARED, Observed
from .walls import Product


@dataclass(slots=True)
class Candidate:
    """A value that can leave its range, with everything that a rule needs to name it.

    `first`: the operation that leaves the range first, where that is a sum around the product. `checked`: what the host checks
    against it; `assumed`: what was stated against it.
    """

    program: Program
    observed: Observed
    product: Product
    shape: Shape
    variable: Node | None
    wall: Wall
    severity: Severity
    confidence: Confidence
    flat: bool
    siblings: int
    reasons: list[str] = field(default_factory=list)
    first: Node | None = None
    checked: str = ""
    assumed: str = ""

    @property
    def origin(self) -> Origin:
        if self.variable is None:
            return Origin.SCALAR
        return self.variable.var.origin if self.variable.var is not None else Origin.LOAD

    @property
    def var(self) -> Var | None:
        return self.variable.var if self.variable is not None else None

    @property
    def span(self) -> Span:
        return (self.first or self.product.node).span or self.observed.sink.span

    @property
    def kind(self) -> str:
        return self.observed.sink.kind

    @property
    def compared(self) -> bool:
        return self.observed.context == COMPARED

    def trust(self) -> None:
        """An index into a tensor that has few elements, as the host checks or the user states, is a note."""
        pointer = self.observed.sink.pointer
        check, stated = self.program.checked.get(pointer, ""), self.program.stated.get(pointer, "")
        if (check or stated) and not self.compared and self.severity is not Severity.NOTE:
            self.severity, self.checked, self.assumed = Severity.NOTE, check, "" if check else stated


@dataclass(frozen=True, slots=True)
class Weight:
    """A term of a sum that leaves its range, and what it means."""

    mono: Mono
    coefficient: int
    shape: Shape
    main: Node | None
    siblings: list[Shape]
    flat: bool
    severity: Severity
