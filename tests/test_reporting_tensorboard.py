"""A log as a running TensorBoard serves it, by either of its loaders."""

import importlib.util
import json

import numpy as np
import pytest
from comparison_records import four_arms, record
from reporting_readers import get, poll, tensorboard

from keras_mixprec.analysis.comparison.result import ComparisonResult

pytestmark = pytest.mark.one_backend


@pytest.fixture(scope="module", params=["true", "false"], ids=["fast", "slow"])
def served(request, tmp_path_factory):
    """The URL of the log of a comparison."""
    if request.param == "true" and not importlib.util.find_spec(
        "tensorboard_data_server"
    ):
        pytest.skip("no fast loader for this platform")
    log_dir = str(tmp_path_factory.mktemp("logs"))
    ComparisonResult(record(four_arms())).log_hparams(f"{log_dir}/compared")
    with tensorboard(log_dir, f"--load_fast={request.param}") as url:
        assert poll(lambda: groups_of(url))
        yield url


def groups_of(url):
    asked = {"allowedStatuses": ["STATUS_UNKNOWN"], "sliceSize": 9}
    asked = json.dumps(asked)
    found = get(url, "plugin/hparams/session_groups", request=asked)
    return found and found["sessionGroups"]


def test_a_comparison_is_a_run_per_policy(served):
    groups = {g["hparams"]["policy"]: g for g in groups_of(served)}
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
