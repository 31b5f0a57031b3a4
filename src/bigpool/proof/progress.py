"""What is shown while a proof runs: a bar on a terminal, plain lines in a pipe. Both go to stderr."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bigpool.proof.matrix import Job, label
from bigpool.proof.verdict import Run, Verdict


def listener() -> Plain | Bar:
    """The one that suits stderr."""
    return Bar() if sys.stderr.isatty() else Plain()


class Plain:
    """A line for each run, and one before each run whose death is expected."""

    def __init__(self) -> None:
        self.total = 0
        self.done = 0

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        sys.stderr.flush()

    def on_plan(self, runs: int, text: str) -> None:
        self.total = runs
        self.say(text)

    def on_start(self, job: Job) -> None:
        if job["kind"] == "run" and "expected" in job["meaning"]:
            self.say(f"start {label(job)}: {job['meaning']}")

    def on_run(self, run: Run) -> None:
        self.done += 1
        self.say(f"[{self.done}/{self.total}] {run.case} {run.dtype}: {run.label}: {run.text} ({run.seconds:.1f} s)")

    def on_verdict(self, verdict: Verdict) -> None:
        self.say(f"{verdict.case} {verdict.dtype}: {verdict.status}")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Bar:
    """One line at the bottom of the terminal: how far, and what a death of the run under way would mean."""

    def __init__(self) -> None:
        columns = (
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self.progress = Progress(*columns, console=Console(stderr=True, highlight=False), transient=True)
        self.task = self.progress.add_task("", total=None)

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.progress.stop()

    def on_plan(self, runs: int, text: str) -> None:
        self.progress.console.print(text, style="dim", markup=False)
        self.progress.update(self.task, total=runs)

    def on_start(self, job: Job) -> None:
        meaning = f": {job['meaning']}" if job["kind"] == "run" else ""
        self.progress.update(self.task, description=f"{label(job)}{meaning}")

    def on_run(self, run: Run) -> None:
        self.progress.advance(self.task)

    def on_verdict(self, verdict: Verdict) -> None:
        style = "green" if verdict.status == "proven" else "yellow"
        self.progress.console.print(f"{verdict.case} {verdict.dtype}: {verdict.status}", style=style, markup=False)
