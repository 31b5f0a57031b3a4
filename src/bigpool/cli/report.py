"""`bigpool report`: records as one HTML page."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import ArgumentError
from ._files import write_whole

PATH = click.Path(path_type=Path)


@click.command(context_settings={"max_content_width": 110})
@click.argument("files", nargs=-1, type=PATH, metavar="FILE...")
@click.option(
    "-o", "--output", type=PATH, default="report.html", show_default=True, metavar="FILE", help="The page; - is stdout."
)
@click.option("--title", default="", metavar="TEXT", help="The heading of the page.")
def report(files: tuple[Path, ...], output: Path, title: str) -> int:
    """Make one HTML page from records: what is proven, what breaks at which size, what it costs, and what is unproven.

    FILE is what bigpool prove, bench verify, bench serving and sweep write with --json, or bigpool audit --format json; any
    number of them, in any order. The page loads nothing from elsewhere: it can be sent by mail or put beside the records. Records
    that refuse their numbers appear without numbers.

    \b
    Examples:
      bigpool report proof.json audit.json speed.json
      bigpool report results/*.json -o page.html --title "Page ids in 64 bits"

    Exit status: 0 written, 2 could not (a file that is no record, no place to write).
    """
    if not files:
        raise ArgumentError("bigpool report", "FILE: expected one record or more, got nothing; such as bigpool report proof.json")
    if str(output) != "-" and not output.absolute().parent.is_dir():
        fault = f"-o: expected a file in an existing folder, got {output}; make the folder first"
        raise ArgumentError("bigpool report", fault)
    from ..report.page import page
    from ..report.read import read

    html = page([read(file) for file in files], title)
    if str(output) == "-":
        click.echo(html)
        return 0
    write_whole(html, output)
    click.echo(f"{output}: {len(files)} record{'s' * (len(files) > 1)}, {len(html.encode()) / 1024:,.0f} KiB")
    return 0
