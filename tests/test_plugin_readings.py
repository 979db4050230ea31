"""What the page shows of readings, and of the steps between two of them."""

import numpy as np
import pytest
from plugin_page import BEYOND

import keras_mixprec as kmp
from keras_mixprec.reporting import report_picture
from keras_mixprec.reporting.facts import Facts, join_failing
from keras_mixprec.reporting.file_source import FileSource, find_runs
from keras_mixprec.reporting.grid import Grid
from keras_mixprec.reporting.headline import headline
from keras_mixprec.reporting.passed_on import (
    add_origins,
    add_passed_on,
    passed_cells,
)
from keras_mixprec.reporting.run_data import RunData
from keras_mixprec.reporting.run_log import RunLog
from keras_mixprec.reporting.run_ranges import run_ranges

HEAT = "#heatmap .heat-scroll:nth-of-type(1) canvas"
LABELS = 208  # Pixels of the heatmap.
READ = (1, 50, 100)
QUIET = "94a3b4"  # As `colors.js` has it.
ALARM, PASSED = "d55e00", "eeb896"
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
        log.event(0, {"kind": "train_begin", "fit": 1})
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


def to_scale(page):
    """Steps as far from each other as they are."""
    if not page.one("#to-scale").is_selected():
        page.click("#to-scale")


