"""The page for everyone: contrast, widths, and pictures as tables."""

import itertools
import re

import numpy as np
import pytest
from plugin_runs import train

import keras_mixprec as kmp
from keras_mixprec.reporting.report_page import static

RUN = "float16/mixprec"


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    train(folder / "float16", epochs=1)
    train(folder / "tuned", kmp.PrecisionTuner(verbose=0), epochs=1)
    kmp.load_report(folder).save_html(folder / "report.html")
    return folder


@pytest.fixture
def report(log):
    return log / "report.html"


# Colours: WCAG's ratio of luminances, 4.5 for text and 3 for what is drawn.


def colours(theme):
    """The style's colours by name, of a theme."""
    blocks = re.findall(r":root([^{]*)\{([^}]*)\}", static("style.css"))
    found = {}
    for selector, body in blocks:
        if not selector.strip() or theme in selector:
            found |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", body))
    return found


def luminance(colour):
    channels = np.array([*bytes.fromhex(colour[1:])]) / 255
    linear = np.where(
        channels <= 0.04045,
        channels / 12.92,
        ((channels + 0.055) / 1.055) ** 2.4,
    )
    return linear @ [0.2126, 0.7152, 0.0722]


def contrast(one, other):
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def mixed(tone, base, share):
    """As `color-mix(in srgb, tone share, base)`."""
    one, two = (np.array([*bytes.fromhex(x[1:])]) for x in (tone, base))
    return (
        "#"
        + bytes(
            np.rint(share * one + (1 - share) * two).astype(int).tolist()
        ).hex()
    )


TEXT = ("ink", "muted", "compare", "accent")
GROUND = ("card", "stripe", "chosen", "page")
MARKS = ("bad", "demote", "promote", "skip", "line-1", "line-2", "line-3")
TONES = ("bad", "warning", "info", "demote", "promote", "skip")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_marks_stand_out(theme):
    found = colours(theme)
    for text, ground in itertools.product(TEXT, GROUND):
        ratio = contrast(found[text], found[ground])
        assert ratio >= 4.5, (text, ground, ratio)
    for mark in MARKS:
        ratio = contrast(found[mark], found["card"])
        assert ratio >= 3, (mark, ratio)
    for tone in TONES:  # Of badges, as `--strong` on `--soft`.
        strong = mixed(found[tone], found["ink"], 0.45)
        soft = mixed(found[tone], found["card"], 0.14)
        assert contrast(strong, soft) >= 4.5, tone


# Sizes of a window.

_BEYOND = """
const wide = document.documentElement.clientWidth;
return [...document.querySelectorAll("header *, main *")].filter((e) => {
  const box = e.getBoundingClientRect();
  return box.width && e.offsetParent && box.right > wide + 1 &&
    !e.closest(".table-scroll, .event-scroll, .whole");
}).map((e) => e.id || e.className || e.tagName);
"""


@pytest.mark.parametrize("width", [1024, 1280, 1600, 1920, 2560])
def test_no_width_of_a_window_cuts_the_page(page, width):
    page.driver.set_window_size(width, 900)
    try:
        page.settle()
        page.pick("#compare", "tuned/mixprec")
        root = "return document.documentElement."
        assert page.run(f"{root}scrollWidth") <= page.run(f"{root}clientWidth")
        assert page.run(_BEYOND) == []
    finally:
        page.driver.set_window_size(1366, 768)


_TOPS = """
const found = [...document.querySelectorAll(arguments[0])];
const tops = found.map((e) => e.offsetTop);
return tops.map((top) => tops.filter((other) => other === top).length);
"""


@pytest.fixture
def at_width(page):
    def resize(width):
        page.driver.set_window_size(width, 900)
        return page.settle()

    yield resize
    page.driver.set_window_size(1366, 768)


@pytest.mark.parametrize("width", [1024, 1280, 1366, 1440, 2560])
def test_nothing_stands_in_a_row_alone(at_width, width):
    page = at_width(width)
    assert min(page.run(_TOPS, "header .health")) > 1
    for card in "timeline", "heatmap", "histogram", "what-if":
        beside = page.run(_TOPS, f"#{card} .card-head .export")
        assert set(beside) == {len(beside)}, card


@pytest.mark.parametrize("width", [1440, 2560])
def test_a_narrow_map_leaves_its_row_to_another_card(at_width, width):
    page = at_width(width)
    assert page.run(_TOPS, "#map, #course") == [2, 2]
    box = "document.getElementById('course').getBoundingClientRect()"
    assert page.run(f"return {box}.right") > width - 50


_CUT = """
return [...document.querySelectorAll("button.node em")]
  .filter((e) => e.scrollWidth > e.clientWidth)
  .filter((e) => !e.closest("button").title.endsWith(e.textContent)).length;
"""


def test_what_a_map_says_is_whole_or_has_all_of_it_in_its_title(page):
    page.one("#map")
    page.until(lambda: page.all("button.node em"))
    assert page.run(_CUT) == 0
    assert {*page.values("#map .export", "dataset.export")} == {"csv", "json"}


# What a picture shows, for those who cannot see it.


def test_each_chart_has_its_numbers_as_a_table(page, log):
    for root in page.all("details.data"):
        if root.is_displayed():
            page.run("arguments[0].open = true", root)
    page.settle()
    run = kmp.load_report(log).to_dict()[RUN]
    (line,) = run["scale"]
    scale, loss = (
        table.find_elements("css selector", "tbody tr")
        for table in page.all("#timeline details")
    )
    assert len(scale) == min(len(line["steps"]), 300)
    assert len(loss) == len(run["loss"]["steps"])
    assert scale[0].text.startswith(RUN)
    worst = page.texts("#heatmap details tbody tr")
    assert len(worst) == len(run["heat"]["layers"])
    (row,) = [text for text in worst if text.startswith("overflowing")]
    assert "overflow: infinite" in row
    assert page.all("#histogram details tbody tr")
