"""The cards that answer "what if": their arithmetic, and they in a browser."""

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import urllib.parse

import keras
import ml_dtypes
import numpy as np
import pytest
from missing_programs import skip_without
from plugin_page import VERMILLION, Page
from plugin_runs import tiny_transformer, train, train_growing
from reporting_readers import get, poll, tensorboard
from selenium.webdriver.common.keys import Keys

import keras_mixprec as kmp
from keras_mixprec.reporting import run_ranges
from keras_mixprec.reporting.file_source import FileSource, find_runs
from keras_mixprec.reporting.format_limits import CHOICES, format_limits
from keras_mixprec.reporting.grid import as_sent
from keras_mixprec.reporting.run_data import RunData
from keras_mixprec.reporting.run_log import RunLog
from keras_mixprec.reporting.run_summary import summary
from keras_mixprec.reporting.text_formats import to_json
from keras_mixprec.tensorboard_plugin import endpoints
from keras_mixprec.tensorboard_plugin.log_folder import LogFolder

FAILED, TUNED = "float16/mixprec", "tuned/mixprec"
REPAIRED = "repaired/mixprec"


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    log_dir = tmp_path_factory.mktemp("logs")
    train(log_dir / "float16", epochs=1)
    train_growing(log_dir / "repaired", kmp.PrecisionTuner(verbose=0))
    train(log_dir / "tuned", kmp.PrecisionTuner(verbose=0), epochs=1)
    return log_dir


@pytest.fixture(scope="module")
def url(logs):
    with tensorboard(str(logs)) as url:
        assert poll(lambda: len(ask(url, "runs") or ()) >= 3)
        yield url


@pytest.fixture
def page(driver):
    page = Page(driver)
    page.errors()
    yield page
    assert page.errors() == []


@contextlib.contextmanager
def served(page, folder):
    """A server for one test, which the page no longer asks when it ends."""
    with tensorboard(str(folder)) as url:
        yield url
        page.driver.get("about:blank")


def ask(url, route, **query):
    return get(url, f"plugin/mixed_precision/data/{route}", **query)


def test_rows_of_runs_come_as_they_are_read(logs, monkeypatch):
    monkeypatch.setattr(endpoints, "_PATIENCE", 0)
    answers, runs = endpoints.Endpoints(), LogFolder(str(logs))
    seen = []
    for _ in range(4):
        rows = json.loads(answers.data(runs, "summaries", {}).body)
        seen.append([row.get("unread", False) for row in rows])
    assert seen[0] == [False, True, True]
    assert seen[2] == seen[3] == [False] * 3
    assert rows == [
        json.loads(to_json(summary(data_of(logs, row["run"]).overview())))
        for row in rows
    ]


def data_of(logs, run):
    return RunData(run, FileSource(find_runs(str(logs))[run]))


# Arithmetic, against ml_dtypes and NumPy.


def cast_state(largest, low, dtype):
    """What becomes of numbers between two powers of two in a format."""
    numbers = np.array([2.0**low, 2.0**largest], "float64")
    with np.errstate(over="ignore"):
        # Without infinities a format has NaN there.
        cast = numbers.astype(ml_dtypes.finfo(dtype).dtype)
        spare = (4 * numbers).astype(cast.dtype)
    if not np.isfinite(cast[1].astype("float64")):
        return "overflows"
    if cast[0] == 0:
        return "vanishes"
    finite = np.isfinite(spare[1].astype("float64"))
    return "fits" if finite else "close"


def some_casts():
    for dtype in CHOICES[1:]:
        info = ml_dtypes.finfo(dtype)
        top = int(np.log2(float(info.max)))
        bottom = int(np.log2(float(info.smallest_subnormal)))
        for largest in (0, top - 3, top - 0.5, top + 1):
            # A tie at half the smallest number is rounded to 0.
            for low in (bottom - 2, bottom - 1, bottom, bottom + 1):
                range_ = {"largest": largest, "low": low}
                state = cast_state(largest, low, dtype)
                yield {"dtype": dtype, "range": range_, "state": state}


