"""How the page looks: contrast of its colours, and in a real browser on a phone, a desktop and paper, light and dark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import bigpool.report
from bigpool.report import plots
from bigpool.report.plots import Point
from report_browser import Browser, chromium
from test_report import COST, PROOF, SPEED, audited, html_of, save, served, swept

STYLE = Path(bigpool.report.__file__).parent / "templates" / "style.css"
AA = 4.5
AA_GRAPHICS = 3.0
NO_CHROMIUM = "needs Chromium on the PATH: on Debian and Ubuntu run apt-get install chromium"


def schemes() -> dict[str, dict[str, str]]:
    """The colours of the style sheet by scheme."""
    blocks = re.findall(r":root \{(.*?)\}", STYLE.read_text(), flags=re.S)
    named = [dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block)) for block in blocks]
    light, dark, printed = named
    assert set(dark) == set(light) == set(printed)
    return {"light": light, "dark": dark, "printed": printed}


def luminance(colour: str) -> float:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark", "printed"])
def test_text_can_be_read(scheme: str) -> None:
    colours = schemes()[scheme]
    on_page = ("ink", "soft", "link", "good", "bad", "open", "plain")
    pairs = [(name, ground) for name in on_page for ground in ("page", "card")]
    pairs += [(tone, f"{tone}-ground") for tone in ("good", "bad", "open", "plain")]
    pairs += [("ink", f"{tone}-ground") for tone in ("good", "bad", "open", "plain")]
    low = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in pairs}
    assert {pair: value for pair, value in low.items() if value < AA} == {}


@pytest.mark.parametrize("scheme", ["light", "dark", "printed"])
def test_lines_can_be_told_from_the_page(scheme: str) -> None:
    colours = schemes()[scheme]
    names = [*(f"s{index}" for index in range(8)), "filled", "wall", "below"]
    assert {name for name in names if contrast(colours[name], colours["page"]) < AA_GRAPHICS} == set()


def test_scales_are_to_scale() -> None:
    scale = plots.linear(-0.02, 0.02)
    assert [scale(value) for value in (-0.02, -0.01, 0.0, 0.02, 9.0)] == [0, 25, 50, 100, 100]
    scale = plots.logarithmic(1, 100)
    assert [scale(value) for value in (1, 10, 100)] == [0, 50, 100]
    assert plots.logarithmic(8, 8)(8) == 50
    assert plots.steps(-0.011, 0.026) == pytest.approx([-0.01, 0, 0.01, 0.02])
    assert plots.decades(15e-6, 130e-6) == pytest.approx([2e-5, 5e-5, 1e-4])


def test_a_point_lies_where_its_time_is() -> None:
    points = [Point("b1", "ours", 1024, 1e-5), Point("b1", "ours", 4096, 1e-4), Point("b8", "ours", 1024, 1e-3)]
    made = plots.panels(points, str)
    (first, second), (third,) = (panel["lines"][0]["dots"] for panel in made["panels"])
    assert (first["x"], second["x"], third["x"]) == (0, 100, 0)
    middle = (first["y"] + third["y"]) / 2
    assert second["y"] == pytest.approx(middle, abs=0.02), "a factor of ten is the same height everywhere"
    assert first["y"] > second["y"], "more time is higher up"


def test_an_interval_lies_over_its_noise() -> None:
    found = {"low": -0.01, "estimate": 0.01, "high": 0.02, "noise": 0.03, "word": "no cost", "text": ""}
    (row,) = plots.differences({"shape": found})["rows"]
    assert row["band"][0] < row["low"] < 50 < row["at"] < row["high"] < row["band"][1]
    assert row["band"][0] + row["band"][1] == pytest.approx(100)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if chromium() is None:
        pytest.skip(NO_CHROMIUM)
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    example = audited(folder)
    made = [example, save(served(), folder / "serving.json"), save(swept(example), folder / "sweep.json"), PROOF, SPEED, COST]
    path = folder / "report.html"
    path.write_text(html_of(*made), "utf-8")
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 390, 820, 1280, 1920])
def test_it_fits(browser: Browser, file: Path, width: int, scheme: str) -> None:
    browser.complaints.clear()
    browser.open(file, width=width, scheme=scheme)
    assert browser.complaints == []
    assert browser.value("document.documentElement.scrollWidth") == width, "the page scrolls to the side"
    ground = browser.value("getComputedStyle(document.body).backgroundColor")
    wanted = schemes()[scheme]["page"]
    assert ground == "rgb({}, {}, {})".format(*(int(wanted[place : place + 2], 16) for place in (1, 3, 5)))
    # What is wider than the page lies in a box of its own that scrolls.
    beyond = f"e => e.getBoundingClientRect().right > {width} + 1 && !e.closest('.scroll') && !e.closest('svg')"
    wide = browser.value(f"[...document.querySelectorAll('main *')].filter({beyond}).map(e => e.outerHTML.slice(0, 80))")
    assert wide == []
    assert browser.value("document.querySelectorAll('.differences tbody tr').length") == 24 + 9 + 2
    assert (
        browser.value("Math.min(...[...document.querySelectorAll('.axis > svg')].map(e => e.getBoundingClientRect().width))")
        > 150
    )


def test_plots_have_text_beside_them(browser: Browser, file: Path) -> None:
    browser.open(file)
    images = "[...document.querySelectorAll('svg[role=img]')]"
    assert browser.value(f"{images}.length") > 40
    assert browser.value(f"{images}.filter(e => !e.getAttribute('aria-label') || !e.querySelector('title')).length") == 0
    # A drawing at the top level is named, or hidden from readers because the words stand beside it.
    named = "e.getAttribute('aria-label') || e.getAttribute('aria-hidden') || e.parentElement.closest('svg')"
    assert browser.value(f"[...document.querySelectorAll('svg')].filter(e => !({named})).length") == 0
    assert browser.value("[...document.querySelectorAll('.scroll')].every(e => e.tabIndex === 0 && e.getAttribute('aria-label'))")


def test_on_paper_it_is_whole(browser: Browser, file: Path) -> None:
    browser.open(file, width=700, media="print", scheme="dark")
    assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)", "dark on paper"
    assert browser.value("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.value("document.querySelector('details li').checkVisibility()"), "what is folded is not printed"
    assert browser.pdf().startswith(b"%PDF")
