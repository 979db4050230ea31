"""What the tab saves: numbers and pictures, each against the log."""

import csv
import io
import json

import numpy as np
import PIL.Image
import pytest
from plugin_page import BEYOND, LINE, SKY, VERMILLION
from plugin_runs import tiny_transformer, train
from reporting_readers import poll

import keras_mixprec as kmp
from keras_mixprec.reporting import run_ranges
from keras_mixprec.reporting.file_source import FileSource, find_runs
from keras_mixprec.reporting.run_data import RunData
from keras_mixprec.reporting.run_log import RunLog

RUN, TUNED = "float16/mixprec", "tuned/mixprec"
SEARCH, PACED = "search/mixprec", "paced/mixprec"
LAYER = "overflowing"
MAXIMUM = np.log2(65504)
POINTS = [
    {"share_in_16_bits": 1.0, "error": 0.5, "float32": []},
    {"share_in_16_bits": 0.5, "error": 0.001, "float32": ["a"]},
    {"share_in_16_bits": 0.25, "error": 0.01, "float32": ["b"]},
]


def write_search(log_dir):
    with RunLog(log_dir) as log:
        log.layers(0, [{"path": "a", "compute_dtype": "float16"}])
        optimal = [True, True, False]
        points = [
            point | {"pareto_optimal": best}
            for point, best in zip(POINTS, optimal, strict=True)
        ]
        log.event(0, {"kind": "trade_off", "title": "error", "points": points})


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    train(folder / "float16", epochs=1)
    train(folder / "tuned", kmp.PrecisionTuner(verbose=0), epochs=1)
    write_search(folder / "search")
    # Without probes, which are no plain steps.
    model = tiny_transformer()
    model.compile(kmp.LossScaleOptimizer("sgd"), "mse")
    monitor = kmp.MixPrecMonitor(folder / "paced", 4, 0, 1, verbose=0)
    x = np.zeros((160, 8), "float32")
    model.fit(x, x[:, :3], 4, verbose=0, callbacks=[monitor])
    kmp.load_report(folder).save_html(folder / "report.html")
    return folder


@pytest.fixture
def report(log):
    return log / "report.html"


@pytest.fixture(scope="module")
def runs(log):
    """What the log holds, read without the page."""
    return kmp.load_report(log).to_dict()


def data_of(log, run):
    return RunData(run, FileSource(find_runs(str(log))[run]))


@pytest.fixture
def save(page, tmp_path):
    """Clicks what downloads a card in some form; returns its content."""
    behaviour = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.driver.execute_cdp_cmd("Page.setDownloadBehavior", behaviour)

    def save(card, end):
        page.click(f"#{card} [data-export={end}]")
        whole = lambda: [*tmp_path.glob(f"*-{card}.{end}")]  # noqa: E731
        assert poll(whole)
        (path,) = whole()
        content = path.read_bytes()
        path.unlink()
        return content

    return save


@pytest.fixture
def rows(save):
    """The rows that a card saves, the same as CSV and as JSON."""

    def rows(card):
        table = [
            *csv.DictReader(io.StringIO(save(card, "csv").decode(), newline=""))
        ]
        saved = json.loads(save(card, "json"))
        assert len(saved) == len(table) > 0
        for line, row in zip(table, saved, strict=True):
            for name, value in row.items():
                if isinstance(value, bool | dict | list):
                    assert json.loads(line[name]) == value
                else:
                    assert line[name] == ("" if value is None else text(value))
        return saved

    return rows


def text(value):
    """As JavaScript writes it."""
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value) if whole else value)


# Tables.


def test_a_notebook_s_frame_saves_too(page, save, log, tmp_path):
    notebook = tmp_path / "notebook.html"
    shown = kmp.load_report(log / "search")._repr_html_()
    notebook.write_text(f"<!doctype html>{shown}")
    page.open_file(notebook)
    page.enter("iframe")
    assert save("layers", "csv").startswith(b"path,")


def test_layers(rows, runs):
    for row, layer in zip(rows("layers"), runs[RUN]["layers"], strict=True):
        assert row["path"] == layer["path"]
        assert row["compute_dtype"] == layer["compute_dtype"]
        assert row["share_of_flops"] == layer["share_of_flops"]
        assert float(row["least_headroom"]) == layer["least_headroom"]


