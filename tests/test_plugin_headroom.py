"""What the page says of how close each layer is to an overflow."""

import pathlib
import shutil
import subprocess

import numpy as np
import pytest
from missing_programs import skip_without
from plugin_page import SKY

import keras_mixprec as kmp
from keras_mixprec.reporting.run_log import RunLog

HEAT = "#heatmap .heat-scroll:nth-of-type(1) canvas"
LABELS = 208  # Pixels of the heatmap.
METRICS = {
    "activation_headroom_bits": "min",
    "activation_zero": "max",
    "gradient_headroom_bits": "min",
}
DTYPES = {
    "first": "float16",
    "energy": "float16",
    "behind": "float16",
    "logits": "float32",
}
# Of outputs, and of gradients; those of the second layer and of the one behind
# it are all zero.
ROWS = [
    [12.849, 0.1, 9.25],
    [np.inf, 1, 6.125],
    [np.inf, 1, np.inf],
    [3.0, 0.0, 7.5],
]
INSIDE = {
    "kind": "verdict",
    "verdict": "forward_overflow",
    "layer": "energy",
    "direction": "forward",
    "advice": "",
    "numbers": {"largest_inside_in_float32": 2.0**20},
}


def write(log_dir, dtypes, rows, events=()):
    names = [*dtypes]
    feeders = [[], *([name] for name in names[:-1])]
    with RunLog(log_dir) as log:
        log.layers(
            0,
            [
                {"path": path, "class": "Dense", "compute_dtype": dtype}
                | {"fed_by": own}
                for (path, dtype), own in zip(
                    dtypes.items(), feeders, strict=True
                )
            ],
        )
        for event in events:
            log.event(1, event)
        for step in (1, 10, 50, 100):
            log.heat(step, np.array(rows), names, METRICS)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A run with a layer at fault, and one without that is in float32."""
    folder = tmp_path_factory.mktemp("headroom")
    write(folder / "fault", DTYPES, ROWS, [INSIDE])
    sound = [[11.0, 0.1, 9], [4.0, 0, 9], [8.0, 0, 9], [3.0, 0, 9]]
    write(folder / "wide", dict.fromkeys(DTYPES, "float32"), sound)
    return folder


@pytest.fixture(scope="module")
def report(logs):
    kmp.load_report(logs).save_html(logs / "report.html")
    return logs / "report.html"


def row_of(page, layer):
    return page.text(f"#layers tr[data-layer={layer}]")


def said_of(page, layer, x=300):
    place = [*DTYPES].index(layer)
    height = page.run(
        "return (document.querySelector(arguments[0]).offsetHeight - 24) / 4",
        HEAT,
    )
    page.hover(HEAT, LABELS + x, int((place + 0.5) * height))
    return page.text(".tooltip")


@pytest.mark.parametrize("name", ["headroom", "readings", "steps"])
def test_its_functions_without_a_browser(name):
    if not shutil.which("node"):
        skip_without("node", "apt-get install nodejs")
    tests = pathlib.Path(__file__).with_name(f"{name}_functions.test.mjs")
    done = subprocess.run(
        ["node", "--test", tests], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_zeros_behind_a_layer_at_fault_are_not_healthy(page):
    page.pick("#run", "fault/mixprec")
    said = "all zero: comes from energy"
    assert said in row_of(page, "behind")
    assert said in said_of(page, "behind")
    page.one("#map")
    page.settle()
    assert said in page.text("#map .node[data-layer=behind]")
    page.one("#what-if")
    page.settle()
    cells = page.texts("#what-if tr[data-layer=behind] td")
    assert cells[0] == said
    legend = page.texts("#heatmap .swatches li")
    assert "infinite, NaN or all zero through no fault of the layer" in legend
    assert "all zero" in legend


def test_zeros_are_hatched_and_float32_has_a_full_bar(page):
    page.pick("#run", "fault/mixprec")
    # Two rows of four: of the one with the fault, hatched, what is above its
    # strip is left; the other comes from it.
    width, height = page.run(
        "const { width, height } = document.querySelector(arguments[0]);"
        "return [width - arguments[1] - 22, (height - 24) / 4]",
        HEAT,
        LABELS,
    )
    assert 0.1 < page.count(HEAT, SKY) / (width * height) < 0.5
    (width,) = page.values("#layers tr[data-layer=logits] .fill", "style.width")
    assert width == "100%"
    assert "overflow inside by 4 bits" in page.written(HEAT)


def test_a_layer_in_float32_has_the_headroom_of_float32(page):
    page.pick("#run", "fault/mixprec")
    assert "115 bits" in row_of(page, "logits")
    words = "115 bits left in float32, 3 bits if it were float16"
    assert words in said_of(page, "logits")
    (title,) = page.values("#layers tr[data-layer=logits] .headroom", "title")
    assert title == f"{words} after step 1"
    assert "float16 or float32" in page.text("#metric-meaning")
    page.click("[data-column=headroom]")
    assert page.layers()[-1] != "logits"
    assert page.layers().index("first") < page.layers().index("logits")


def test_a_run_in_float32_is_shown_as_if_it_were_in_float16(page):
    page.pick("#run", "wide/mixprec")
    assert "if they were float16" in page.text("#metric-meaning")
    assert "if float16" in page.written(".heat-legend canvas")
    assert "3 bits if it were float16" in said_of(page, "logits")


def test_the_closest_to_an_overflow_is_on_top(page, logs):
    page.pick("#run", "fault/mixprec")
    found = dict(
        zip(
            page.texts(".health .name"),
            page.values(".health", "title"),
            strict=True,
        )
    )
    values = dict(
        zip(
            page.texts(".health .name"),
            page.texts(".health .value"),
            strict=True,
        )
    )
    activations = "least headroom, activations"
    assert values[activations] == "▲ overflow inside"
    assert found[activations].startswith("energy, after step 1:")
    gradients = "least headroom, gradients"
    assert values[gradients] == "6.1 bits"
    assert found[gradients].startswith(
        "energy, after step 1, loss scale included"
    )
    (run,) = kmp.load_report(logs / "fault").to_dict().values()
    bits = [layer["least_gradient_headroom"] for layer in run["layers"]]
    assert bits == [9.25, 6.125, np.inf, 7.5]
    page.pick("#run", "wide/mixprec")
    assert not [n for n in page.texts(".health .name") if "headroom" in n]


def test_of_two_runs_a_cell_has_one_quantity(page):
    page.pick("#run", "fault/mixprec")
    page.pick("#compare", "wide/mixprec")
    page.one("#difference")
    page.settle()
    heads = page.texts("#difference thead th")
    cells = page.texts("#difference tr[data-layer=energy] td")
    row = {
        head.split("fault")[0]: cell
        for head, cell in zip(heads[1:], cells, strict=True)
    }
    assert row["Activation headroom"] == "all zero | 116 bits"
    assert row["Overflow inside the layer"].endswith(" | none")
    page.pick("#compare", "")


def test_python_and_the_page_read_the_same_number(page, logs):
    page.pick("#run", "fault/mixprec")
    report = kmp.load_report(logs / "fault").to_dict()
    (data,) = report.values()
    (first, *_), metrics = data["layers"], data["heat"]["metrics"]
    (values,) = (
        m["values"] for m in metrics if m["name"] == "activation_headroom_bits"
    )
    assert first["least_headroom"] == 12.8515625
    assert values["first"][0] == np.float32(12.849)
    assert "12.9 bits left" in said_of(page, "first")
    assert "12.9 bits" in row_of(page, "first")


# How far each card goes on below what is in it, with its own padding.
_BELOW = """
return Object.fromEntries([...document.querySelectorAll("main .card")]
  .filter((card) => card.offsetHeight)
  .map((card) => {
    const endOf = (one) => one.getBoundingClientRect().bottom;
    return [card.id, endOf(card) - Math.max(...[...card.children].map(endOf))];
  }));
"""


def test_cards_end_where_what_is_in_them_ends(page):
    page.pick("#run", "fault/mixprec")
    for other in "", "wide/mixprec":
        page.pick("#compare", other)
        for card in "#map", "#what-if", "#difference":
            page.one(card)
            page.settle()
        below = page.run(_BELOW)
        assert {card: room for card, room in below.items() if room > 40} == {}
