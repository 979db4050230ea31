"""Facts that Python computes for the page: ranges, faults and causes."""

import math

import ml_dtypes
import numpy as np
import pytest
from canonical_logs import layer
from plugin_runs import verdict, write

from keras_mixprec.reporting.bad_input import spoiled
from keras_mixprec.reporting.format_limits import CHOICES
from keras_mixprec.reporting.layer_tables import Grid
from keras_mixprec.reporting.layers import (
    passed_cells,
    passes_on,
    read_layers,
)
from keras_mixprec.reporting.run import Run
from keras_mixprec.reporting.run_files import RunFiles, find_runs
from keras_mixprec.reporting.what_if import run_ranges, smallest_that_counts

HEADROOM, NONFINITE = "activation_headroom_bits", "activation_nonfinite"
GRADIENTS = "gradient_headroom_bits"
WEIGHT_GRADIENTS = "weight_gradient_headroom_bits"
MOST = np.log2(65504)
INF = math.inf
INSIDE = {"largest_inside_in_float32": 2.0**18}
FORMATS = {"float16": 2**15, "bfloat16": None}


def data_of(folder):
    ((name, path),) = find_runs(str(folder)).items()
    return Run(name, RunFiles(path))


@pytest.fixture
def written(tmp_path):
    """Writes a log, and returns what is read of it."""

    def written(rows, *events, **more):
        write(tmp_path, rows, *events, **more)
        return data_of(tmp_path)

    return written


def ranges_of(data):
    return run_ranges(data, 2000)["layers"]


def skip(step, **more):
    about = {"kind": "skipped_step", "at_step": step, "step": step}
    return about | {"scale": 2.0**15, "variables": ["a"]} | more


def change(step, *paths):
    layers = {p: {"before": "mixed_float16", "after": "float32"} for p in paths}
    return {"kind": "demote", "step": step, "layers": layers, "reasons": {}}


# Ranges.


def test_numbers_that_count_keep_99_percent_of_the_energy():
    random = np.random.default_rng(0)
    values = np.exp2(random.normal(-8, 5, 4000)).astype("float32")
    exponents = np.floor(np.log2(values)).astype(int)
    bins, counts = np.unique(exponents, return_counts=True)
    low = smallest_that_counts(bins, counts)
    # Bins count every number as the power of two below it.
    energy = np.exp2(2.0 * exponents)
    assert energy[exponents >= low].sum() >= 0.99 * energy.sum()
    assert energy[exponents > low].sum() < 0.99 * energy.sum()
    assert smallest_that_counts([128], [5]) is None


def test_ranges_are_those_of_the_log(written):
    bits = [9.0, 2.5, -INF, 4.0]  # What overflows makes all behind infinite.
    heat = {n: {HEADROOM: [x]} for n, x in enumerate(bits, 1)}
    own = ranges_of(written("a", heat=heat))["a"]["activation"]
    assert own["largest"] == pytest.approx(MOST - 2.5, abs=1e-3)
    assert own["largest_step"] == 2


@pytest.mark.parametrize("step", [1, 4])
def test_gradients_are_without_the_loss_scale(written, step):
    scale = [[0, 2.0**15, 0, 0], [2, 2.0**10, 0, 2]]
    power = 15 if step == 1 else 10
    heat = {step: {GRADIENTS: [7.0], WEIGHT_GRADIENTS: [3.0]}}
    bins = {(step, "gradient", "a"): [[2.0, 3.0, 8.0]]}
    own = ranges_of(written("a", scale={"": scale}, heat=heat, bins=bins))["a"]
    found = own["gradient"]["largest"]
    assert found == pytest.approx(MOST - 7 - power, abs=1e-3)
    assert own["gradient"]["low"] == 2 - power
    # Gradients of weights are logged without the loss scale.
    found = own["weight_gradient"]["largest"]
    assert found == pytest.approx(MOST - 3, abs=1e-3)