def some_windows():
    ranges = (-3, -20), (4, -40), (-12.5, -13)
    for dtype, (largest, low) in itertools.product(CHOICES[2:], ranges):
        bits = np.arange(-60, 80)
        numbers = np.array([2.0**low, 4 * 2.0**largest])
        with np.errstate(over="ignore"):
            scaled = numbers * np.exp2(bits[:, None].astype("float64"))
            cast = scaled.astype(ml_dtypes.finfo(dtype).dtype)
        small, large = cast.astype("float64").T
        window = {
            "lowest": bits[small > 0].min().item(),
            "highest": bits[np.isfinite(large)].max().item(),
        }
        range_ = {"largest": largest, "low": low}
        yield {"dtype": dtype, "range": range_} | window


def test_the_rules_agree_with_casts():
    if not shutil.which("node"):
        skip_without("node", "apt-get install nodejs")
    tests = pathlib.Path(__file__).with_name("answers_functions.test.mjs")
    numbers = {
        "formats": [format_limits(name) for name in CHOICES],
        "casts": list(some_casts()),
        "windows": list(some_windows()),
    }
    done = subprocess.run(
        ["node", "--test", tests],
        capture_output=True,
        text=True,
        env=os.environ | {"MIXPREC_CASTS": json.dumps(numbers)},
    )
    assert done.returncode == 0, done.stdout


def test_numbers_that_count_keep_99_percent_of_the_energy():
    random = np.random.default_rng(0)
    values = np.exp2(random.normal(-8, 5, 4000)).astype("float32")
    exponents = np.floor(np.log2(values)).astype(int)
    bins, counts = np.unique(exponents, return_counts=True)
    low = run_ranges.smallest_that_counts(bins, counts)
    # Bins count every number as the power of two below it.
    energy = np.exp2(2.0 * exponents)
    assert energy[exponents >= low].sum() >= 0.99 * energy.sum()
    assert energy[exponents > low].sum() < 0.99 * energy.sum()
    assert run_ranges.smallest_that_counts([128], [5]) is None


def test_ranges_are_those_of_the_log(logs):
    data = data_of(logs, REPAIRED)
    own = run_ranges.run_ranges(data, 2000)["layers"]["logits"]["activation"]
    grid = data.grid("activation_headroom_bits", 2000)
    bits = as_sent(grid.worst[grid.layers.index("logits")])
    known = np.isfinite(bits)  # What overflows makes all behind it infinite.
    largest = (np.log2(65504) - bits)[known]
    assert own["worst"]["largest"] == pytest.approx(largest.max(), abs=1e-3)
    assert own["worst"]["largest_step"] == grid.last[known][largest.argmax()]
    assert own["last"]["largest"] == pytest.approx(largest[-1], abs=1e-3)


def test_gradients_are_without_the_loss_scale(logs):
    data = data_of(logs, TUNED)
    own = run_ranges.run_ranges(data, 2000)["layers"]["logits"]["gradient"]
    # Of a cross-entropy over 8 samples no gradient of a logit exceeds 1/8.
    assert -8 < own["worst"]["largest"] <= -3 + 1e-3


def test_gradients_of_weights_are_without_the_loss_scale_as_well(logs):
    data = data_of(logs, TUNED)
    own = run_ranges.run_ranges(data, 2000)["layers"]["logits"]
    grid = data.grid("weight_gradient_headroom_bits", 2000)
    bits = as_sent(grid.worst[grid.layers.index("logits")])
    largest = (np.log2(65504) - bits)[np.isfinite(bits)].max()
    found = own["weight_gradient"]["worst"]["largest"]
    assert found == pytest.approx(largest, abs=1e-3)
    # More than those of its outputs, a sum over the batch.
    assert found > own["gradient"]["worst"]["largest"]


def sound():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(16, "relu", name="embed")(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(hidden))


