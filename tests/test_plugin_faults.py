"""What is a fault of a format and what is not, in the log and on the page."""

import pathlib
import re
import shutil
import subprocess
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from missing_programs import skip_without
from plugin_runs import train

import keras_mixprec as kmp
from keras_mixprec.reporting import report_page, report_picture, schema
from keras_mixprec.reporting.bad_input import mark_spoiled
from keras_mixprec.reporting.file_source import FileSource, find_runs
from keras_mixprec.reporting.run_data import RunData
from keras_mixprec.reporting.run_log import RunLog
from keras_mixprec.reporting.run_ranges import run_ranges
from keras_mixprec.reporting.text_formats import to_json

BATCH = 8


class SumOfSquares(keras.layers.Layer):
    """Divides by a sum that float16 does not hold: its outputs become 0."""

    def call(self, x):
        total = keras.ops.sum(keras.ops.square(x), axis=-1, keepdims=True)
        return x / keras.ops.sqrt(total + 1e-3)


def plain():
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(16, "relu", name="hidden")(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(hidden))


def overflows_inside():
    inputs = keras.Input((8,))
    x = keras.layers.Rescaling(900.0, dtype="mixed_float16")(inputs)
    x = SumOfSquares(name="sum_of_squares")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(x))


def dead():
    inputs = keras.Input((8,))
    below = keras.initializers.Constant(-100)
    x = keras.layers.Dense(16, "relu", bias_initializer=below, name="zeros")(
        inputs
    )
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(x))