@pytest.mark.parametrize(
    ("step", "dtype", "power"), [(3, "float16", 15), (8, "bfloat16", 0)]
)
def test_each_call_of_fit_is_measured_by_its_own_formats(
    written, step, dtype, power
):
    # The first call ends with a loss scale, the second has none.
    rows = [[layer("a", dtype=dtype)] for dtype in FORMATS]
    heat = {step: {HEADROOM: [9.0], GRADIENTS: [5.0]}}
    begin = [
        {"kind": "train_begin", "fit": n, "step": s}
        for n, s in ((1, 0), (2, 5))
    ]
    scale = [[0, 2.0**15, 0, 0], [5, 1.0, 0, 5]]
    own = ranges_of(
        written(
            rows[0], *begin, heat=heat, tables={5: rows[1]}, scale={"": scale}
        )
    )["a"]
    most = np.log2(float(ml_dtypes.finfo(dtype).max))
    for part, bits, off in ("activation", 9, 0), ("gradient", 5, power):
        found = own[part]["largest"]
        assert found == pytest.approx(most - bits - off, abs=1e-2), part


def test_a_demotion_is_of_its_step_though_the_table_is_of_later(written):
    wide = [layer("a", dtype="float32")]
    found = verdict("a", 0, numbers={"largest_output_in_float32": 8.0})
    data = written("a", found, change(0, "a"), skip(1), tables={50: wide})
    ranges = run_ranges(data, 2000)
    assert ranges["overflowing_scale"] == 15
    assert ranges["layers"]["a"]["in_float32"] == 3


def test_a_verdict_holds_for_every_format_of_no_greater_range(written):
    refused = ranges_of(written("a", verdict("a")))["a"]["refused"]
    most = float(ml_dtypes.finfo("float16").max)
    for dtype in CHOICES:
        narrow = float(ml_dtypes.finfo(dtype).max) <= most
        wanted = ["forward_overflow"] if narrow else []
        assert refused[dtype] == wanted, dtype


@pytest.mark.parametrize(
    "more", [{"bad_input": {"x": 0}}, {"loss": ["nan"]}], ids=["data", "loss"]
)
def test_no_loss_scale_is_to_blame_for_data_or_a_loss(written, more):
    data = written("a", skip(1, **more))
    assert data.skipped == 1
    assert run_ranges(data, 2000)["overflowing_scale"] is None


def test_the_plan_knows_the_loss_scale_that_a_verdict_advises(written):
    numbers = {"needed_bits": 13}
    data = written("a", verdict(None, kind="scale_too_low", numbers=numbers))
    assert run_ranges(data, 100)["needed_scale"] == 13


# Headroom.


RETURNED = {4: "float32", 6: "float16"}


@pytest.mark.parametrize(
    ("numbers", "tables", "left"),
    [
        (INSIDE, {}, MOST - 18),
        ({"largest_inside_in_float32": 100.0}, {}, 0),  # A sum for a mean.
        (INSIDE, RETURNED, 9),  # Found sound in float16 since.
        ({"headroom_bits": 1, "overflows_in_steps": 30}, {}, 9),  # A forecast.
        ({"largest_inside_in_float32": "damaged"}, {}, 9),
        ({"largest_inside_in_float32": "inf"}, {}, -INF),
    ],
)
def test_a_verdict_uses_headroom_up_while_it_holds(
    written, numbers, tables, left
):
    tables = {step: [layer("a", dtype=t)] for step, t in tables.items()}
    found = verdict("a", 3, numbers=numbers)
    data = written("a", found, tables=tables, heat={9: {HEADROOM: [9.0]}})
    (row,) = data.layers
    assert row["least_headroom"] == pytest.approx(left, abs=0.01)


# Batches that are not finite.


BAD_STEPS = [5, 12]