def test_each_call_of_fit_is_measured_by_its_own_formats(tmp_path):
    # The first call ends with a loss scale, the second has none.
    for policy in "mixed_float16", "mixed_bfloat16":
        arguments = {"policy": policy, "scaled": policy == "mixed_float16"}
        for name in policy, "both":
            train(tmp_path / name, epochs=1, build=sound, **arguments)
    both, *alone = (
        run_ranges.run_ranges(data_of(tmp_path, f"{name}/mixprec"), 2000)
        for name in ("both", "mixed_float16", "mixed_bfloat16")
    )
    for part in "activation", "gradient", "weight":
        for moment, run in ("first", alone[0]), ("last", alone[1]):
            found, known = (
                ranges["layers"]["embed"][part][moment]["largest"]
                for ranges in (both, run)
            )
            assert found == pytest.approx(known, abs=1e-3), (part, moment)


def test_only_where_it_began_a_layer_is_said_to_be_not_finite(logs):
    ranges = run_ranges.run_ranges(data_of(logs, FAILED), 2000)["layers"]
    blamed = {path for path, own in ranges.items() if "nonfinite" in own}
    assert blamed == {"overflowing"}
    assert ranges["overflowing"]["nonfinite"]["dtype"] == "float16"


def test_a_demotion_is_of_its_step_though_the_table_is_of_later(tmp_path):
    layer = {"path": "a", "compute_dtype": "float16"}
    wide = layer | {"compute_dtype": "float32"}
    change = {"a": {"before": "mixed_float16", "after": "float32"}}
    skip = {"kind": "skipped_step", "at_step": 1, "scale": 2.0**15}
    numbers = {"largest_output_in_float32": 8.0}
    found = {"kind": "verdict", "verdict": "forward_overflow", "layer": "a"}
    found |= {"direction": "forward", "advice": ""}
    with RunLog(tmp_path / "run") as log:
        log.layers(0, [layer])
        log.event(0, {"kind": "train_begin"})
        log.event(0, found | {"numbers": numbers})
        log.event(0, {"kind": "demote", "layers": change, "reasons": {}})
        log.layers(50, [wide])
        log.event(50, skip | {"variables": ["a"]})
    ranges = run_ranges.run_ranges(data_of(tmp_path, "run/mixprec"), 2000)
    assert ranges["overflowing_scale"] == 15
    assert ranges["layers"]["a"]["in_float32"] == 3


def test_a_verdict_holds_for_every_format_of_no_greater_range(logs):
    own = run_ranges.run_ranges(data_of(logs, TUNED), 2000)["layers"]
    refused = own["overflowing"]["refused"]
    most = float(ml_dtypes.finfo("float16").max)
    for dtype in CHOICES:
        narrow = float(ml_dtypes.finfo(dtype).max) <= most
        wanted = ["forward_overflow"] if narrow else []
        assert refused[dtype] == wanted, dtype


# What if.


def what_if(page, run, url, **link):
    page.open(url, run=run, **link)
    page.one("#what-if")
    page.until(lambda: page.all("#what-if tr[data-layer]"))
    return page.settle()


def cells(page, layer):
    return page.texts(f"#what-if tr[data-layer='{layer}'] td")


def test_what_a_layer_would_do_in_another_format(page, url, logs):
    what_if(page, REPAIRED, url, layer="square")
    worst = run_ranges.run_ranges(data_of(logs, REPAIRED), 2000)["layers"]
    largest = worst["square"]["activation"]["worst"]["largest"]
    beyond = largest - np.log2(65504)
    text = f"overflow: {float(f'{beyond:.1f}'):g} bits beyond float16"
    assert text in cells(page, "square")[0]
    page.pick("#what-if-format", "bfloat16")
    limit = np.log2(float(ml_dtypes.finfo("bfloat16").max))
    # It is shown with three digits.
    assert f"{limit - largest:.0f} bits left" in cells(page, "square")[0]
    assert page.text("#what-if [role=status]").endswith("1 would fit.")


