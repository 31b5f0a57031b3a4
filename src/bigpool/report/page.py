"""The page: what all records share, then a chapter for each, then where they come from."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bigpool import __version__
from bigpool.errors import BackendError
from bigpool.report.chapter import Chapter
from bigpool.report.read import EXTRA, Record
from bigpool.report.walls import walls

PACKAGE = "bigpool.report"


def page(records: Sequence[Record], title: str = "") -> str:
    """HTML that loads nothing: no script, no font, no picture from elsewhere. Everything of a record is escaped."""
    made = sorted(((record, record.kind.chapter(record.data)) for record in records), key=lambda pair: pair[0].kind.order)
    chapters = [chapter for _, chapter in made]
    entries = [
        {"id": f"record-{index}", "file": record.name, "kind": record.kind, "chapter": chapter}
        for index, (record, chapter) in enumerate(made, 1)
    ]
    everywhere = missing(records, chapters)
    context = {
        "title": title or "What is proven, what breaks, and what it costs",
        "lead": lead(made),
        "entries": entries,
        "everywhere": everywhere,
        "unproven": len(everywhere) + sum(len(chapter.unproven) for chapter in chapters),
        "walls": walls([wall for chapter in chapters for wall in chapter.walls]),
        "version": __version__,
        "written": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
    }
    return str(_environment().get_template("page.html").render(context))


def lead(made: Sequence[tuple[Record, Chapter]]) -> str:
    """The whole page in a sentence: `Proof: proven; speed: slower, no cost`."""
    words: dict[str, list[str]] = {}
    for record, chapter in made:
        words.setdefault(record.kind.title.lower(), []).append(chapter.claim.word)
    text = "; ".join(f"{title}: {', '.join(_counted(found))}" for title, found in words.items())
    return text[:1].upper() + text[1:]


def _counted(words: Sequence[str]) -> list[str]:
    """`slower (2)` for a word that comes twice."""
    return [word if number == 1 else f"{word} ({number:,})" for word, number in Counter(words).items()]


def missing(records: Sequence[Record], chapters: Sequence[Chapter]) -> list[str]:
    """What no record here speaks of, and files that were timed without a proof of them."""
    there = {record.kind.name for record in records}
    absent = {
        "bigpool-proof": "that any kernel is right past its wall: no record of bigpool prove is here",
        "bigpool-audit": "that no other index of the source wraps: no report of bigpool audit is here",
        "bigpool-bench": "any speed of a kernel: no record of bigpool bench is here",
    }
    lines = [text for name, text in absent.items() if name not in there]
    holds = frozenset().union(*(chapter.holds for chapter in chapters))
    timed: dict[str, str] = {}
    for chapter in chapters:
        timed |= chapter.timed
    bare = sorted({label for sha, label in timed.items() if sha not in holds})
    if bare:
        lines.append(f"files that were timed, and that no green proof here is of: {', '.join(bare)}")
    return lines


def _environment() -> Any:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ModuleNotFoundError:
        raise BackendError(f"bigpool report: expected jinja2 to be installed, got no such module; {EXTRA}") from None
    loader = PackageLoader(PACKAGE)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
