"""What the tab saves: numbers and pictures, each against the log."""

import csv
import io
import json
import math

import numpy as np
import pytest
from canonical_logs import layer
from node_page import WIDTH, colour
from plugin_runs import write

from keras_mixprec.reporting.file_source import FileSource, find_runs
from keras_mixprec.reporting.run_data import RunData
from keras_mixprec.reporting.run_ranges import run_ranges

RUN, REPAIRED = "overflow/mixprec", "repaired/mixprec"
HEALTHY = "healthy/mixprec"
SQUARE, HEADROOM = "block/square", "activation_headroom_bits"
POINTS = [
    {"share_in_16_bits": 1.0, "error": 0.5, "float32": []},
    {"share_in_16_bits": 0.5, "error": 0.001, "float32": ["a"]},
    {"share_in_16_bits": 0.25, "error": 0.01, "float32": ["b"]},
]


@pytest.fixture
def page(page):
    return page.see("overflow")


@pytest.fixture
def run(told):
    return told["overflow"]


@pytest.fixture
def rows(page):
    """The rows that a card saves, the same as CSV and as JSON."""

    def rows(card):
        lines = io.StringIO(page.download(card, "csv"), newline="")
        table, saved = [*csv.DictReader(lines)], json.loads(
            page.download(card, "json")
        )  # fmt: skip
        assert len(saved) == len(table) > 0
        for line, row in zip(table, saved, strict=True):
            for name, value in row.items():
                if isinstance(value, bool | dict | list):
                    assert json.loads(line[name]) == value
                elif isinstance(value, int | float):
                    assert float(line[name]) == value
                else:
                    assert line[name] == (value or "")
        return saved

    return rows


@pytest.fixture
def data(canonical):
    """What the logs hold, read without the page."""

    def data(run):
        log_dir = canonical[run.removesuffix("/mixprec")].log_dir
        return RunData(run, FileSource(find_runs(str(log_dir))["mixprec"]))

    return data


# Tables.


def test_layers(page, rows, run):
    for row, known in zip(rows("layers"), run["layers"], strict=True):
        for name in "path", "compute_dtype", "share_of_flops":
            assert row[name] == known[name]
        assert float(row["least_headroom"]) == known["least_headroom"]


def test_events(page, rows, run):
    kinds = [(e["step"], e["kind"]) for e in run["events"]]
    assert [(row["step"], row["kind"]) for row in rows("events")] == kinds


def test_runs(page, rows, told):
    found = {row["run"].partition("/")[0]: row for row in rows("runs")}
    assert found.keys() == told.keys()
    for name, run in told.items():
        assert found[name]["skipped"] == run["skipped"]
        assert found[name]["state"] == run["headline"]["state"]


def test_loss_scale_and_loss(page, rows, told):
    page.pick("#compare", REPAIRED)
    saved = rows("timeline")
    for name in "overflow", "repaired":
        own = [row for row in saved if row["run"] == f"{name}/mixprec"]
        (line,) = told[name]["scale"]
        scales = [row for row in own if "loss_scale" in row]
        losses = [row for row in own if "loss" in row]
        for known, column in (
            (line["steps"], [row["step"] for row in scales]),
            (line["scale"], [row["loss_scale"] for row in scales]),
            (line["skipped"], [row["skipped_so_far"] for row in scales]),
            (told[name]["loss"]["steps"], [row["step"] for row in losses]),
        ):
            assert column == known
        values = [float(row["loss"]) for row in losses]
        np.testing.assert_equal(values, told[name]["loss"]["values"])


def test_speed(page, rows, told):
    page.pick("#run", HEALTHY)
    saved = rows("performance")
    for figure in told["healthy"]["performance"]["figures"]:
        own = [row for row in saved if row["figure"] == figure["name"]]
        whole, *by_step = (row["value"] for row in own)
        assert (whole, by_step) == (figure["value"], figure["values"])


def test_heatmap(page, rows, data):
    grid = data(RUN).grid(HEADROOM, 1200)
    for row in rows("heatmap"):
        values = grid.worst[grid.layers.index(row["layer"])]
        # Three digits at least are sent.
        assert float(row["worst"]) == pytest.approx(values.min(), rel=2**-7)
        assert row["metric"] == HEADROOM


def test_histogram(page, rows, data):
    page.pick("#run", HEALTHY).click("#layers tr[data-layer=embed]")
    known = data(HEALTHY).histogram("embed", "activation")
    saved = rows("histogram")
    assert {row["step"] for row in saved} == {known["steps"][-1]}
    bars = zip(known["exponents"][-1], known["counts"][-1], strict=True)
    found = [(row["exponent"], row["count"]) for row in saved]
    assert found == [(exponent, count) for exponent, count in bars if count]


def test_map(page, rows, run):
    layers = {known["path"]: known for known in run["layers"]}
    for row in rows("map"):
        known = layers[row["layer"]]
        assert row["fed_by"] == known["fed_by"]
        least = pytest.approx(known["least_headroom"], rel=2**-7)
        assert float(row["worst"]) == least