def test_events(rows, runs):
    kinds = [(e["step"], e["kind"]) for e in runs[RUN]["events"]]
    assert [(row["step"], row["kind"]) for row in rows("events")] == kinds


def test_runs(rows, runs):
    found = {row["run"]: row for row in rows("runs")}
    assert found.keys() == runs.keys()
    for name, run in runs.items():
        assert found[name]["skipped"] == run["skipped"]
        assert found[name]["state"] == run["headline"]["state"]


def test_loss_scale_and_loss(page, rows, runs):
    page.pick("#compare", TUNED)
    saved = rows("timeline")
    for run in RUN, TUNED:
        own = [row for row in saved if row["run"] == run]
        (line,) = runs[run]["scale"]
        scales = [row for row in own if "loss_scale" in row]
        assert [row["step"] for row in scales] == line["steps"]
        assert [row["loss_scale"] for row in scales] == line["scale"]
        assert [row["skipped_so_far"] for row in scales] == line["skipped"]
    page.pick("#run", PACED)
    own = [row for row in rows("timeline") if row["run"] == PACED]
    told = runs[PACED]["loss"]
    for name, values in ("step", told["steps"]), ("loss", told["values"]):
        assert [row[name] for row in own if "loss" in row] == values


def test_speed(page, rows, runs):
    page.pick("#run", PACED)
    saved = rows("performance")
    told = runs[PACED]["performance"]
    for figure in told["figures"]:
        own = [row for row in saved if row["figure"] == figure["name"]]
        whole, *by_step = (row["value"] for row in own)
        assert (whole, by_step) == (figure["value"], figure["values"])


def test_heatmap(rows, log):
    grid = data_of(log, RUN).grid("activation_headroom_bits", 1200)
    for row in rows("heatmap"):
        values = grid.worst[grid.layers.index(row["layer"])]
        # The page is sent the upper half of a float32.
        assert float(row["worst"]) == pytest.approx(values.min(), rel=2**-7)
        assert row["metric"] == "activation_headroom_bits"


def test_histogram(page, rows, log):
    page.click("#layers tr[data-layer=in_1]")
    told = data_of(log, RUN).histogram("in_1", "activation")
    saved = rows("histogram")
    assert {row["step"] for row in saved} == {told["steps"][-1]}
    bars = zip(told["exponents"][-1], told["counts"][-1], strict=True)
    found = [(row["exponent"], row["count"]) for row in saved]
    assert found == [(exponent, count) for exponent, count in bars if count]


def test_map(rows, runs):
    layers = {layer["path"]: layer for layer in runs[RUN]["layers"]}
    for row in rows("map"):
        layer = layers[row["layer"]]
        assert row["fed_by"] == layer["fed_by"]
        least = pytest.approx(layer["least_headroom"], rel=2**-7)
        assert float(row["worst"]) == least


def test_range_by_step(page, rows, log):
    page.click("#layers tr[data-layer=in_1]")
    grid = data_of(log, RUN).grid("activation_headroom_bits", 1200)
    bits = grid.worst[grid.layers.index("in_1")]
    told = dict(zip(np.asarray(grid.last).tolist(), bits, strict=True))
    for row in rows("course"):
        assert row["not_finite"] == (told[row["step"]] == -np.inf)
        largest = MAXIMUM - told[row["step"]]
        # Of the headroom three digits at least are sent.
        assert row["largest_log2"] == pytest.approx(largest, abs=0.1)


def test_dtypes(page, rows, runs):
    page.pick("#run", TUNED)
    (layer,) = [x for x in runs[TUNED]["layers"] if x["path"] == LAYER]
    bars = [row for row in rows("dtypes") if row["layer"] == LAYER]
    told = [[row["from_step"], row["dtype"]] for row in bars]
    # It was compiled in float16, and took no step in it.
    assert told == [[0, "float16"], *layer["dtypes"]]
    assert bars[-1]["to_step"] == runs[TUNED]["last_step"]
    assert "overflow" in bars[-1]["because"]


