"""The main result as a picture, made from a record: the pool to scale, its wall, the pages in use, what each arm did there.

It shows the first case of the record that has a paged pool. Colours are mid-tones on a transparent ground, so that the
picture can be read on light and on dark pages.
"""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bigpool.errors import BackendError, ProofError
from bigpool.proof.report import Runs, main_tensor, runs_of, short

INK, FAINT, GOOD, BAD, WALL, POOL = "#768390", "#8b949e", "#2da44e", "#e5534b", "#c69026", "#4184e4"
SUFFIXES = (".svg", ".png")
HALF = 2**31
PLACEMENTS = ("bottom", "across", "top")
HEADERS = {"bottom": "at the bottom", "across": "across the wall", "top": "at the top"}
# Everything is drawn on a plane of 100 x 40; these are its lines and columns.
LEFT, RIGHT = 1.0, 99.0
BAR, BAR_TOP = 20.0, 24.0
COLUMNS = {"bottom": 17.0, "across": 41.0, "top": 65.0}
HEADER_LINE, ARM_LINES = 13.0, (10.0, 6.4)


def draw(record: Mapping[str, Any], file: Path) -> None:
    """Write the picture as SVG or PNG, by the suffix of `file`."""
    check_target(file)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    verdict, runs = _chosen(record)
    with rc_context({"svg.hashsalt": "bigpool", "font.size": 9, "text.color": INK, "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(9.2, 3.7))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, 100)
        axes.set_ylim(0, 40)
        _Picture(axes, record, verdict, runs).paint()
        figure.savefig(file, transparent=True, dpi=200, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)


def check_target(file: Path) -> None:
    """Raises where nothing could be drawn into `file`, whatever the record says."""
    if file.suffix.lower() not in SUFFIXES:
        raise ProofError(f"--figure: expected a file that ends in .svg or .png, got {file.name}; both are drawn alike")
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendError("--figure: expected matplotlib to be installed, got no such module; pip install 'bigpool[plot]'")


def _chosen(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], Runs]:
    """The verdict to show and its runs by (arm, placement, guard)."""
    fixed = record["arms"][0]["name"]
    for verdict in record["verdicts"]:
        runs = runs_of(record, verdict)
        tensor = main_tensor(runs.get((fixed, "top", "unmapped")))
        if tensor is not None and tensor["ids_in_use"] < tensor["shape"][0]:
            return verdict, runs
    raise ProofError("--figure: expected a record with a run at the top of a paged pool, got none; nothing is drawn")


class _Picture:
    def __init__(self, axes: Any, record: Mapping[str, Any], verdict: Mapping[str, Any], runs: Runs) -> None:
        self.axes, self.record, self.verdict, self.runs = axes, record, verdict, runs
        self.fixed = record["arms"][0]["name"]
        self.broken = next((arm["name"] for arm in record["arms"] if arm["expect"] == "fails"), None)
        pool = main_tensor(runs[self.fixed, "top", "unmapped"])
        assert pool is not None
        self.pool = pool
        self.stride = pool["page_stride"]
        self.end = pool["shape"][0] * self.stride

    def paint(self) -> None:
        self._title()
        self._addresses()
        self._wrap()
        for placement in PLACEMENTS:
            self._column(placement)
        self._source()

    def _x(self, offset: float) -> float:
        """Element offset -> place on the bar, to scale; the bar starts where an offset can wrap to at the lowest."""
        part = (offset + HALF) / float(self.end + HALF)
        return LEFT + part * (RIGHT - LEFT)

    def _title(self) -> None:
        case = next(case for case in self.record["cases"] if case["name"] == self.verdict["case"])
        colour = GOOD if self.verdict["status"] == "proven" else BAD
        self.axes.text(LEFT, 37, f"{case['name']}: {self.verdict['status']}", size=12, weight="bold", color=colour)
        size = self.pool["virtual_bytes"]
        used = size / self.pool["shape"][0] * self.pool["ids_in_use"]
        scale = f"Addresses to scale: {size / 2**30:.1f} GiB, of which {used / 2**20:.3g} MiB are in use."
        self.axes.text(LEFT, 33.7, f"{case['describe']} ({case['dtype']}). {scale}")

    def _addresses(self) -> None:
        start, wall = self._x(0), self._x(self.pool["wall"] * self.stride)
        self._box(LEFT, start, fill=None, edge=FAINT, dashed=True)
        self._box(start, RIGHT, fill=(POOL, 0.16), edge=POOL)
        middle = (BAR + BAR_TOP) / 2
        self.axes.text((LEFT + start) / 2, middle, "below the pool: no memory, or poison", color=FAINT, ha="center", va="center")
        self.axes.text(start + 1.6, middle, f"pool: {self.pool['shape'][0]:,} pages", color=POOL, va="center")
        self.axes.text(wall - 0.8, middle, f"wall: page {self.pool['wall']:,}", color=WALL, ha="right", va="center")
        self.axes.plot([wall, wall], [BAR - 0.9, BAR_TOP + 0.9], color=WALL, linestyle=(0, (4, 2)), linewidth=1.5, zorder=5)

    def _box(self, left: float, right: float, *, fill: Any, edge: str, dashed: bool = False) -> None:
        from matplotlib.colors import to_rgba
        from matplotlib.patches import Rectangle

        face = to_rgba(*fill) if fill else "none"
        style = (0, (3, 3)) if dashed else "-"
        box = Rectangle((left, BAR), right - left, BAR_TOP - BAR, facecolor=face, edgecolor=edge, linewidth=1, linestyle=style)
        self.axes.add_patch(box)

    def _wrap(self) -> None:
        """Where 32 bits turn the first page of the top to: arithmetic, drawn only where the record shows a failure there."""
        ids = self._ids("top")
        if ids is None or all(text == "same bits" for text in self.verdict["broken"].values()):
            return
        here = ids[0] * self.stride
        there = (here + HALF) % (2 * HALF) - HALF
        if there < 0:
            style = {"arrowstyle": "-|>", "color": BAD, "linewidth": 1.3, "connectionstyle": "arc3,rad=0.11"}
            self.axes.annotate("", (self._x(there), BAR_TOP + 0.3), (self._x(here), BAR_TOP + 0.3), arrowprops=style)
            text = f"the offset of page {ids[0]:,} in 32 bits"
            self.axes.text((self._x(here) + self._x(there)) / 2, 30.2, text, color=BAD, ha="center")

    def _column(self, placement: str) -> None:
        """The pages in use on the bar, a line to their column, and what each arm did with them."""
        ids = self._ids(placement)
        if ids is None:
            return
        left = self._x(ids[0] * self.stride)
        right = max(self._x((ids[1] + 1) * self.stride), left + 0.25)
        self._box(left, right, fill=(POOL, 1.0), edge=POOL)
        x = COLUMNS[placement]
        self.axes.plot(
            [(left + right) / 2, x + 6, x + 6], [BAR, HEADER_LINE + 3.2, HEADER_LINE + 2.2], color=FAINT, linewidth=0.8
        )
        self.axes.text(x, HEADER_LINE, f"{HEADERS[placement]}, pages {ids[0]:,}..{ids[1]:,}", size=8, color=POOL)
        for arm, y in zip((self.fixed, self.broken), ARM_LINES, strict=True):
            if arm is not None:
                self.axes.text(LEFT, y, arm, weight="bold", va="top")
                self._cell(arm, placement, x, y)

    def _cell(self, arm: str, placement: str, x: float, y: float) -> None:
        texts = self._texts(arm, placement)
        good = all(text in ("right", "ran", "same bits") for text in texts)
        lines = [line for text in texts for line in textwrap.wrap(text, 42)]
        self.axes.text(
            x, y + 0.2, "\n".join(lines) or "-", weight="bold" if lines else "normal", size=8.5, va="top",
            color=FAINT if not lines else GOOD if good else BAD,
        )  # fmt: skip

    def _ids(self, placement: str) -> tuple[int, int] | None:
        run = self.runs.get((self.fixed, placement, "unmapped"))
        for tensor in run["tensors"] if run is not None else ():
            if tensor["name"] == self.pool["name"]:
                return tensor["first_id"], tensor["last_id"]
        return None

    def _texts(self, arm: str, placement: str) -> list[str]:
        """What the record says of an arm at a placement, in a line for each guard that was judged by itself."""
        if arm == self.broken and placement == "top":
            return [f"{text} ({guard})" for guard, text in self.verdict["broken"].items()]
        runs = [self.runs.get((arm, placement, guard)) for guard in ("unmapped", "poison")]
        return list(dict.fromkeys(self._text(run) for run in runs if run is not None))

    def _text(self, run: Mapping[str, Any]) -> str:
        if run["outcome"] != "ok":
            return short(run)
        if run["placement"] != "bottom" or run["arm"] == self.broken:
            reference = self.runs[self.fixed, "bottom", "unmapped"]
            return "same bits" if run["digests"] == reference["digests"] else "other bits"
        judged = self.verdict["errors"]
        return "right" if judged and all(error["ok"] for error in judged) else "ran"

    def _source(self) -> None:
        machine, versions, package = self.record["machine"], self.record["versions"], self.record["bigpool"]
        where = machine["gpu"]["name"] if machine["gpu"] else f"Triton's interpreter on {machine['cpu']}"
        parts = [where, f"triton {versions['triton']}", f"torch {versions['torch']}", f"bigpool {package['version']}"]
        parts += [package["git_sha"][:10]] if package["git_sha"] else []
        self.axes.text(LEFT, 0.7, ", ".join([*parts, self.record["date"][:10]]), size=7, color=FAINT)