def test_the_chart_and_what_if_say_the_same_of_loss_scales(page, url):
    what_if(page, TUNED, url, layer="in_1", part="gradient")
    page.pick("#what-if-moment", "first")
    said = cells(page, "in_1")[1].replace(" to ", " ").split()
    first = ask(url, "histogram", run=TUNED, layer="in_1", part="gradient")
    page.open(url, run=TUNED, layer="in_1", part="gradient", step=1)
    assert first["steps"][0] == 1
    words = page.text("#histogram .words")
    # The gradients of weights, which the chart is not of, are larger.
    assert f"; those of outputs fit loss scales {said[0]} to " in words
    assert f"to {said[1]}; in use: " not in words
    assert words.startswith("least headroom of this layer's gradients: ")
    (title,) = page.values("#histogram .words", "title")
    assert "2 bits to spare for the reading after step 1" in title


def test_a_plan_from_ranges_is_one_that_models_follow(page, url, tmp_path):
    what_if(page, TUNED, url)
    (address,) = page.values("#what-if a", "href")
    kind, _, content = address.partition(",")
    path = tmp_path / "what_if_plan.json"
    path.write_text(urllib.parse.unquote(content))
    plan = kmp.PrecisionPlan.load(path)
    train(tmp_path / "again", policy=plan, epochs=1)
    wide = [p for p, policy in plan.items() if policy == "float32"]
    assert kind == "data:application/json"
    assert "overflowing" in wide
    assert len(wide) < 4
    assert "found forward overflow" in plan.reasons["overflowing"]
    again = data_of(tmp_path / "again", "mixprec").overview()
    assert again["skipped"] == 0


def test_a_plan_says_what_another_run_found(page, tmp_path):
    train(tmp_path / "float16", epochs=1)
    train(tmp_path / "wide", epochs=1, policy="float32", scaled=False)
    kmp.load_report(tmp_path).save_html(tmp_path / "report.html")
    page.open_file(tmp_path / "report.html").settle()
    caution = "#what-if .caution"
    page.pick("#run", "wide/mixprec")
    page.one("#what-if")
    page.until(lambda: page.all("#what-if tr[data-layer]"))
    page.until(lambda: page.shown(caution))
    found = "forward overflow in overflowing (float16/mixprec)"
    assert found in page.text(caution)
    page.pick("#what-if-format", "float32")  # Of which there is no plan.
    assert not page.shown(caution)


def test_blocks_and_moments_are_chosen_with_the_keyboard(page, url):
    what_if(page, REPAIRED, url)
    assert len(page.all("#what-if tr[data-layer]")) == 3
    page.focus("#what-if-moment")
    page.press("l")  # The last reading.
    assert page.values("#what-if-moment", "value") == ["last"]
    page.pick("#what-if-format", "float8_e4m3fn")
    assert page.values("#what-if a", "hidden") == [True]
    assert "quantize" in page.text("#what-if")


def test_without_ranges_it_says_what_measures_them(page, tmp_path):
    with RunLog(tmp_path / "bare") as log:
        log.layers(0, [{"path": "a", "compute_dtype": "float16"}])
        log.event(0, {"kind": "train_begin"})
    with served(page, tmp_path) as url:
        poll(lambda: ask(url, "runs"))
        page.open(url, run="bare/mixprec")
        page.one("#what-if")
        page.until(lambda: "probe_every" in page.text("#what-if .absent"))


# The range of a layer by step.


def write_forecast(log_dir):
    """A log of a layer whose headroom falls by 2 bits in 10 steps."""
    metrics = {"activation_headroom_bits": "min"}
    forecast = {"layer": "grows", "headroom_bits": 4, "overflows_in_steps": 20}
    with RunLog(log_dir) as log:
        table = {"class": "Dense", "parameters": 1, "share_of_flops": 1.0}
        names = "grows", "rests"
        rows = [{"path": p, "compute_dtype": "float16"} | table for p in names]
        log.layers(0, rows)
        for step in range(0, 41, 10):
            heat = np.array([[12 - step / 5], [9.0]])
            log.heat(step, heat, [*names], metrics)
        log.event(40, {"kind": "trend"} | forecast)


