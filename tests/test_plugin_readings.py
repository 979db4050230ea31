"""What the page shows of readings, and of the steps between two of them."""

import numpy as np
import pytest

import keras_mixprec as kmp
from keras_mixprec.reporting.run_log import RunLog

HEAT = "#heatmap .heat-scroll:nth-of-type(1) canvas"
LABELS = 208  # Pixels of the heatmap.
READ = (1, 50, 100)
QUIET = "94a3b4"  # As `colors.js` has it.
METRICS = {"activation_headroom_bits": "min", "activation_nonfinite": "max"}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Two layers of a run of 100 steps, three of which were measured."""
    folder = tmp_path_factory.mktemp("sparse")
    with RunLog(folder) as log:
        log.layers(
            0, [{"path": p, "compute_dtype": "float16"} for p in ("a", "b")]
        )
        for step in READ:
            heat = np.array([[9.0, 0.0], [12.85, 0.0]])
            log.heat(step, heat, ["a", "b"], METRICS)
    kmp.load_report(folder).save_html(folder / "report.html")
    return folder / "report.html"


def pixels(page):
    """The colours of the first layer's row, by pixel from its left end."""
    return page.run(
        "const canvas = document.querySelector(arguments[0]);"
        "const size = canvas.width - arguments[1] - 22;"
        "const { data } = canvas.getContext('2d')"
        ".getImageData(arguments[1], 10, size, 1);"
        "return Array.from({ length: size }, (_, x) =>"
        " [...data.slice(4 * x, 4 * x + 4)]);",
        HEAT,
        LABELS,
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