@pytest.fixture
def bad(written):
    """Two of twenty batches are bad, and everything in them."""
    skips = (skip(n, bad_input={"x": 0}) for n in BAD_STEPS)
    heat = {
        n: {
            HEADROOM: [9.0, 4.0],
            NONFINITE: [float(n in BAD_STEPS)] * 2,
            GRADIENTS: [7.0, 7.0],
            "gradient_nonfinite": [float(n in BAD_STEPS)] * 2,
            "weight_headroom_bits": [12.0, 12.0],
        }
        for n in range(1, 21)
    }
    return written("ab", *skips, heat=heat)


def test_a_batch_that_is_not_finite_is_left_out(bad):
    assert bad.bad_input == BAD_STEPS
    for metric in HEADROOM, "gradient_nonfinite":
        grid = bad.grid(metric, 2000)
        (columns,) = np.nonzero(grid.lost.any(axis=0))
        assert grid.last[columns].tolist() == BAD_STEPS
        assert np.isnan(grid.worst[:, columns]).all()
    assert not bad.grid("weight_headroom_bits", 2000).lost.any()
    assert not np.isinf(bad.grid(HEADROOM, 5).worst).any()


def test_bad_data_takes_no_headroom(bad):
    assert [x["least_headroom"] for x in bad.layers] == [9, 4]


def test_an_overflow_without_bad_data_is_not_left_out(canonical):
    grid = data_of(canonical["overflow"].log_dir).grid(HEADROOM, 2000)
    assert not grid.lost.any()
    assert (grid.worst == -INF).any()


@pytest.mark.parametrize(
    ("bad_at", "skipped", "more", "expected"),
    [
        # Until 30 each row is one reading; from then on of two, the worst.
        ([15, 20], [], [], [20]),
        ([40, 60, 81], [61], [], [50, 90]),
        # A loss scale that bad data lowered fell at no other step.
        (
            [40, 60, 81],
            [],
            [{"kind": "loss_scale_low", "step": 90, "at_step": 61}
             | {"cause": "bad_data", "message": ""}],
            [50, 70, 90],
        ),
    ],
)  # fmt: skip
def test_a_row_of_several_readings_is_left_out_if_nothing_else_failed(
    bad_at, skipped, more, expected
):
    lines = [skip(n, bad_input={"x": 0}) for n in bad_at]
    lines += [skip(n) for n in skipped] + more
    steps = np.array([10, 20, 30, 50, 70, 90])
    assert steps[spoiled(steps, lines)].tolist() == expected


# Whose fault it is.


FAULTS = "forward_overflow", "cast_overflow"


@pytest.mark.parametrize(
    ("fed_by", "verdicts", "expected"),
    [
        # Without a graph, all behind it in the model's order.
        ({}, {"b": FAULTS[0]}, {"c": "b", "d": "b"}),
        # A parallel branch has its own.
        ({"c": ["a"], "d": ["c"]}, {"b": FAULTS[0]}, {}),
        ({}, {"b": FAULTS[0], "c": FAULTS[1]}, {"d": "c"}),
        ({}, {"b": "precision_loss"}, {}),
    ],
)
def test_what_is_behind_a_layer_passes_on_what_it_made(
    fed_by, verdicts, expected
):
    layers = [{"path": path} for path in "abcd"]
    for row in layers if fed_by else ():
        row["fed_by"] = fed_by.get(row["path"], [])
    found = [verdict(path, kind=kind) for path, kind in verdicts.items()]
    found = passes_on(layers, found)
    found = {path: own.get("activation") for path, own in found.items()}
    assert {p: o for p, o in found.items() if o} == expected


NESTED = {
    "norm": [],
    "first": ["norm"],
    "first/query": [],
    "second": ["first"],
    "second/query": [],
    "second/query/dense": [],
}


@pytest.mark.parametrize(
    ("culprit", "behind"),
    [
        # Layers inside the culprit run before it returns.
        ("first", {"second", "second/query", "second/query/dense"}),
        # A parallel layer is not behind the culprit either.
        ("second/query", {"second"}),
    ],
)
def test_what_is_called_inside_a_layer_is_fed_by_what_feeds_it(culprit, behind):
    layers = [{"path": p, "fed_by": own} for p, own in NESTED.items()]
    found = passes_on(layers, [verdict(culprit)])
    assert {p for p, own in found.items() if "activation" in own} == behind