def test_a_forecast_is_drawn_up_to_the_maximum(page, tmp_path):
    write_forecast(tmp_path / "own")
    with served(page, tmp_path) as url:
        assert poll(lambda: ask(url, "runs"))
        page.open(url, run="own/mixprec")
        page.click("#course .chip")
        words = page.text("#course .hint")
        assert "4 bits left" in words
        assert "expected at step 60" in words
        assert {"step 60", "maximum"} <= page.written("#course canvas")
        page.click("#course details summary")
        rows = [r.split() for r in page.values("#course tr", "innerText")]
        assert ["60", "(expected)", "2^16", "–", "–"] in rows
        # 4 bits below 65504.
        assert ["40", "2^12", "–", "–"] in rows
        page.focus("#course canvas")
        page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
        assert "step 10" in page.chosen()[0]
        page.click("#layers tr[data-layer=rests]")
        assert "expected" not in page.text("#course .hint")


def test_the_range_by_step_is_that_of_the_histograms(page, url, logs):
    page.open(url, run=TUNED, layer="in_0", part="gradient")
    page.click("#course details summary")
    found = data_of(logs, TUNED).histogram("in_0", "gradient")
    cells = page.texts("#course tbody td")
    (at,) = [n for n in range(0, len(cells), 4) if cells[n] == "20"]
    place = found["steps"].index(20)
    counts = np.cumsum(found["counts"][place])
    median = np.searchsorted(counts, counts[-1] / 2)
    exponents = found["exponents"][place]
    assert cells[at + 2] == f"2^{exponents[median]}"
    assert cells[at + 3] == f"2^{exponents[0]}"


def test_what_is_not_finite_is_at_the_top_edge(page, url, logs):
    page.open(url, run=FAILED, layer="overflowing")
    data = data_of(logs, FAILED)
    grid = data.grid("activation_headroom_bits", 2000)
    bits = grid.worst[grid.layers.index("overflowing")]
    steps = np.asarray(grid.last)[bits == -np.inf]
    assert f"first after step {steps[0]}." in page.text("#course .hint")
    assert "▲infinite or NaN" in page.text("#course .legend")
    page.click("#course details summary")
    cells = page.texts("#course tbody td")
    lost = [cells[n] for n in range(0, len(cells), 4) if "NaN" in cells[n + 1]]
    assert [*map(int, lost)] == steps.tolist()
    # `PLACE` of course_card.js; a triangle is 11 pixels wide at its foot.
    width = page.one("#course canvas").size["width"]
    places = 54 + steps[[0, -1]] / data.overview()["last_step"] * (width - 154)
    marks = page.pixels("#course canvas")[12 + 6 + 3][VERMILLION]
    found = marks["first"] + 5, marks["last"] - 5
    assert np.abs(places - found).max() <= 2


# The tuner's history.


def test_the_history_of_dtypes_has_a_bar_for_each(page, url, logs):
    page.open(url, run=REPAIRED)
    (square,) = [
        x
        for x in data_of(logs, REPAIRED).overview()["layers"]
        if x["path"] == "square"
    ]
    step = square["demoted_at"]
    names = page.values("#dtypes button.dtype-bar", "title")
    assert [n for n in names if n.startswith("square: float16, steps 0 to")]
    assert square["demoted_because"] in next(n for n in names if "float32" in n)
    page.focus("#dtypes button.dtype-bar.float32")
    page.press(Keys.ENTER)
    assert page.chosen() == (f"Selected: square · step {step}", "square")
    page.click("#dtypes details summary")
    assert "float32" in page.texts("#dtypes tbody td")


def test_without_changes_it_says_what_makes_them(page, url):
    page.open(url, run=FAILED)
    assert "callbacks=[monitor, PrecisionTuner()]" in page.text("#dtypes")
    assert not page.all("#dtypes button.dtype-bar")


# Two runs.


def test_two_runs_layer_by_layer(page, url, logs):
    page.open(url, run=TUNED)
    assert "second run" in page.text("#difference .absent")
    page.open(url, run=TUNED, compare=FAILED)
    page.one("#difference")
    page.until(lambda: page.all("#difference tr[data-layer] td:nth-child(5)"))
    page.pick("#difference-by", "dtype")
    first = page.values("#difference tr[data-layer]", "dataset.layer")[0]
    assert first == "overflowing"
    cells = page.texts("#difference tr[data-layer=overflowing] td")
    assert cells[0] == "float32 | float16"
    heads = page.texts("#difference thead .of-run")
    assert heads == ["tuned | float16"] * len(cells)
    page.until(
        lambda: "∞" in page.text("#difference tr[data-layer=overflowing]")
    )
    page.focus("#difference tr[data-layer=overflowing] button")
    page.press(Keys.ENTER)
    assert page.chosen()[1] == "overflowing"


