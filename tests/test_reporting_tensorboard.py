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


def write_run(log_dir):
    with RunLog(log_dir) as log:
        first = log.next_step
        log.layers(first, TABLE)
        for step in range(first, first + 20):
            log.scalars(step, {"mixprec/loss_scale": step / 8})
        log.text(step, "note", "cut")
    return log.folder


@pytest.fixture(scope="module", params=["true", "false"], ids=["fast", "slow"])
def served(request, tmp_path_factory):
    """The URL of a log of two runs, the first of them killed."""
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
        yield url


def test_a_comparison_is_a_run_per_policy(served):
    asked = {"allowedStatuses": ["STATUS_UNKNOWN"], "sliceSize": 9}
    asked = json.dumps(asked)
    found = get(served, "plugin/hparams/session_groups", request=asked)
    groups = {g["hparams"]["policy"]: g for g in found["sessionGroups"]}
    assert groups.keys() == {a["name"] for a in four_arms()}
    values = {
        m["name"]["tag"]: m["value"]
        for m in groups["mixed_bfloat16"]["metricValues"]
    }
    assert values["comparison/speed"] == 2.0
    assert values["comparison/accuracy"] == pytest.approx(0.9257, abs=1e-4)
    run = "compared/1_mixed_bfloat16"
    curve = get(served, "plugin/scalars/scalars", tag="loss", run=run)
    points = np.array(curve)[:, 1:]
    np.testing.assert_allclose(points, [[2, 2.1], [4, 1.1]], rtol=1e-6)


def ask(url, route, tag):
    return get(url, f"plugin/{route}", run="mixprec", tag=tag)


def scale_points(url):
    return ask(url, "scalars/scalars", "mixprec/loss_scale") or []


def test_scalars_of_both_runs_are_served(served):
    points = [point[1:] for point in scale_points(served)]
    assert points == [[step, step / 8] for step in range(40)]


def test_layer_table_is_served_as_text(served):
    entries = ask(served, "text/text", "mixprec/layer_dtypes")
    assert [entry["step"] for entry in entries] == [0, 20]
    assert "<td>float16</td>" in entries[-1]["text"]