def test_what_if(page, rows, log):
    page.pick("#run", TUNED)
    page.one("#what-if")
    page.until(lambda: page.all("#what-if tr[data-layer]"))
    ranges = run_ranges.run_ranges(data_of(log, TUNED), 1200)
    saved = rows("what-if")
    assert len(saved) == 15 * len(data_of(log, TUNED).layers())
    (row,) = [
        row
        for row in saved
        if (row["layer"], row["format"]) == ("in_1", "float8_e4m3fn")
        and row["reading"] == "worst"
    ]
    worst = {
        part: ranges["layers"]["in_1"][part]["worst"]
        for part in ("activation", "gradient")
    }
    left = np.log2(448) - worst["activation"]["largest"]
    assert row["activation_bits_left"] == pytest.approx(left)
    assert row["lowest_scale_log2"] == -9 - worst["gradient"]["low"]


def test_differences(page, rows, runs):
    page.pick("#compare", TUNED)
    one, two = (
        {layer["path"]: layer for layer in runs[run]["layers"]}
        for run in (RUN, TUNED)
    )
    for row in rows("difference"):
        for layers, end in (one, ""), (two, "_of_other"):
            layer = layers[row["layer"]]
            assert row[f"dtype{end}"] == layer["compute_dtype"]
            inside = layer["inside"] or {"outputs": layer["least_headroom"]}
            # Of float32 that of its own range.
            wider = 112 * (layer["compute_dtype"] == "float32")
            assert float(row[f"headroom{end}"]) == inside["outputs"] + wider


def test_trials(page, rows):
    page.pick("#run", SEARCH)
    for row, point in zip(rows("pareto"), POINTS, strict=True):
        assert row["share"] == point["share_in_16_bits"]
        assert row["error"] == point["error"]
        assert row["float32"] == point["float32"]


def test_where_there_is_nothing_nothing_is_saved(page):
    assert not page.shown("#pareto .export")
    page.pick("#run", SEARCH)
    assert not page.shown("#dtypes .export")
    assert page.shown("#pareto .export")


# Pictures. What is above a canvas in them: 12 pixels, and 18 for each line.

EDGE, ROW = 12, 18
SKIP = "5c6675"
_LISTEN = """
globalThis.said = [];
const write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
  if (!this.canvas.isConnected) globalThis.said.push(text);
  return write.call(this, text, ...rest);
};
"""


@pytest.fixture
def picture(page, save):
    """The pixels of a card's canvas in its picture, and what is above it."""

    def picture(card):
        page.run(_LISTEN)
        image = PIL.Image.open(io.BytesIO(save(card, "png"))).convert("RGB")
        (canvas, *_) = (c for c in page.all(f"#{card} canvas") if c.size)
        size = canvas.size
        said = page.run("return globalThis.said")
        caption = page.run(
            "return document.querySelector(arguments[0])"
            ".querySelector('.hint:not([hidden])')?.textContent",
            f"#{card}",
        )
        top = EDGE + ROW * (2 + bool(caption))
        pixels = np.asarray(image).astype(int)
        assert size["height"] + top < len(pixels)
        head = pixels[: top - 2]
        assert (head != head[0, 0]).any()
        own = pixels[top : top + size["height"], EDGE : EDGE + size["width"]]
        return own, said

    return picture


def places(pixels, colour, near=12):
    """Rows and columns of the pixels of that colour."""
    wanted = np.array([*bytes.fromhex(colour)])
    return np.nonzero(np.abs(pixels - wanted).max(-1) <= near)


def of_steps(steps, last, left, right):
    """The columns of steps between two edges."""
    pad = 0.5 + last * 0.004
    return left + (np.asarray(steps) + pad) / (last + 2 * pad) * (right - left)


def test_a_picture_of_the_timeline(picture, runs):
    pixels, said = picture("timeline")
    assert said[:2] == ["Loss scale and events: step", RUN]
    assert "loss scale" in said  # The key of its line.
    run = runs[RUN]
    skips = [e["at_step"] for e in run["events"] if e["kind"] == "skipped_step"]
    width = pixels.shape[1]
    _, columns = places(pixels[140:160, 66 : width - 14], SKIP)
    wanted = of_steps([skips[0], skips[-1]], run["last_step"], 66, width - 14)
    found = columns.min() + 66, columns.max() + 66
    np.testing.assert_allclose(found, wanted, atol=3)