# The map of the model.


def test_the_log_has_the_graph_of_a_model(logs):
    layers = data_of(logs, TUNED).overview()["layers"]
    fed_by = {layer["path"]: layer["fed_by"] for layer in layers}
    assert fed_by["embed"] == []
    assert fed_by["overflowing"] == ["in_1"]
    assert sorted(fed_by["add_2"]) == ["add_1", "out_2"]
    model = tiny_transformer()
    links = sum(len(node.input_tensors) for x in model.layers
                for node in x._inbound_nodes)  # fmt: skip
    # All but the one from the input.
    assert sum(map(len, fed_by.values())) == links - 1


def test_a_layer_is_picked_from_the_map(page, url):
    page.open(url, run=TUNED)
    assert len(page.all("#map button.node")) == 15
    assert len(page.all("#map svg path")) == 17
    page.focus("#map button.node")
    page.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ENTER)
    assert page.chosen() == ("Selected: in_0", "in_0")
    current = "#map button.node[aria-current=true]"
    assert page.values(current, "dataset.layer") == ["in_0"]
    page.click("#map details summary")
    rows = [row.split("\t") for row in page.values("#map tr", "innerText")]
    (row,) = [row for row in rows if row[0] == "add_1"]
    assert sorted(row[1].split(", ")) == ["add_0", "out_1"]


def test_blocks_of_the_map_are_unfolded(page, tmp_path):
    table = {"class": "Dense", "parameters": 1, "share_of_flops": 0.0}
    paths = ["block", "block/inner", "head"]
    with RunLog(tmp_path / "own") as log:
        rows = [{"path": p, "compute_dtype": "float16"} | table for p in paths]
        log.layers(0, rows)
        bits = np.array([[9.0], [-1.0], [5.0]])
        metric = {"activation_headroom_bits": "min"}
        log.heat(0, bits, paths, metric)
    with served(page, tmp_path) as url:
        assert poll(lambda: ask(url, "runs"))
        page.open(url, run="own/mixprec")
        page.click("#map button.quiet")
        names = page.values("#map button.node", "ariaLabel")
        assert len(names) == 2
        assert "overflow: 1 bits too large; 2 layers, folded" in names[0]
        assert "has no graph" in page.text("#map .hint")
        page.click("#map button.node[data-layer=block]")
        assert len(page.all("#map button.node")) == 3


# The search for the layers that need float32.


def test_the_trials_of_a_search_are_a_curve(page, tmp_path):
    model = tiny_transformer()
    model.compile("adam", "sparse_categorical_crossentropy")
    x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
    plan = kmp.minimize_float32(model, x, np.arange(16) % 3, log_dir=tmp_path)
    trials = plan.trade_off
    with served(page, tmp_path) as url:
        assert poll(lambda: ask(url, "runs"))
        page.open(url, run="mixprec")
        best = len(trials.pareto())
        words = f"{len(trials)} trials, {best} of them Pareto-optimal"
        assert page.text("#pareto .hint").startswith(words)
        page.click("#pareto details summary")
        rows = [r.split("\t") for r in page.values("#pareto tr", "innerText")]
        told = [set(row[3].split(", ")) - {"nothing"} for row in rows[1:]]
        assert told == [set(trial["float32"]) for trial in trials]
        kept = [row[2] == "yes" for row in rows[1:]]
        assert kept == [trial["pareto_optimal"] for trial in trials]
        page.driver.get("about:blank")  # It would ask a server that has ended.


def test_without_a_search_it_says_what_makes_one(page, url):
    page.open(url, run=TUNED)
    assert "minimize_float32(model, x, y, log_dir=...)" in page.text("#pareto")
