"""What is shown while arms are timed: a bar on a terminal, plain lines in a pipe. Both go to stderr."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def listener() -> Plain | Bar:
    """The one that suits stderr."""
    return Bar() if sys.stderr.isatty() else Plain()


class Plain:
    """A line for each step."""

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        sys.stderr.flush()

    def on_plan(self, rounds: int, text: str) -> None:
        self.on_step(text)

    def on_step(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def on_round(self) -> None:
        """Too small for a line."""


class Bar:
    """One line at the bottom of the terminal. It is redrawn between shapes only: drawing would disturb a host that launches."""

    def __init__(self) -> None:
        columns = (
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        console = Console(stderr=True, highlight=False)
        self.progress = Progress(*columns, console=console, transient=True, auto_refresh=False)
        self.task = self.progress.add_task("", total=None)
        self.rounds = 0

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.progress.stop()

    def on_plan(self, rounds: int, text: str) -> None:
        self.progress.console.print(text, style="dim", markup=False)
        self.progress.update(self.task, total=rounds)

    def on_step(self, text: str) -> None:
        self.progress.update(self.task, completed=self.rounds, description=text)
        self.progress.refresh()

    def on_round(self) -> None:
        self.rounds += 1