def test_a_picture_of_the_speed(page, picture, runs):
    page.pick("#run", PACED)
    pixels, said = picture("performance")
    assert said[:2] == ["Speed", PACED]
    run = runs[PACED]
    figures = {f["name"]: f for f in run["performance"]["figures"]}
    times = figures["step_time"]["values"]
    steps = run["performance"]["steps"]
    # A steep line is nowhere as dark as a level one.
    rows, columns = places(pixels[:64, 66:], LINE, near=100)
    columns += 66
    width = pixels.shape[1]
    wanted = of_steps([steps[0], steps[-1]], run["last_step"], 66, width - 14)
    np.testing.assert_allclose([columns.min(), columns.max()], wanted, atol=2)
    highest = wanted[0] + (wanted[1] - wanted[0]) * np.argmax(times) / (
        len(times) - 1
    )
    assert np.abs(columns[rows == rows.min()] - highest).min() <= 3


def test_a_picture_of_the_heatmap(picture, runs):
    pixels, said = picture("heatmap")
    assert said[:2] == ["Layers over time: Activations: headroom", RUN]
    assert {"all zero"} <= {*said}
    row = runs[RUN]["heat"]["layers"].index(LAYER)
    rows, _ = places(pixels[:, 208:], VERMILLION)
    assert rows.min() // 29 == row  # All behind it is infinite as well.


def test_the_special_colours_are_explained_in_the_picture(page, save):
    page.pick("#run", TUNED)
    image = PIL.Image.open(io.BytesIO(save("heatmap", "png"))).convert("RGB")
    keys = np.asarray(image).astype(int)[-30:]  # Below the picture.
    rows, zero = places(keys, SKY, near=2)
    keys = keys[rows.min() : rows.max() + 1, zero.max() + 1 :]
    _, wider = places(keys, BEYOND, near=2)
    counts = np.bincount(wider, minlength=keys.shape[1])
    left = np.convolve(counts, np.ones(14), "valid").argmax()
    swatch = keys[1:-1, left + 1 : left + 13]
    assert counts[left : left + 14].sum() > 30
    # Hatched as in the picture.
    assert swatch.std(axis=(0, 1)).min() > 8


def test_a_picture_of_the_histogram(page, picture, log):
    page.click("#layers tr[data-layer=in_1]")
    pixels, said = picture("histogram")
    assert said[:2] == ["Histogram: Activations", RUN]
    told = data_of(log, RUN).histogram("in_1", "activation")
    exponents, counts = told["exponents"][-1], told["counts"][-1]
    domain = min(-28, *exponents), max(20, *exponents) + 1
    decades = max(1, np.ceil(np.log10(max(counts) + 1)))
    width = pixels.shape[1] - 54 - 12
    (bar,) = page.run(
        "return [getComputedStyle(document.documentElement)"
        ".getPropertyValue('--bar').trim().slice(1)]"
    )
    most = int(np.argmax(counts))
    share = (exponents[most] + 0.4 - domain[0]) / (domain[1] - domain[0])
    column = pixels[:, round(54 + share * width)]
    rows, *_ = places(column[:, None], bar)
    top = 328 - np.log10(counts[most] + 1) / decades * (300 - 14)
    assert abs(rows.min() - top) <= 2


def test_a_picture_of_the_range_by_step(page, picture, log):
    page.click("#layers tr[data-layer=in_1]")
    pixels, said = picture("course")
    assert said[:2] == ["Range by step", RUN]
    assert "largest" in said
    grid = data_of(log, RUN).grid("activation_headroom_bits", 1200)
    bits = grid.worst[grid.layers.index("in_1")]
    known = np.flatnonzero(np.isfinite(bits))
    share = np.asarray(grid.last)[known[-1]] / grid.last[-1]
    rows, columns = places(pixels[:, 60:], LINE)
    wanted = 54 + share * (pixels.shape[1] - 54 - 100)
    assert abs(columns.max() + 60 - wanted) <= 3


def test_a_picture_of_trials(page, picture):
    page.pick("#run", SEARCH)
    pixels, said = picture("pareto")
    assert said[:2] == ["Error by share of FLOPs in 16 bits", SEARCH]
    rows, columns = places(pixels, LINE)
    width = pixels.shape[1]
    # The marks of the best two, at half and at all of the FLOPs.
    found = columns.min() + 4, columns.max() - 4
    wanted = [64 + share * (width - 64 - 24) for share in (0.5, 1)]
    np.testing.assert_allclose(found, wanted, atol=2)
    # From 10**0 to 10**-3, of which 0.001 is the lowest.
    assert abs(rows.max() - 4 - (22 + 240 - 8)) <= 2
