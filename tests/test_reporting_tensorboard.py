"""A log as a running TensorBoard serves it, by either of its loaders."""

import importlib.util
import json
import os

import numpy as np
import pytest
from comparison_records import four_arms, record
from reporting_readers import get, poll, tensorboard

from keras_mixprec.analysis.comparison.result import ComparisonResult
from keras_mixprec.reporting.event_file import event_file_paths
from keras_mixprec.reporting.run_log import RunLog

TABLE = [{"path": "dense", "compute": "float16"}]
pytestmark = pytest.mark.one_backend

LAYOUT = {"Precision": {"Scale": ["mixprec/loss_scale"]}}


def write_run(log_dir):
    with RunLog(log_dir) as log:
        first = log.next_step
        log.layers(first, TABLE)
        log.layout(first, LAYOUT)
        for step in range(first, first + 20):
            log.scalars(step, {"mixprec/loss_scale": step / 8})
            log.event(step, {"kind": "skipped_step"})
            log.scale_rows(step, [[2**24 + step, 8.0, 1, step]])
        log.histogram(step, "mixprec/grad_exponent/all", [[0, 1, 3]])
    return log.folder


@pytest.fixture(scope="module", params=["true", "false"], ids=["fast", "slow"])
def served(request, tmp_path_factory):
    """The folder and URL of a log of two runs, the first of them killed."""
    if request.param == "true" and not importlib.util.find_spec(
        "tensorboard_data_server"
    ):
        pytest.skip("no fast loader for this platform")
    log_dir = str(tmp_path_factory.mktemp("logs"))
    (path,) = event_file_paths(write_run(log_dir))
    os.truncate(path, os.path.getsize(path) - 5)
    write_run(log_dir)
    ComparisonResult(record(four_arms())).log_hparams(f"{log_dir}/compared")
    with tensorboard(log_dir, f"--load_fast={request.param}") as url:
        assert poll(lambda: len(scale_points(url)) == 40), scale_points(url)
        yield log_dir, url


def test_a_comparison_is_a_run_per_policy(served):
    _, url = served
    asked = {"allowedStatuses": ["STATUS_UNKNOWN"], "sliceSize": 9}
    found = get(url, "plugin/hparams/session_groups", request=json.dumps(asked))
    groups = {g["hparams"]["policy"]: g for g in found["sessionGroups"]}
    assert groups.keys() == {a["name"] for a in four_arms()}
    values = {
        m["name"]["tag"]: m["value"]
        for m in groups["mixed_bfloat16"]["metricValues"]
    }
    assert values["comparison/speed"] == 2.0
    assert values["comparison/accuracy"] == pytest.approx(0.9257, abs=1e-4)
    run = "compared/1_mixed_bfloat16"
    curve = get(url, "plugin/scalars/scalars", tag="loss", run=run)
    points = np.array(curve)[:, 1:]
    np.testing.assert_allclose(points, [[2, 2.1], [4, 1.1]], rtol=1e-6)


def ask(url, route, tag):
    return get(url, f"plugin/{route}", run="mixprec", tag=tag)


def scale_points(url):
    return ask(url, "scalars/scalars", "mixprec/loss_scale") or []


def test_scalars_of_both_runs_are_served(served):
    points = [point[1:] for point in scale_points(served[1])]
    assert points == [[step, step / 8] for step in range(40)]


def test_layer_table_is_served_as_text(served):
    entries = ask(served[1], "text/text", "mixprec/layer_dtypes")
    assert [entry["step"] for entry in entries] == [0, 20]
    assert "<td>float16</td>" in entries[-1]["text"]


def test_histogram_is_served(served):
    tag = "mixprec/grad_exponent/all"
    # The first run's was the record that was cut short.
    (entry,) = ask(served[1], "histograms/histograms", tag)
    assert entry[1:] == [39, [[0.0, 1.0, 3.0]]]


def test_layout_is_served(served):
    layout = get(served[1], "plugin/custom_scalars/layout")
    (category,) = layout["category"]
    assert category["title"] == "Precision"


def test_own_tensors_are_served(served):
    tags = get(served[1], "plugin/probe/tensors")
    chunks = ("events/00000", "events/00001", "events/00002", "events/00003")
    named = {*chunks, "scale/00000", "scale/00001", "layers"}
    assert set(tags) == {f"mixprec/{name}" for name in named}
    assert {tag["content"]["schema"] for tag in tags.values()} == {2}
    assert json.loads(tags["mixprec/layers"]["last"][0]) == TABLE
    told = [
        json.loads(event)["step"]
        for chunk in chunks
        for event in tags[f"mixprec/{chunk}"]["last"]
    ]
    assert told == list(range(40))
    last = [tags[f"mixprec/scale/0000{run}"]["last"] for run in range(2)]
    rows = np.reshape(last, (40, 4))
    np.testing.assert_array_equal(rows[:, 0], 2**24 + np.arange(40))
    columns = tags["mixprec/scale/00000"]["content"]["columns"]
    assert columns == ["step", "scale", "nonfinite_count", "iterations"]


def test_a_run_is_served_while_it_is_written(served):
    log_dir, url = served

    def last_step():
        points = ask(url, "scalars/scalars", "mixprec/live")
        return points[-1][1] if points else None

    with RunLog(log_dir) as log:
        for step in range(100, 103):
            log.scalars(step, {"mixprec/live": 1.0})
            assert poll(lambda step=step: last_step() == step)
