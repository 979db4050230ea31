"""What the page shows of readings, and of the steps between two of them."""

import numpy as np
import pytest
from plugin_page import BEYOND

import keras_mixprec as kmp
from keras_mixprec.reporting.run_log import RunLog

HEAT = "#heatmap .heat-scroll:nth-of-type(1) canvas"
LABELS = 208  # Pixels of the heatmap.
READ = (1, 50, 100)
QUIET = "94a3b4"  # As `colors.js` has it.
ALARM = "d55e00"
METRICS = {
    "activation_headroom_bits": "min",
    "activation_nonfinite": "max",
    "attention_logits_largest": "max",  # Of a model without attention.
}
INSIDE = {
    "kind": "verdict",
    "verdict": "forward_overflow",
    "layer": "c",
    "direction": "forward",
    "advice": "",
    "numbers": {"largest_inside_in_float32": 2.0**18},
}


def write(log_dir, dtype):
    """Three layers, measured at a few of 100 steps; the third overflows."""
    names = ["a", "b", "c"]
    table = {"class": "LayerNormalization", "compute_dtype": "float16"}
    rows = [table | {"path": p} for p in names]
    with RunLog(log_dir) as log:
        log.layers(0, rows)
        log.event(1, INSIDE)
        for step in READ:
            heat = np.array([[b, 0.0, np.nan] for b in (9.0, 12.85, 20.0)])
            log.heat(step, heat, names, METRICS)
        log.layers(30, [*rows[:2], rows[2] | {"compute_dtype": dtype}])


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A run in which nothing is done about it, and one that is repaired."""
    folder = tmp_path_factory.mktemp("sparse")
    write(folder / "open", "float16")
    write(folder / "repaired", "float32")
    kmp.load_report(folder).save_html(folder / "report.html")
    return folder / "report.html"


def pixels(page, y=10):
    """The colours of a row of pixels, from the left end of the cells."""
    return page.run(
        "const canvas = document.querySelector(arguments[0]);"
        "const size = canvas.width - arguments[1] - 22;"
        "const { data } = canvas.getContext('2d')"
        ".getImageData(arguments[1], arguments[2], size, 1);"
        "return Array.from({ length: size }, (_, x) =>"
        " [...data.slice(4 * x, 4 * x + 4)]);",
        HEAT,
        LABELS,
        y,
    )


def test_that_none_is_infinite_is_said_of_steps_that_were_measured(page):
    page.pick("#metric", "activation_nonfinite")
    row = pixels(page)
    quiet = [*bytes.fromhex(QUIET), 255]
    read = [x for x, colour in enumerate(row) if colour == quiet]
    assert 3 * len(READ) <= len(read) < 0.1 * len(row)
    assert sum(colour[3] == 0 for colour in row) > 0.9 * len(row)
    assert "not measured" in page.texts(".heat-legend li")


def test_between_two_readings_a_range_is_pale(page):
    row = pixels(page)
    strong = [x for x, colour in enumerate(row) if colour[3] == 255]
    pale = [x for x, colour in enumerate(row) if 0 < colour[3] < 200]
    assert len(strong) < 0.1 * len(row) < 0.8 * len(row) < len(pale)
    page.hover(HEAT, LABELS + len(row) // 4, 10)
    said = page.text(".tooltip")
    assert ": not measured. The nearest reading:step " in said
    page.hover(HEAT, LABELS + strong[-1], 10)
    assert "not measured" not in page.text(".tooltip")


ROW = 20
STRIP = 3 * ROW - 4  # Near the lower edge of the third row.


def colour(text):
    return [*bytes.fromhex(text), 255]


def test_what_overflowed_inside_is_in_the_row_of_the_layer(page):
    page.pick("#run", "open/mixprec")
    row = pixels(page, STRIP)
    assert row.count(colour(ALARM)) > 0.2 * len(row)  # It is hatched.
    assert "inside 2 bits beyond float16" in page.written(HEAT)
    assert colour(ALARM) not in pixels(page, STRIP - ROW)
    page.pick("#run", "repaired/mixprec")
    row = pixels(page, STRIP)
    since = int(0.35 * len(row))
    assert colour(ALARM) in row[:since]
    assert colour(ALARM) not in row[since:]
    assert row[since:].count(colour(BEYOND)) > 0.2 * (len(row) - since)


def test_what_was_measured_of_no_layer_is_no_choice(page):
    assert len(page.all("#metric option")) == 2
    assert "attention" not in page.text("#metric").lower()


@pytest.mark.parametrize("width", [1440, 1024])
def test_the_table_of_two_runs_is_not_cut(page, width):
    size = page.driver.get_window_size()
    page.driver.set_window_size(width, 900)
    page.pick("#run", "repaired/mixprec")
    page.pick("#compare", "open/mixprec")
    inner, outer = page.run(
        "const { scrollWidth, clientWidth } ="
        " document.querySelector('#layers .table-scroll');"
        "return [scrollWidth, clientWidth]"
    )
    page.driver.set_window_size(size["width"], size["height"])
    assert inner <= outer