def test_range_by_step(page, rows, data):
    page.click(f"#layers tr[data-layer='{SQUARE}']")
    grid = data(RUN).grid(HEADROOM, 1200)
    bits = grid.worst[grid.layers.index(SQUARE)]
    known = dict(zip(np.asarray(grid.last).tolist(), bits, strict=True))
    for row in rows("course"):
        assert row["not_finite"] == (known[row["step"]] == -math.inf)
    page.click("#layers tr[data-layer=embed]")
    for row in rows("course"):
        largest = np.log2(65504) - 12.5
        assert row["largest_log2"] == pytest.approx(largest, abs=0.1)


def test_dtypes(page, rows, told):
    page.pick("#run", REPAIRED)
    (square,) = (x for x in told["repaired"]["layers"] if x["path"] == SQUARE)
    bars = [row for row in rows("dtypes") if row["layer"] == SQUARE]
    assert [[row["from_step"], row["dtype"]] for row in bars] == square[
        "dtypes"
    ]
    assert bars[-1]["to_step"] == told["repaired"]["last_step"]
    assert bars[-1]["because"] == square["demoted_because"]


def test_what_if(page, rows, data):
    page.pick("#run", HEALTHY)
    ranges = run_ranges(data(HEALTHY), 1200)["layers"]
    saved = rows("what-if")
    assert len(saved) == 15 * len(ranges)
    wanted = {"format": "float8_e4m3fn", "layer": "embed", "reading": "worst"}
    (row,) = (row for row in saved if wanted.items() <= row.items())
    worst = {part: ranges["embed"][part]["worst"] for part in ranges["embed"]
             if part in ("activation", "gradient")}  # fmt: skip
    left = np.log2(448) - worst["activation"]["largest"]
    assert row["activation_bits_left"] == pytest.approx(left)
    assert row["lowest_scale_log2"] == -9 - worst["gradient"]["low"]


def test_differences(page, rows, told):
    page.pick("#compare", REPAIRED)
    one, two = (
        {known["path"]: known for known in told[run]["layers"]}
        for run in ("overflow", "repaired")
    )
    for row in rows("difference"):
        for layers, end in (one, ""), (two, "_of_other"):
            known = layers[row["layer"]]
            assert row[f"dtype{end}"] == known["compute_dtype"]
            inside = known["inside"] or {"outputs": known["least_headroom"]}
            # Of float32 that of its own range.
            wider = 112 * (known["compute_dtype"] == "float32")
            assert float(row[f"headroom{end}"]) == inside["outputs"] + wider


@pytest.fixture
def search(page, tmp_path):
    best = [True, True, False]
    points = [
        point | {"pareto_optimal": is_best}
        for point, is_best in zip(POINTS, best, strict=True)
    ]
    event = {"kind": "trade_off", "title": "error", "points": points, "step": 0}
    write(tmp_path, "a", event)
    return page.show(tmp_path)


def test_trials(search, rows):
    for row, point in zip(rows("pareto"), POINTS, strict=True):
        assert row["share"] == point["share_in_16_bits"]
        assert row["error"] == point["error"]
        assert row["float32"] == point["float32"]
    assert not search.count("#dtypes .dtype-bar")
    # The best two, at half and at all of the FLOPs, from 0.5 to 0.001.
    (line,) = search.marks("#pareto canvas", "line", colour="line-1")[:1]
    xs, ys = np.transpose(line["points"])
    wanted = [64 + share * (WIDTH - 64 - 24) for share in (0.5, 1)]
    np.testing.assert_allclose(sorted({*xs})[:2], wanted, atol=1)
    assert ys.max() == pytest.approx(22 + 240 - 8, abs=1)


def test_names_in_a_table_are_no_formulas(page, tmp_path):
    write(tmp_path, [layer("=1+1"), layer("a,b")], heat={1: {HEADROOM: [1, 2]}})
    lines = page.show(tmp_path).download("layers", "csv").split("\r\n")
    assert lines[1].startswith("'=1+1,")
    assert lines[2].startswith('"a,b",')


# Pictures.


@pytest.mark.parametrize(
    ("card", "run", "words"),
    [
        ("timeline", RUN, {"loss scale", "step"}),
        ("performance", HEALTHY, {"step time"}),
        ("heatmap", RUN, {"all zero", "step"}),
        ("histogram", HEALTHY, {"magnitude", "elements"}),
        ("course", HEALTHY, {"largest", "maximum"}),
    ],
)
def test_a_picture_says_what_it_is_of(page, told, card, run, words):
    page.see(run.partition("/")[0], layer="embed")
    marks = json.loads(page.download(card, "png"))
    texts = [mark["text"] for mark in marks if mark["kind"] == "text"]
    assert texts[0].startswith(page.text(f"#{card} h2"))
    assert texts[1] == run
    assert {*texts} >= words
    # All that is on the canvas of the page.
    (canvas, *_) = page.values(f"#{card} canvas", "marks")
    assert [mark for mark in canvas if mark not in marks] == []


def test_the_special_colours_are_explained_in_the_picture(page):
    page.see("overflow")
    marks = json.loads(page.download("heatmap", "png"))
    hatched = {m["colour"] for m in marks if m["hatched"] and m["width"] == 14}
    assert {colour("zero"), colour("beyond")} <= hatched
