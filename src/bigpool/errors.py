"""The exception classes. Every error that a user can cause is a BigpoolError and says what to do about it."""

from __future__ import annotations

from collections.abc import Sequence


class BigpoolError(Exception):
    """Base class of everything that bigpool raises on purpose."""


class ArgumentError(BigpoolError, ValueError):
    """One or more arguments break the contract of a function: `ArgumentError(function, fault, ...)`, a line for each.

    Built from its arguments alone, without an `__init__`, so that torch.compile can report it too.
    """

    @property
    def function(self) -> str:
        return str(self.args[0])

    @property
    def faults(self) -> tuple[str, ...]:
        return tuple(map(str, self.args[1:]))

    def __str__(self) -> str:
        if len(self.faults) == 1:
            return f"{self.function}: {self.faults[0]}"
        return f"{self.function}: {len(self.faults)} faults\n" + "\n".join(f"  {fault}" for fault in self.faults)


class WorkspaceError(BigpoolError, ValueError):
    """A call needs more scratch than its workspace was sized for; the text says by how much."""


class BackendError(BigpoolError, RuntimeError):
    """The requested backend cannot run here: no Triton, no GPU, or a version that is known to compute wrongly."""


class PoolError(BigpoolError, RuntimeError):
    """A sparse pool was used wrongly, or the operating system or driver refused an operation."""


class UnsupportedPlatformError(PoolError):
    """This platform lacks what a sparse pool needs; the text says what, and what to do."""


class CanaryError(PoolError):
    """Guard memory that nobody may write was written.

    `ranges` holds (offset, bytes) pairs: of the guard pattern first, then of the pool beside its mapped pages.
    """

    def __init__(self, text: str, ranges: Sequence[tuple[int, int]]) -> None:
        self.ranges = tuple(ranges)
        super().__init__(text)


class ProofError(BigpoolError):
    """A proof could not be carried out (this is not a refutation): bad case file, missing kernel, missing platform."""


class ReportError(BigpoolError):
    """A report cannot be made: a file that is no record, a record of another schema, or nowhere to write."""
