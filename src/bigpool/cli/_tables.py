"""Small tables: ruled and coloured on a terminal, aligned plain text in a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


@dataclass
class Sheet:
    """A table. The first column stands on the left, the others on the right; column `key` is what the eye looks for."""

    header: Sequence[str]
    key: int = 0
    rows: list[Sequence[str]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """Adds a row, a cell for each column."""
        self.rows.append(cells)

    def plain(self) -> list[str]:
        """The table as lines of text."""
        cells = [self.header, *self.rows]
        widths = [max(len(row[column]) for row in cells) for column in range(len(self.header))]
        lines = []
        for row in cells:
            first, *others = zip(row, widths, strict=True)
            lines.append("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip())
        return lines

    def ruled(self) -> Table:
        """The table for a terminal, as wide as `plain`."""
        table = Table(box=SIMPLE_HEAD, header_style="dim", show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for column, name in enumerate(self.header):
            style = "bold cyan" if column == self.key else ""
            table.add_column(name, justify="right" if column else "left", style=style, no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table


def show(title: str, sheets: Sequence[Sheet], notes: Sequence[tuple[str, str]]) -> None:
    """Prints a title, tables, and (text, style) lines to stdout."""
    console = Console(highlight=False)
    plain = [title]
    for sheet in sheets:
        plain += ["", *sheet.plain()]
    if notes:
        plain += ["", *(text for text, _ in notes)]
    if not console.is_terminal or console.width < max(map(len, plain)):
        click.echo("\n".join(plain))
        return
    console.print(title, style="bold", markup=False)
    for sheet in sheets:
        console.print("", sheet.ruled(), sep="\n")
    if notes:
        console.print()
    for text, style in notes:
        console.print(text, style=style, markup=False)