def test_what_flows_back_is_passed_on_the_other_way():
    layers = [{"path": path} for path in "abc"]
    found = passes_on(layers, [verdict("b", kind="backward_overflow")])
    assert found == {"a": {"gradient": "b"}, "b": {}, "c": {}}


def grid_of(worst, names=("b", "c")):
    steps = np.arange(1, worst.shape[1] + 1)
    lost = np.zeros(worst.shape, bool)
    return Grid([*names], steps, steps, worst, "min", "float16", lost)


@pytest.mark.parametrize(
    ("made", "received", "origin"),
    [
        (INF, INF, "b"),
        # Zeros do not come from infinities, nor from a finite layer.
        (-INF, INF, None),
        (2.0, -INF, None),
    ],
)
def test_who_made_it_is_told_alike_in_table_and_picture(
    written, made, received, origin
):
    events = [verdict("b")]
    rows = [layer("b"), layer("c", fed_by=["b"])]
    data = written(rows, *events, heat={1: {HEADROOM: [made, received]}})
    assert [x["passed_from"] for x in data.layers] == [None, origin]
    worst = np.array([[made], [received]], float)
    origins, cells = passed_cells(grid_of(worst), HEADROOM, data.table, events)
    assert cells.tolist() == [[-1], [-1 if origin is None else 0]]
    assert [x["short"].endswith("from b") for x in origins] == (
        [True] * bool(origin)
    )


@pytest.mark.parametrize(
    ("metric", "value", "is_passed"),
    [
        (GRADIENTS, -INF, True),
        # These gradients may have vanished on their own.
        (GRADIENTS, INF, False),
        (NONFINITE, 3.0, False),
    ],
)
def test_gradients_pass_on_what_is_not_finite(metric, value, is_passed):
    layers = [{"path": path} for path in "cb"]
    events = [verdict("b", kind="backward_overflow")]
    grid = grid_of(np.full((2, 1), value), "cb")
    _, cells = passed_cells(grid, metric, layers, events)
    assert (cells[0, 0] >= 0) == is_passed


@pytest.mark.parametrize(
    ("kind", "numbers", "because"),
    [
        ("divergence", {"loss": 1e9}, "diverged"),
        ("weights_lost", {}, "weights"),
    ],
)
def test_no_layer_is_to_blame_for_what_the_run_lost(kind, numbers, because):
    layers = [{"path": path} for path in "bc"]
    lost = verdict(None, 3, kind, direction=None, numbers=numbers)
    worst = np.array([[9.0, -INF, -INF], [-INF, 9.0, -INF]])
    for events in [lost], [lost, verdict("c")]:
        alone = len(events) == 1
        grid = grid_of(worst)
        origins, cells = passed_cells(grid, HEADROOM, layers, events)
        expected = [[-1, 0, 0], [0, -1, 0] if alone else [-1] * 3]
        assert cells.tolist() == expected
        (origin,) = origins
        assert because in origin["long"]
    # A search for the loss scale comes before.
    origins, cells = passed_cells(grid_of(worst), GRADIENTS, layers, [lost])
    assert cells.tolist() == [[-1, -1, 0]] * 2
    (origin,) = origins
    assert because in origin["short"]


# Findings over several fits, and tables of layers.


def test_the_paths_alone_are_those_of_the_layers():
    good = [{"path": p, "compute_dtype": "float16"} for p in ("b", "a")]
    tables = [good[:1], [*good, None, {"path": 3}]]
    rows = [{"step": n, "layers": table} for n, table in enumerate(tables)]
    damaged = {"layers": good}, {"step": 9}, {"step": "a", "layers": good}
    found = read_layers([*rows, *damaged])
    assert [row["path"] for row in found] == ["b", "a"]
    assert read_layers([]) == []