def test_a_few_readings_are_a_column_each(page):
    assert not page.one("#to-scale").is_selected()
    row = pixels(page)
    assert {colour[3] for colour in row} == {255}
    assert "not measured" not in " ".join(page.texts("#heatmap .swatches li"))
    said = "A column is a reading: 3 of 100 steps."
    assert page.text("#metric-meaning").endswith(said)
    assert {"1", "50", "100"} <= page.written(HEAT)
    page.click_at(HEAT, LABELS + len(row) // 2, 10)
    assert page.text("#selection span").endswith("step 50")
    to_scale(page)
    assert {colour[3] for colour in pixels(page)} > {255}
    assert "A column" not in page.text("#metric-meaning")


def test_that_none_is_infinite_is_said_of_steps_that_were_measured(page):
    to_scale(page)
    page.pick("#metric", "activation_nonfinite")
    row = pixels(page)
    quiet = [*bytes.fromhex(QUIET), 255]
    read = [x for x, colour in enumerate(row) if colour == quiet]
    assert 3 * len(READ) <= len(read) < 0.1 * len(row)
    assert sum(colour[3] == 0 for colour in row) > 0.9 * len(row)
    assert "not measured" in page.texts("#heatmap .swatches li")


def test_between_two_readings_a_range_is_pale(page):
    to_scale(page)
    row = pixels(page)
    strong = [x for x, colour in enumerate(row) if colour[3] == 255]
    pale = [x for x, colour in enumerate(row) if 0 < colour[3] < 200]
    assert len(strong) < 0.1 * len(row) < 0.8 * len(row) < len(pale)
    page.hover(HEAT, LABELS + len(row) // 4, 10)
    said = page.text(".tooltip")
    assert ": not measured. The nearest reading:after step " in said
    page.hover(HEAT, LABELS + strong[-1], 10)
    assert "not measured" not in page.text(".tooltip")


ROW = 36
STRIP = 3 * ROW - 4  # Near the lower edge of the third row.


def colour(text):
    return [*bytes.fromhex(text), 255]


def test_what_overflowed_inside_is_in_the_row_of_the_layer(page):
    page.pick("#run", "open/mixprec")
    to_scale(page)
    row = pixels(page, STRIP)
    assert row.count(colour(ALARM)) > 0.2 * len(row)  # It is hatched.
    assert "overflow inside by 2 bits" in page.written(HEAT)
    assert colour(ALARM) not in pixels(page, STRIP - ROW)
    page.pick("#run", "repaired/mixprec")
    row = pixels(page, STRIP)
    assert "beyond float16 inside by 2 bits" in page.written(HEAT)
    since = int(0.35 * len(row))
    assert colour(ALARM) in row[:since]
    assert colour(ALARM) not in row[since:]
    assert row[since:].count(colour(BEYOND)) > 0.2 * (len(row) - since)


def test_what_was_measured_of_no_layer_is_no_choice(page):
    assert len(page.all("#metric option")) == 2
    assert "attention" not in page.text("#metric").lower()


def test_why_there_is_no_speed_is_said_of_two_runs_as_well(page):
    page.pick("#run", "open/mixprec")
    page.pick("#compare", "repaired/mixprec")
    (said,) = page.values("#performance .absent", "innerText")
    assert said.startswith("No step of either run was timed, so speeds are")
    page.pick("#compare", "")
    (said,) = page.values("#performance .absent", "innerText")
    assert said.startswith("No step of this run was timed: it had")


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


@pytest.mark.parametrize(
    ("fed_by", "verdicts", "expected"),
    [
        # Without a graph, all behind it in the model's order.
        ({}, {"b": "forward_overflow"}, {"c": "b", "d": "b"}),
        # A branch beside it has its own.
        ({"c": ["a"], "d": ["c"]}, {"b": "forward_overflow"}, {}),
        (
            {"c": ["b"], "d": ["c"]},
            {"b": "cast_overflow"},
            {"c": "b", "d": "b"},
        ),
        ({}, {"b": "forward_overflow", "c": "cast_overflow"}, {"d": "c"}),
        ({}, {"b": "precision_loss"}, {}),
    ],
)
def test_what_is_behind_a_layer_passes_on_what_it_made(
    fed_by, verdicts, expected
):
    layers = [{"path": path} for path in "abcd"]
    for layer in layers if fed_by else ():
        layer["fed_by"] = fed_by.get(layer["path"], [])
    add_passed_on(
        layers,
        [
            {"kind": "verdict", "verdict": kind, "layer": path}
            for path, kind in verdicts.items()
        ],
    )
    found = {x["path"]: x["passes_on"].get("activation") for x in layers}
    assert {p: o for p, o in found.items() if o} == expected


def test_what_is_called_inside_a_layer_is_fed_by_what_feeds_that_one():
    fed_by = {
        "norm": [],
        "first": ["norm"],
        "first/query": [],
        "second": ["first"],
        "second/query": [],
        "second/query/dense": [],
    }
    layers = [{"path": p, "fed_by": own} for p, own in fed_by.items()]
    verdict = {"kind": "verdict", "verdict": "forward_overflow"}
    add_passed_on(layers, [verdict | {"layer": "first"}])
    found = {x["path"] for x in layers if "activation" in x["passes_on"]}
    # What is called in the one at fault is before what that one returns.
    assert found == {"second", "second/query", "second/query/dense"}
    # Neither is one that is called beside the one at fault.
    add_passed_on(layers, [verdict | {"layer": "second/query"}])
    found = {x["path"] for x in layers if "activation" in x["passes_on"]}
    assert found == {"second"}


def test_what_flows_back_is_passed_on_the_other_way():
    layers = [{"path": path} for path in "abc"]
    verdict = {"kind": "verdict", "verdict": "backward_overflow", "layer": "b"}
    add_passed_on(layers, [verdict])
    assert [x["passes_on"] for x in layers] == [{"gradient": "b"}, {}, {}]


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory):
    """The first layer overflows, and so does all behind it."""
    folder = tmp_path_factory.mktemp("overflowing")
    names = ["a", "b", "c"]
    with RunLog(folder) as log:
        log.layers(
            0,
            [
                {"path": p, "compute_dtype": "float16", "fed_by": feeders}
                for p, feeders in zip(names, ([], ["a"], ["b"]), strict=True)
            ],
        )
        log.event(1, INSIDE | {"layer": "b", "numbers": {}})
        for step in range(1, 9):
            heat = np.array([[9.0, 0, np.nan], *[[3.0, 5.0, np.nan]] * 2])
            log.heat(step, heat, names, METRICS)
    kmp.load_report(folder).save_html(folder / "report.html")
    return folder / "report.html"


def test_the_layer_to_blame_stands_out_from_those_that_pass_it_on(
    page, overflowing
):
    page.open_file(overflowing).settle()
    assert colour(ALARM) in pixels(page, ROW + 10)
    behind = pixels(page, 2 * ROW + 10)
    assert colour(ALARM) not in behind
    assert colour(PASSED) in behind
    assert "▲ not finite" in page.text("#layers tr[data-layer=b]")
    said = "passes on what b made"
    assert said in page.text("#layers tr[data-layer=c]")
    page.one("#map")
    page.settle()
    marks = dict(
        zip(
            page.values("#map .node", "dataset.layer"),
            page.texts("#map .node"),
            strict=True,
        )
    )
    assert marks["b"].startswith("▲")
    assert marks["c"] == f"c{said}"
    page.hover(HEAT, LABELS + 300, 2 * ROW + 10)
    assert f"{said} infinite or NaN" in page.text(".tooltip")


def test_the_text_of_a_report_knows_what_is_passed_on(overflowing):
    report = kmp.load_report(overflowing.parent)
    (run,) = report.to_dict().values()
    assert [x["passed_from"] for x in run["layers"]] == [None, None, "b"]
    said = str(report)
    assert "b not finite after step 1" in said
    assert "c not finite" not in said
    assert "c passes on what b made infinite or NaN." in said


@pytest.mark.parametrize(
    ("made", "received", "origin"),
    [
        (-np.inf, -np.inf, "b"),
        (np.inf, np.inf, "b"),
        # Of infinities no layer makes zeros, and a finite one made nothing.
        (-np.inf, np.inf, None),
        (2.0, -np.inf, None),
        (None, None, None),
    ],
)
def test_who_made_it_is_told_alike_in_table_and_picture(made, received, origin):
    layers = [
        {"path": path, "compute_dtype": "float16", "inside": None}
        | {
            "least_headroom": bits,
            "passes_on": {"activation": "b"} if own else {},
        }
        for path, bits, own in (("b", made, False), ("c", received, True))
    ]
    add_origins(layers, "float16")
    assert [x["passed_from"] for x in layers] == [None, origin]
    worst = np.array([[made], [received]], float)
    found = passed_cells(grid_of(worst), HEADROOM, layers, [])
    assert found.cells.tolist() == [[-1], [-1 if origin is None else 0]]
    assert found.origins == [{"layer": "b"}] * (origin is not None)


HEADROOM = "activation_headroom_bits"


def grid_of(worst, names=("b", "c")):
    steps = np.arange(1, worst.shape[1] + 1)
    lost = np.zeros(worst.shape, bool)
    return Grid([*names], steps, steps, worst, "min", "float16", lost)


@pytest.mark.parametrize(
    ("metric", "value", "is_passed"),
    [
        ("gradient_headroom_bits", -np.inf, True),
        # Those may have vanished on their own.
        ("gradient_headroom_bits", np.inf, False),
        ("weight_gradient_nonfinite", 3.0, True),
        ("activation_nonfinite", 3.0, False),
        ("forward_error_against_float32", np.inf, False),
    ],
)
def test_gradients_pass_on_what_is_not_finite(metric, value, is_passed):
    layers = [{"path": "b"}, {"path": "c", "passes_on": {"gradient": "b"}}]
    grid = grid_of(np.full((2, 1), value))
    found = passed_cells(grid, metric, layers, [])
    assert (found.cells[1, 0] >= 0) == is_passed


DIVERGED = {
    "kind": "verdict",
    "verdict": "divergence",
    "layer": None,
    "direction": None,
    "advice": "",
    "step": 3,
    "numbers": {"loss": 1e9},
}


@pytest.mark.parametrize(
    ("event", "because"),
    [
        (DIVERGED, "training diverged"),
        (DIVERGED | {"numbers": {}}, "float32 fails as well"),
        (DIVERGED | {"verdict": "weights_lost"}, "weights were lost"),
    ],
)
def test_no_layer_is_to_blame_for_what_the_run_lost(event, because):
    layers = [{"path": path} for path in "bc"]
    inf = np.inf
    worst = np.array([[9.0, -inf, -inf], [-inf, 9.0, -inf]])
    blamed = INSIDE | {"layer": "c", "step": 1}
    for events in [event], [event, blamed]:
        own = events[1:] == []
        found = passed_cells(grid_of(worst), HEADROOM, layers, events)
        expected = [[-1, 0, 0], [0, -1, 0] if own else [-1] * 3]
        assert found.cells.tolist() == expected
        assert found.origins == [{"because": because}]
    # A search for the loss scale comes before.
    found = passed_cells(
        grid_of(worst), "gradient_headroom_bits", layers, [event]
    )
    assert found.cells.tolist() == [[-1, -1, 0]] * 2
    assert found.groups() == [
        {"from": {"because": because}, "rows": [0, 1], "columns": [[2, 2]]}
    ]


def test_a_run_that_diverged_has_no_layer_with_a_mark(page, tmp_path):
    names = ["a", "b", "c"]
    for run, bits in ("diverged", -np.inf), ("sound", 9.0):
        with RunLog(tmp_path / run) as log:
            table = {"class": "Dense", "compute_dtype": "float16"}
            log.layers(0, [table | {"path": path} for path in names])
            if run == "diverged":
                log.event(3, DIVERGED)
            for step in range(1, 9):
                heat = np.array([[bits, 0.0 if bits > 0 else 5, np.nan]] * 3)
                log.heat(step, heat, names, METRICS)
    report = kmp.load_report(tmp_path)
    said = "because training diverged, no fault of a layer: a, b, c."
    assert said in " ".join(str(report).split())
    report.save_html(tmp_path / "report.html")
    page.open_file(tmp_path / "report.html").settle()
    page.pick("#run", "diverged/mixprec")
    assert "▲" not in page.text("#layers table")
    assert "not finite: training diverged" in page.text("#layers table")
    assert colour(ALARM) not in pixels(page)
    page.pick("#compare", "sound/mixprec")
    page.one("#difference")
    page.settle()
    assert "0 layers of 3 differ" in page.text("#difference")
    assert page.errors() == []


def test_the_picture_of_a_report_knows_what_is_passed_on(overflowing):
    report = kmp.load_report(overflowing.parent)
    _, cells, *_ = report_picture.draw(report._runs, report.to_dict()).axes
    colours = cells.collections[0].get_array()
    rgb = lambda name: np.frombuffer(bytes.fromhex(name), "uint8") / 255  # noqa: E731
    np.testing.assert_allclose(colours[1, :, :3] - rgb(ALARM), 0, atol=0.01)
    np.testing.assert_allclose(colours[2, :, :3] - rgb(PASSED), 0, atol=0.01)
    legend = [text.get_text() for text in cells.get_legend().get_texts()]
    assert "infinite, NaN or all zero through no fault of the layer" in legend


def write_chain(log_dir, size):
    """A chain of layers, the last of which overflows."""
    names = [f"layer_{n}" for n in range(size)]
    table = {"class": "Dense", "compute_dtype": "float16"}
    heat = np.array([[9.0, 0, np.nan]] * size)
    heat[-1, 1] = 5
    with RunLog(log_dir) as log:
        feeders = [[], *([name] for name in names[:-1])]
        log.layers(
            0,
            [
                table | {"path": path, "fed_by": own}
                for path, own in zip(names, feeders, strict=True)
            ],
        )
        log.heat(1, heat, names, METRICS)
    kmp.load_report(log_dir).save_html(log_dir / "report.html")
    return log_dir / "report.html"


@pytest.mark.parametrize("size", [15, 40])
def test_the_worst_layer_is_in_view_on_the_map(page, tmp_path, size):
    page.open_file(write_chain(tmp_path / "own", size)).settle()
    page.one("#map")
    page.settle()
    last = f"#map .node[data-layer=layer_{size - 1}]"
    page.until(lambda: page.text(last).startswith("▲"))
    assert page.in_view(last, "#map .map-scroll")
    top = page.run("return document.querySelector('.map-scroll').scrollTop")
    assert (top == 0) == (size < 20)


def test_rows_that_stay_in_the_table_are_not_made_again(page, tmp_path):
    page.open_file(write_chain(tmp_path / "own", 200)).settle()
    page.run(
        "document.querySelector('#layers tr[data-layer=layer_100]').seen = 1;"
        "document.querySelector('#layers .table-scroll').scrollTop = 2600"
    )
    last = "#layers tr[data-layer=layer_120]"
    page.until(lambda: page.all(last))
    assert page.values("#layers tr[data-layer=layer_100]", "seen") == [1]
    page.click(last)
    page.click("#layers tr[data-layer=layer_119]")
    assert page.chosen()[1] == "layer_119"
    assert page.values("#layers tr[aria-current=true]", "dataset.layer") == [
        "layer_119"
    ]


def test_what_is_said_under_the_mouse_covers_no_keys(page):
    keys = "#heatmap .heat-legend, #heatmap .swatches"
    covered = (
        "const box = e => e.getBoundingClientRect();"
        "const own = box(document.querySelector('.tooltip'));"
        "return [...document.querySelectorAll(arguments[0])].map(box)"
        ".filter(one => own.left < one.right && one.left < own.right &&"
        " own.top < one.bottom && one.top < own.bottom).length"
    )
    size = len(pixels(page))
    for y in 10, 3 * ROW - 4:
        page.hover(HEAT, LABELS + size - 4, y)
        assert page.shown(".tooltip")
        assert page.run(covered, keys) == 0


def test_limits_are_beside_the_curves(page):
    page.click("#layers tr[data-layer=a]")
    page.one("#course")
    page.settle()
    size, inner = page.run(
        "const canvas = document.querySelector('#course canvas');"
        "const pen = canvas.getContext('2d');"
        "return [canvas.offsetWidth, pen.measureText('smallest normal').width]"
    )
    assert inner < 100 < size
    assert {"maximum", "smallest normal", "smallest"} <= page.written(
        "#course canvas"
    )


def test_the_timeline_fills_its_card_beside_a_taller_one(page):
    measure = (
        "const bottom = css =>"
        " document.querySelector(css).getBoundingClientRect().bottom;"
        "return bottom('#timeline') - bottom('#timeline canvas')"
    )
    size = page.driver.get_window_size()
    page.driver.set_window_size(1440, 900)
    before = page.run(measure)
    page.run("document.querySelector('#performance').style.minHeight = '480px'")
    page.until(lambda: page.one("#timeline canvas").size["height"] > 300)
    assert page.settle().run(measure) == pytest.approx(before, abs=2)
    page.run("document.querySelector('#performance').style.minHeight = ''")
    page.until(lambda: page.one("#timeline canvas").size["height"] < 300)
    page.driver.set_window_size(size["width"], size["height"])


def test_a_fault_is_dated_back_over_several_fits():
    skips = [
        {"kind": "skipped_step", "at_step": n, "step": n} for n in (1, 3, 4, 5)
    ]

    def verdict(layer, step, since):
        about = {"kind": "verdict", "verdict": "forward_overflow"}
        return about | {"layer": layer, "step": step, "failing_since": since}

    first, again = verdict("a", 4, 3), verdict("a", 6, 5)
    other = verdict("b", 6, 5)  # Not what made the steps before it fail.
    join_failing([*skips, first, again, other])
    assert [v["failing_since"] for v in (first, again, other)] == [3, 3, 5]


def test_the_sentence_says_that_a_fault_is_of_an_earlier_fit():
    about = {"kind": "verdict", "verdict": "forward_overflow", "advice": ""}
    where = {"layer": "a", "direction": "forward", "step": 9}
    layer = {"path": "a", "compute_dtype": "float16"}
    facts = Facts(
        [about | where | {"failing_since": 2}], [layer], 5, {"": 5}, 5, True
    )
    said = "failing since step 2 of an earlier fit"
    assert said in headline(facts._replace(fits=2, first=6))["text"]
    assert said not in headline(facts)["text"]


def test_the_plan_knows_the_loss_scale_that_a_verdict_advises(tmp_path):
    verdict = {"kind": "verdict", "verdict": "scale_too_low", "layer": None}
    about = {"direction": "backward", "advice": "", "numbers": {}}
    with RunLog(tmp_path) as log:
        log.layers(0, [{"path": "a", "compute_dtype": "float16"}])
        log.event(1, verdict | about | {"numbers": {"needed_bits": 13}})
    ((name, source),) = find_runs(str(tmp_path)).items()
    data = RunData(name, FileSource(source))
    assert run_ranges(data, 100)["needed_scale"] == 13
