"""The loss in the timeline, where the log's numbers say, and as a table."""

import math
import re

import numpy as np
import pytest
from plugin_page import Page

import keras_mixprec as kmp
from keras_mixprec.reporting import schema
from keras_mixprec.reporting.run_log import RunLog

TIMELINE = "#timeline canvas"
LAST = 100
# Of the picture: where the plot begins and ends, and the loss in it.
LEFT, RIGHT, LOWEST, HIGHEST = 66, 58, 130, 18
GAP = range(40, 60)
LOSS = "8a4b9e"


def losses():
    steps = np.arange(2, LAST + 1, 2)
    values = 4.0 * np.exp(-steps / 30)
    values[np.isin(steps, GAP)] = math.nan
    return steps, values


def write(folder, dtype, scaled):
    with RunLog(folder) as log:
        log.layers(0, [{"path": "a", "compute_dtype": dtype}])
        if scaled:
            log.scale_rows(0, [[0, 2.0**15, 0, 0]])
        for row in zip(*losses(), strict=True):
            log.rows(int(row[0]), schema.LOSS, [row], schema.LOSS_COLUMNS, 64)
        log.event(LAST, {"kind": "train_end", "summary": "Done."})
    kmp.load_report(folder).save_html(folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write(tmp_path_factory.mktemp("loss"), "float16", True)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Without a loss scale."""
    return write(tmp_path_factory.mktemp("wide"), "float32", False)


# Rows of a column that are more of that colour than of any other: of a thin
# line no pixel has it alone.
_ROWS = """
const [css, x] = arguments;
const canvas = document.querySelector(css);
const { data } = canvas.getContext("2d").getImageData(x, 10, 1, 130);
const rows = [];
for (let y = 0; y < 130; y += 1) {
  const [red, green, blue] = data.slice(4 * y, 4 * y + 3);
  if (red > green + 25 && blue > red + 8) rows.push(y + 10);
}
return rows;
"""


def test_it_is_drawn_where_its_numbers_are(page):
    width = page.run(f"return document.querySelector('{TIMELINE}').clientWidth")
    edge = 0.5 + 0.004 * LAST
    scale = (width - RIGHT - LEFT) / (LAST + 2 * edge)
    steps, values = losses()
    low, high = np.nanmin(values), np.nanmax(values)
    for step in (10, 30, 70):
        (value,) = values[steps == step]
        x = LEFT + (step + edge) * scale
        y = LOWEST - (value - low) / (high - low) * (LOWEST - HIGHEST)
        rows = page.run(_ROWS, TIMELINE, round(x))
        # A pixel for the width of the line, and one for where it lies.
        assert rows, step
        assert max(abs(row - y) for row in rows) <= 2, (step, y, rows)
    middle = LEFT + (50 + edge) * scale
    # That it is not finite there is marked at the top edge.
    rows = page.run(_ROWS, TIMELINE, round(middle) + 70)
    assert rows
    assert max(rows) < HIGHEST - 4


def test_it_has_an_axis_of_its_own(page):
    # It falls from 3.7 to 0.14.
    assert {"loss", "1", "2", "3"} <= page.written(TIMELINE)


def test_a_screen_reader_has_its_numbers(page):
    page.click("#timeline details:nth-of-type(2) summary")
    rows = page.texts("#timeline details:nth-of-type(2) tbody td:last-child")
    _, values = losses()
    assert rows.count("NaN") == len([s for s in GAP if s % 2 == 0])
    assert len(rows) == len(values)
    assert float(rows[0]) == pytest.approx(values[0], abs=0.01)
    assert "loss" in page.text("#timeline .legend")


def test_it_is_a_mean_between_readings(page):
    assert (
        "loss, mean between readings: the first at step 2, then every 2 steps"
    ) in page.text("#timeline .legend")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [(40, 1.0), (90, 0.5), (100, 0.4)],
            "the first at step 40, then every 10 to 50 steps",
        ),
        ([(80, 1.0)], "mean up to its only reading, at step 80"),
        ([(n, 1.0) for n in range(1, 9)], "loss, read at every step"),
    ],
    ids=["late", "one", "all"],
)
def test_when_it_was_read_is_said_beside_it(any_page, tmp_path, rows, said):
    write_losses(tmp_path, rows)
    kmp.load_report(tmp_path).save_html(tmp_path / "report.html")
    page = any_page.open_file(tmp_path / "report.html").settle()
    assert said in page.text("#timeline .legend")
    # A legend stands for something that is seen.
    assert page.count(TIMELINE, LOSS) > 10


def test_a_loss_that_was_never_finite_is_marked(page, tmp_path):
    write_losses(tmp_path, [(n, math.nan) for n in (50, 100)])
    kmp.load_report(tmp_path).save_html(tmp_path / "report.html")
    page.open_file(tmp_path / "report.html").settle()
    said = page.text("#timeline .legend")
    assert "NaN or infinite in all 2 readings, up to step 100" in said
    assert "loss NaN or infinite" in page.written(TIMELINE)
    assert page.count(TIMELINE, LOSS) > 100


def test_an_only_reading_is_beside_the_curve_of_another_run(page, tmp_path):
    write_losses(tmp_path / "a", [(50, 10812.0), (100, math.nan)])
    write_losses(tmp_path / "b", [(n, 60 / n) for n in range(10, 101, 10)])
    kmp.load_report(tmp_path).save_html(tmp_path / "report.html")
    page.open_file(tmp_path / "report.html").settle()
    page.pick("#run", "a/mixprec").pick("#compare", "b/mixprec")
    written = page.written(TIMELINE)
    assert [text for text in written if text.endswith("↑")]
    assert {"2", "4", "6"} <= written


def write_losses(folder, rows):
    with RunLog(folder) as log:
        log.layers(0, [{"path": "a", "compute_dtype": "float16"}])
        for row in rows:
            log.rows(row[0], schema.LOSS, [row], schema.LOSS_COLUMNS, 64)
        log.event(LAST, {"kind": "train_end", "summary": "Done."})


def test_the_loss_of_a_compared_run_has_the_colour_of_its_legend(
    any_page, tmp_path
):
    write_losses(tmp_path / "a", [(10, 4.0)])
    write_losses(tmp_path / "b", [(n, 1.0) for n in range(10, 101, 10)])
    kmp.load_report(tmp_path).save_html(tmp_path / "report.html")
    page = any_page.open_file(tmp_path / "report.html").settle()
    page.pick("#run", "a/mixprec").pick("#compare", "b/mixprec")
    (colour,) = page.run(
        "return [...document.querySelectorAll('#timeline .legend-item')]"
        ".filter(e => e.textContent.startsWith('- -loss'))"
        ".map(e => getComputedStyle(e.firstChild).color)"
    )
    assert "".join(f"{int(x):02x}" for x in re.findall(r"\d+", colour)) == LOSS
    # As it is and not only mixed with white.
    assert page.count(TIMELINE, LOSS) > 200


def test_without_a_loss_scale_there_is_no_axis_of_one(page, wide):
    assert "loss scale" in page.written(TIMELINE)
    page.open_file(wide).settle()
    written = page.written(TIMELINE)
    assert {"loss", "1", "2", "3"} <= written
    # Powers of two are written with raised digits.
    assert not [x for x in written if x == "loss scale" or x[-1] in "⁰¹²⁴⁶⁸"]
    assert "loss scale" not in page.text("#timeline .legend")


def test_a_loss_that_did_not_fall_is_said_below_the_sentence(driver, tmp_path):
    page = Page(driver)
    with RunLog(tmp_path) as log:
        log.layers(0, [{"path": "a", "compute_dtype": "float16"}])
        for step in range(10, 101, 10):
            row = [[step, math.log(2)]]
            log.rows(step, schema.LOSS, row, schema.LOSS_COLUMNS, 64)
        log.event(100, {"kind": "train_end", "summary": "Done."})
    kmp.load_report(tmp_path).save_html(tmp_path / "report.html")
    page.open_file(tmp_path / "report.html").settle()
    (note,) = page.texts("#headline .note")
    assert note.startswith("The loss did not fall: 0.693 at step 20, 0.693 at")
