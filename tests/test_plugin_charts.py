"""What the pictures of a run say where there is little to draw."""

import numpy as np
import pytest
from selenium.webdriver.common.keys import Keys

import keras_mixprec as kmp
from keras_mixprec.reporting import schema
from keras_mixprec.reporting.run_log import RunLog

LAST = 40
METRICS = {"activation_headroom_bits": "min", "activation_nonfinite": "max"}
INSIDE = {
    "kind": "verdict",
    "verdict": "forward_overflow",
    "layer": "fault",
    "direction": "forward",
    "advice": "",
    "numbers": {"largest_inside_in_float32": 204620.0},
}
CHANGE = {"fault": {"before": "mixed_float16", "after": "float32"}}
DEMOTE = {"kind": "demote", "layers": CHANGE, "reasons": {}}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One layer at fault, repaired before the first step, and one behind it."""
    folder = tmp_path_factory.mktemp("charts")
    # Whose numbers are all finite but for those of the lost gradients.
    bins = np.array([[0.0, 1.0, 36862.0], [-16.0, -15.0, 2.0]])
    lost = np.array([[128.0, 129.0, 9.0]])
    with RunLog(folder / "repaired") as log:
        log.layers(0, [row("fault"), row("behind", "fault")])
        log.event(0, {"kind": "train_begin", "fit": 1, "tuner": True})
        log.event(0, INSIDE)
        log.event(0, DEMOTE)
        log.layers(
            LAST, [row("fault", dtype="float32"), row("behind", "fault")]
        )
        log.heat(LAST, np.array([[12.0, 0], [12, 0]]), *rows_of_heat())
        for part, found in ("activation", bins), ("gradient", lost):
            name = f"{schema.EXPONENTS[part]}/fault"
            log.histogram(LAST, name, found)
    with RunLog(folder / "broken") as log:
        log.layers(0, [row("fault"), row("behind", "fault")])
        log.event(0, {"kind": "train_begin", "fit": 1})
        log.event(1, INSIDE)
        log.heat(LAST, np.array([[-np.inf, 9], [-np.inf, 9]]), *rows_of_heat())
    kmp.load_report(folder).save_html(folder / "report.html")
    return folder / "report.html"


def row(path, *feeders, dtype="float16"):
    about = {"path": path, "class": "Dense", "compute_dtype": dtype}
    return about | {schema.FED_BY: [*feeders]}


def rows_of_heat():
    return ["fault", "behind"], METRICS


@pytest.fixture
def repaired(page):
    page.pick("#run", "repaired/mixprec")
    page.click("#layers tr[data-layer=fault]")
    return page.settle()


def test_a_histogram_says_that_it_is_of_outputs(repaired):
    said = repaired.text("#histogram .words")
    assert said.startswith("99.99\u202f% normal")
    assert "<\u202f0.01\u202f% subnormal" in said
    assert "These are outputs: beyond float16 inside the layer" in said


def test_a_histogram_of_nothing_finite_says_so_in_the_picture(repaired):
    repaired.click("#histogram [data-part=gradient]")
    repaired.settle()
    canvas = "#histogram canvas"
    repaired.until(
        lambda: "100\u202f% infinite or NaN" in repaired.written(canvas)
    )


def test_the_dtype_of_before_the_first_step_is_seen(repaired):
    bars = repaired.one("#dtypes") and repaired.settle()
    bars.until(lambda: bars.all("#dtypes .dtype-bar"))
    assert bars.values("#dtypes .dtype-bar", "title") == [
        "fault: float16, before step 1",
        "fault: float32, steps 0 to 40: demote",
    ]


def test_what_is_passed_on_has_one_name_everywhere(page):
    page.pick("#run", "broken/mixprec")
    name = "passes on what fault made"
    assert name in page.text("#layers tr[data-layer=behind]")
    page.one("#what-if")
    page.until(lambda: page.all("#what-if tr[data-layer]"))
    assert name in page.text("#what-if tr[data-layer=behind]")
    page.click("#heatmap details summary")
    cells = page.texts("#heatmap details tbody td, #heatmap details tbody th")
    assert name in cells


def test_a_click_that_moves_the_focus_shows_no_title(page):
    page.pick("#run", "broken/mixprec")
    page.press(Keys.TAB)  # A browser takes what follows for the keyboard's.
    page.focus(".figures button:last-of-type")
    page.press(Keys.ENTER)
    page.until(lambda: page.run("return document.activeElement.title"))
    assert not page.shown(".tooltip")
