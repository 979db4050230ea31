"""What TensorBoard's own dashboards show of a log, by its data endpoints."""

import json
import urllib.request
from collections import Counter

import pytest
from plugin_runs import train_both
from reporting_readers import get, poll, tensorboard

RUNS = ["float16/mixprec", "tuned/mixprec"]

# Cards on a page of a group.
PAGE = 12


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    log_dir = tmp_path_factory.mktemp("logs")
    train_both(log_dir)
    with tensorboard(str(log_dir)) as url:
        assert poll(lambda: len(get(url, "plugin/scalars/tags")) == 2)
        assert poll(lambda: len(groups(url)) >= 4)
        yield url


def groups(url):
    """How many curves each group of the Scalars tab has, as it sorts them."""
    tags = {t for run in get(url, "plugin/scalars/tags").values() for t in run}
    return dict(sorted(Counter(tag.split("/")[0] for tag in tags).items()))


def ask_hparams(url, route, **asked):
    request = urllib.request.Request(
        f"{url}data/plugin/hparams/{route}",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def test_the_first_group_has_the_loss_scale_and_the_counters(url):
    assert list(groups(url)) == [
        "mixprec",
        "mixprec_gradient_norm_by_variable",
        "mixprec_overflow_count",
        "mixprec_ranges",
    ]
    tags = {t for run in get(url, "plugin/scalars/tags").values() for t in run}
    first = sorted(tag for tag in tags if tag.startswith("mixprec/"))
    assert len(first) <= PAGE
    assert {"mixprec/loss_scale", "mixprec/skipped_steps"} <= set(first)


def test_no_histogram_is_among_them(url):
    shown = get(url, "plugin/histograms/tags")
    found = {tag.split("/")[0] for run in shown.values() for tag in run}
    assert found == {"mixprec_activation_exponent", "mixprec_gradient_exponent"}


def test_every_chart_of_the_layout_has_a_curve(url):
    (category,) = get(url, "plugin/custom_scalars/layout")["category"]
    for chart in category["chart"]:
        for tag in chart["multiline"]["tag"]:
            asked = {"tag": tag, "run": RUNS[1]}
            found = get(url, "plugin/custom_scalars/scalars", **asked)
            # Of steps that are probed, all of them, the time is not taken.
            timed = tag.startswith("mixprec_performance/")
            assert found["tag_to_events"] or timed, chart["title"]


def test_no_run_is_there_twice(url):
    assert get(url, "runs") == RUNS


def test_hparams_has_a_trial_for_each_run_with_eight_metrics(url):
    asked = {"experimentName": "", "includeMetrics": True}
    found = ask_hparams(url, "experiment", **asked)
    assert len(found["metricInfos"]) == 8
    statuses = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_RUNNING"]
    asked |= {"allowedStatuses": statuses, "startIndex": 0, "sliceSize": 9}
    answer = ask_hparams(url, "session_groups", **asked, colParams=[])
    trials = {group["name"]: group for group in answer["sessionGroups"]}
    assert sorted(trials) == RUNS
    for trial in trials.values():
        assert trial["hparams"]["policy"] == "mixed_float16"
        assert trial["hparams"]["optimizer"] == "Adam"
        assert len(trial["sessions"]) == 1
        shown = {m["name"]["tag"]: m["value"] for m in trial["metricValues"]}
        # Not the speed, since all steps are probed ones.
        assert 3 <= len(shown) <= 5
    skipped = "mixprec/skipped_steps"
    values = trials[RUNS[0]]["metricValues"]
    assert [m["value"] for m in values if m["name"]["tag"] == skipped] == [40]