def fit(log_dir, build, *callbacks, bad=(), scale="dynamic"):
    keras.utils.set_random_seed(0)
    model = build()
    kmp.apply_policy(model, "mixed_float16")
    model.compile(
        kmp.LossScaleOptimizer(keras.optimizers.Adam(1e-3), scale),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    monitor = kmp.MixPrecMonitor(
        log_dir, update_freq=1, probe_every=1, max_overhead=1, verbose=0
    )
    x = np.random.default_rng(0).normal(size=(160, 8)).astype("float32")
    for step, value in bad:
        x[(step - 1) * BATCH + 3, 2] = value
    y = np.arange(160) % 3
    callbacks = [monitor, *callbacks]
    model.fit(x, y, BATCH, verbose=0, shuffle=False, callbacks=callbacks)


SEARCH = kmp.DynamicLossScale(initial_scale=2.0**24, growth_interval=100)
BAD_STEPS = [5, 12]


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    log_dir = tmp_path_factory.mktemp("logs")
    bad = zip(BAD_STEPS, (np.nan, np.inf), strict=True)
    fit(log_dir / "bad", plain, bad=bad)
    fit(log_dir / "search", plain, scale=SEARCH)
    for run, dry_run in ("inside", True), ("repaired", False):
        tuner = kmp.PrecisionTuner(verbose=0, dry_run=dry_run)
        fit(log_dir / run, overflows_inside, tuner)
    fit(log_dir / "dead", dead)
    train(log_dir / "overflow", epochs=1)
    return log_dir


def data_of(logs, run):
    name = f"{run}/mixprec"
    return RunData(name, FileSource(find_runs(str(logs))[name]))


def layer_of(logs, run, path):
    layers = data_of(logs, run).overview()["layers"]
    return next(layer for layer in layers if layer["path"] == path)


# What the log says.


def test_a_batch_that_is_not_finite_is_left_out(logs):
    data = data_of(logs, "bad")
    assert data.overview()["bad_input"] == BAD_STEPS
    for metric in "activation_headroom_bits", "gradient_nonfinite":
        grid = data.grid(metric, 2000)
        (columns,) = np.nonzero(grid.lost.any(axis=0))
        assert grid.last[columns].tolist() == BAD_STEPS
        assert np.isnan(grid.worst[:, columns]).all()
    weights = data.grid("weight_headroom_bits", 2000)
    assert not weights.lost.any()
    assert not np.isinf(data.grid("activation_headroom_bits", 5).worst).any()


def test_bad_data_takes_no_headroom_and_is_no_reason_of_a_plan(logs):
    layers = data_of(logs, "bad").overview()["layers"]
    assert np.isfinite([x["least_headroom"] for x in layers]).all()
    ranges = run_ranges(data_of(logs, "bad"), 2000)["layers"]
    assert not any("nonfinite" in own for own in ranges.values())


def test_an_overflow_beside_bad_data_is_not_left_out(logs, tmp_path):
    grid = data_of(logs, "overflow").grid("activation_headroom_bits", 2000)
    assert not grid.lost.any()
    assert (grid.worst == -np.inf).any()


def spoiled(steps, bad, skipped, *more):
    lines = [
        {"kind": "skipped_step", "step": step, "at_step": step}
        | ({"bad_input": {"x": 0}} if step in bad else {})
        for step in (*bad, *skipped)
    ] + [*more]
    table = SimpleNamespace(steps=np.array(steps), spoiled=None)
    mark_spoiled([table], [to_json(line).encode() for line in lines])
    return np.array(steps)[table.spoiled].tolist()


def test_a_row_of_several_readings_is_left_out_if_nothing_else_failed():
    steps = [10, 20, 30, 50, 70, 90]
    # Until 30 each row is one reading; from then on of two, the worst.
    assert spoiled(steps, [15, 20], []) == [20]
    assert spoiled(steps, [40, 60, 81], [61]) == [50, 90]
    # A loss scale that bad data lowered fell at no other step.
    fell = {"kind": "loss_scale_low", "step": 90, "at_step": 61}
    fell |= {"cause": "bad_data", "message": ""}
    assert spoiled(steps, [40, 60, 81], [], fell) == [50, 70, 90]


def test_the_least_scale_that_skipped_a_step_is_known(logs):
    data = data_of(logs, "search")
    skips = [e for e in data.events() if e["kind"] == "skipped_step"]
    least = min(event["scale"] for event in skips)
    assert run_ranges(data, 2000)["overflowing_scale"] == np.log2(least)


@pytest.mark.parametrize("run", ["bad", "overflow"])
def test_no_loss_scale_is_to_blame_for_data_or_a_loss(logs, run):
    data = data_of(logs, run)
    assert data.overview()["skipped"]
    assert run_ranges(data, 2000)["overflowing_scale"] is None


def test_headroom_is_used_up_inside_of_a_layer(logs):
    found = layer_of(logs, "inside", "sum_of_squares")
    largest = float(found["inside"]["largest"])
    bits = np.log2(65504 / largest)
    assert bits < 0
    assert found["least_headroom"] == pytest.approx(bits, abs=0.01)
    assert found["beyond"] is None
    # What the outputs are: zeros.
    assert layer_of(logs, "inside", "logits")["inside"] is None
    assert "sum_of_squares -" in str(kmp.load_report(logs / "inside"))


def test_a_wider_layer_holds_what_would_overflow_inside(logs):
    found = layer_of(logs, "repaired", "sum_of_squares")
    assert found["compute_dtype"] == "float32"
    assert found["beyond"] == "float16"


def write_verdict(log_dir, numbers, change=(), errors=()):
    """A log of a layer with a verdict, whose outputs have 9 bits left."""
    row = {"path": "a", "class": "Dense", "compute_dtype": "float16"}
    verdict = {"kind": "verdict", "verdict": "forward_overflow", "layer": "a"}
    verdict |= {"direction": "forward", "advice": "", "numbers": numbers}
    with RunLog(log_dir) as log:
        log.layers(0, [row])
        log.event(3, verdict)
        for step, dtype in change:
            log.layers(step, [row | {"compute_dtype": dtype}])
        metrics = {"forward_error_against_float32": "max"}
        for step, error in errors:
            table = np.array([[error]])
            log.heat(step, table, ["a"], metrics, schema.ERRORS)
        metrics = {"activation_headroom_bits": "min"}
        log.heat(9, np.array([[9.0]]), ["a"], metrics)


INSIDE = {"largest_inside_in_float32": 2.0**18}
RETURNED = [(4, "float32"), (6, "float16")]


@pytest.mark.parametrize(
    ("numbers", "change", "left"),
    [
        (INSIDE, [], np.log2(65504) - 18),
        ({"largest_inside_in_float32": 100.0}, [], 0),  # A sum for a mean.
        (INSIDE, RETURNED, 9),  # Found sound in float16 since.
        ({"headroom_bits": 1, "overflows_in_steps": 30}, [], 9),  # A forecast.
        *(
            ({"largest_inside_in_float32": x}, [], 9)
            for x in ("damaged", None, [], -1.0, "nan")
        ),
        ({"largest_inside_in_float32": "inf"}, [], -np.inf),
    ],
)
def test_a_verdict_uses_headroom_up_while_it_holds(
    tmp_path, numbers, change, left
):
    write_verdict(tmp_path / "own", numbers, change)
    found = layer_of(tmp_path, "own", "a")
    assert found["least_headroom"] == pytest.approx(left, abs=0.01)


@pytest.mark.parametrize(
    ("errors", "found"), [([(2, 0.75)], 2), ([(2, 0.75), (7, 0.25)], 7)]
)
def test_an_error_is_that_of_now_if_one_is_known(tmp_path, errors, found):
    change = [(4, "float32")]
    write_verdict(tmp_path / "own", INSIDE, change, errors)
    ranges = run_ranges(data_of(tmp_path, "own"), 2000)["layers"]["a"]
    assert (ranges["error_step"], ranges["error"]) in errors
    assert ranges["error_step"] == found


def test_the_picture_has_bad_data_in_a_colour_of_its_own(logs):
    data = data_of(logs, "bad")
    overviews = {data.name: data.overview()}
    axis = report_picture.draw([data], overviews).axes[1]
    said = [text.get_text() for text in axis.get_legend().get_texts()]
    assert "input not finite" in said
    (mesh,) = axis.collections
    colours = np.reshape(mesh.get_array(), (-1, 4))
    assert [*report_page.level("input"), 1] in colours.tolist()


# What the page says.


def test_its_functions_without_a_browser():
    if not shutil.which("node"):
        skip_without("node", "apt-get install nodejs")
    tests = pathlib.Path(__file__).with_name("faults_functions.test.mjs")
    done = subprocess.run(
        ["node", "--test", tests], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def report(logs):
    kmp.load_report(logs).save_html(logs / "report.html")
    return logs / "report.html"


def show(page, run, layer=None):
    page.pick("#run", f"{run}/mixprec")
    if layer:
        page.click(f"#layers tr[data-layer={layer}]")
    for card in "#map", "#course", "#what-if":
        page.one(card)
        page.settle()
    page.until(lambda: page.all("#what-if tr[data-layer]"))
    return page.settle()


BAD_INPUT = "input not finite: no overflow, no format helps"
HEAT = "#heatmap .heat-scroll canvas"
PURPLE = "cc79a7"


def test_bad_data_is_called_bad_data(page):
    show(page, "bad")
    assert BAD_INPUT in page.texts("#heatmap .swatches li")
    assert page.count(HEAT, PURPLE) > 0
    assert "overflow" not in page.text("#map .map-scroll")
    assert "not finite at steps 5, 12 (bad data)" in page.text("#map .hint")
    said = page.text("#what-if")
    assert "would overflow" not in said
    assert "not finite in float16" not in said
    assert "not finite at steps 5, 12 (bad data)" in said
    assert "hidden" not in page.text("#what-if h3 + p")


def write_histogram(log_dir, **bad):
    """A log of one skipped step, and the exponents of a layer at it."""
    skip = {"kind": "skipped_step", "at_step": 5, "scale": 1.0} | bad
    with RunLog(log_dir) as log:
        log.layers(0, [{"path": "a", "compute_dtype": "float16"}])
        log.event(5, skip | {"variables": ["a"]})
        heat = np.array([[9.0, 4.0]])
        metrics = {"activation_headroom_bits": "min"}
        log.heat(5, heat, ["a"], metrics | {"activation_nonfinite": "max"})
        # A third is infinite or NaN.
        bins = np.array([[3.0, 4.0, 2.0], [128.0, 129.0, 1.0]])
        log.histogram(5, f"{schema.EXPONENTS['activation']}/a", bins)
    kmp.load_report(log_dir).save_html(log_dir / "report.html")
    return log_dir / "report.html"


@pytest.mark.parametrize("bad", [{}, {"bad_input": {"x": 0}}])
def test_the_histogram_of_a_bad_batch_raises_no_alarm(page, tmp_path, bad):
    page.open_file(write_histogram(tmp_path / "own", **bad)).settle()
    page.click("#layers tr[data-layer=a]")
    assert (BAD_INPUT in page.text("#histogram .words")) == bool(bad)
    assert page.shown("#histogram .words.alarm") != bool(bad)
    page.one("#course")
    left_out = "The input was not finite at step 5 (bad data)"
    page.until(lambda: page.text("#course .hint"))
    assert (left_out in page.text("#course .hint")) == bool(bad)
    assert ("first after step 5" in page.text("#course .hint")) != bool(bad)


def test_the_advised_loss_scale_skipped_no_step(page, logs):
    show(page, "search")
    least = run_ranges(data_of(logs, "search"), 2000)["overflowing_scale"]
    said = page.text("#what-if h3 + p")
    assert f"{_power(least)} on the run skipped steps" in said


def _power(bits):
    return "2" + "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(d)] for d in str(int(bits)))


def test_an_overflow_inside_is_in_table_map_and_heatmap(page):
    show(page, "inside")
    row = "#layers tr[data-layer=sum_of_squares]"
    assert "▲ overflow inside" in page.text(row)
    (said,) = page.values("#map [data-layer=sum_of_squares]", "title")
    assert "float16 holds up to 65\u202f504" in said
    assert page.count(HEAT, "d55e00") > 0  # The row's mark.
    show(page, "repaired")
    assert "beyond float16 inside" in page.text(row)


def test_what_is_all_zero_is_said_alike(page):
    show(page, "dead", "zeros")
    said = "All values are zero, which have no range."
    assert page.text("#course .absent") == said
    assert said in page.text("#histogram .nothing")
    cells = "#what-if tr[data-layer=zeros] td"
    assert page.texts(cells)[0] == "all values are zero"
    show(page, "inside")
    cells = "#what-if tr[data-layer=sum_of_squares] td"
    assert page.texts(cells)[-1] == "none"  # It has no weights.


@pytest.mark.parametrize("run", ["bad", "inside", "dead", "overflow"])
def test_no_text_of_the_page_has_backticks(page, run):
    show(page, run)
    assert "`" not in page.text("main")


def test_a_layer_that_nobody_chose_is_shown_for_a_reason(page):
    show(page, "search")
    why = "(the least headroom of the layers with a histogram; click"
    assert why in page.text("#histogram .hint")


def test_a_run_to_compare_with_has_no_colour_of_an_alarm():
    colours = re.findall(
        "--compare: #(\\w{6})", report_page.static("style.css")
    )
    assert len(colours) == 2  # Of the light and of the dark theme.
    for red, green, blue in map(bytes.fromhex, colours):
        assert max(red, green, blue) - min(red, green, blue) < 32
