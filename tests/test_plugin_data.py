"""What the plugin of a running TensorBoard serves, by either loader."""

import importlib.util
import json
import shutil

import numpy as np
import pytest
from plugin_client import ask
from plugin_runs import train, train_both
from reporting_readers import get, poll, tensorboard

import keras_mixprec as kmp
from keras_mixprec.reporting.file_source import FileSource
from keras_mixprec.reporting.run_data import RunData
from keras_mixprec.reporting.run_layers import read_layers, read_paths
from keras_mixprec.reporting.run_log import RunLog
from keras_mixprec.reporting.source import Point
from keras_mixprec.reporting.text_formats import to_json

RUNS = ["float16/mixprec", "tuned/mixprec"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    log_dir = tmp_path_factory.mktemp("logs")
    train_both(log_dir)
    return log_dir


@pytest.fixture(scope="module", params=["true", "false"], ids=["fast", "slow"])
def loader(request):
    return request.param


@pytest.fixture(scope="module")
def logs(loader, trained, tmp_path_factory):
    return shutil.copytree(trained, tmp_path_factory.mktemp("own") / "logs")


@pytest.fixture(scope="module")
def url(loader, logs):
    if loader == "true" and not importlib.util.find_spec(
        "tensorboard_data_server"
    ):
        pytest.skip("no fast loader for this platform")
    flag = f"--load_fast={loader}"
    with tensorboard(str(logs), flag, "--path_prefix=/deep/down") as url:
        assert poll(lambda: len(runs(url)) == 2)
        yield url


def runs(url):
    return json.loads(ask(url, "data/runs").body or "[]")


def test_the_tab_is_there_and_active(url):
    (listed,) = [
        entry
        for name, entry in get(url, "plugins_listing").items()
        if name == "mixed_precision"
    ]
    assert listed["enabled"]
    assert listed["tab_name"] == "Mixed Precision"


def test_the_standard_dashboards_have_something_to_show(url):
    listed = get(url, "plugins_listing")
    for name in "scalars", "custom_scalars", "text", "histograms", "hparams":
        assert listed[name]["enabled"], name
    (charts,) = get(url, "plugin/custom_scalars/layout")["category"]
    assert "loss scale (log2)" in [chart["title"] for chart in charts["chart"]]


def test_the_runs_are_those_of_the_log(url, logs):
    told = runs(url)
    written = [run.pop("written") for run in told]
    known = {"newer_schema": False, "in_16_bits": True}
    assert told == [{"run": r} | known for r in RUNS]
    folders = [FileSource(logs / run) for run in RUNS]
    assert written == [folder.written for folder in folders]
    assert written == sorted(written)


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_what_its_files_say(url, logs, run):
    served = json.loads(ask(url, "data/run", run=run).body)
    told = kmp.load_report(logs).to_dict()[run]
    for metric in told["heat"]["metrics"]:
        # The page asks for these by metric.
        del metric["steps"], metric["values"]
    assert served == json.loads(to_json(told))


@pytest.mark.parametrize(
    "metric", ["weight_headroom_bits", "forward_error_against_float32"]
)
def test_heat_is_what_the_files_say(url, logs, metric):
    served = ask(url, "data/heat", run=RUNS[1], metric=metric, columns=7)
    data = RunData(RUNS[1], FileSource(logs / RUNS[1]))
    assert served.body == data.heat(metric, 7)
    assert served.headers["Content-Type"] == "application/octet-stream"


@pytest.mark.parametrize("part", ["activation", "gradient"])
def test_a_histogram_is_what_the_files_say(url, logs, part):
    query = {"layer": "in_1", "part": part}
    served = ask(url, "data/histogram", run=RUNS[1], **query)
    data = RunData(RUNS[1], FileSource(logs / RUNS[1]))
    told = json.loads(served.body)
    assert told == data.histogram("in_1", part)
    # Measured after the first step, and at the end of each epoch.
    assert told["steps"] == [1, 20, 40]
    elements = sum(told["counts"][0])
    assert 0 < elements <= 8 * 32  # Of a batch; zeros have no exponent.


def test_every_answer_says_what_it_is(url):
    for route in "data/runs", "data/no", "static/page.js", "data/run":
        headers = ask(url, route).headers
        assert headers["X-Content-Type-Options"] == "nosniff", route
        assert "text/html" not in headers["Content-Type"], route
    script = ask(url, "static/page.js").headers["Content-Type"]
    assert script.startswith("text/javascript")


@pytest.mark.parametrize(
    "path",
    [
        "static/../plugin.py",
        "static/%2e%2e%2fplugin.py",
        "static/..%5cplugin.py",
        "static//etc/passwd",
        "static/__init__.py",
        "static/index.js",
        "static/",
    ],
)
def test_no_path_leads_out_of_the_page_s_folder(url, path):
    assert ask(url, path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("route", ["data/runs", "data/run", "static/page.js"])
def test_nothing_but_get_is_allowed(url, method, route):
    assert ask(url, route, method).status == 405


@pytest.mark.parametrize(
    ("route", "query", "status"),
    [
        ("data/run", {}, 400),
        ("data/run", {"run": "nothing"}, 404),
        ("data/run", {"run": "x" * 5000}, 400),
        ("data/run", {"run": "../../etc"}, 404),
        ("data/heat", {"run": RUNS[0], "metric": "none", "columns": "9"}, 404),
        ("data/heat", {"run": RUNS[0], "metric": "m" * 5000}, 400),
        *(
            ("data/heat", {"run": RUNS[0], "metric": "m", "columns": c}, 400)
            for c in ("", "0", "-1", "1e3", "2001", "9" * 400, "²")
        ),
        ("data/histogram", {"run": RUNS[0], "layer": "a", "part": "b"}, 404),
        ("data/histogram", {"run": RUNS[0], "layer": "a"}, 400),
    ],
)
def test_senseless_questions_are_refused(url, route, query, status):
    answer = ask(url, route, **query)
    assert answer.status == status, answer
    assert len(answer.body) < 300
    assert answer.headers["Content-Type"].startswith("text/plain")


def test_a_run_is_served_while_it_goes_on(url, logs):
    def last_step():
        return json.loads(ask(url, "data/run", run="live/mixprec").body)

    with RunLog(logs / "live") as log:
        for step in range(3):
            log.event(step, {"kind": "skipped_step", "at_step": step})
            assert poll(
                lambda: any(r["run"].startswith("live") for r in runs(url))
            )
            assert poll(lambda step=step: last_step()["last_step"] == step)
            assert len(last_step()["events"]) == step + 1


def test_a_thousand_rare_events_are_all_served(url, logs):
    with RunLog(logs / "rare") as log:
        for step in range(1000):
            log.event(step * 1000, {"kind": "skipped_step", "n": step})

    def events():
        answer = ask(url, "data/run", run="rare/mixprec")
        return answer.status == 200 and json.loads(answer.body)["events"]

    assert poll(lambda: len(events() or ()) == 1000)
    assert [event["n"] for event in events()] == list(range(1000))


def test_bfloat16_runs_are_measured_against_their_format(tmp_path):
    monitor = train(tmp_path, epochs=1, policy="mixed_bfloat16")
    (run,) = monitor.report.to_dict().values()
    assert run["format"]["name"] == "bfloat16"
    assert run["format"]["maximum_exponent"] == 128


def test_the_paths_alone_are_those_of_the_layers():
    good = [{"path": p, "compute_dtype": "float16"} for p in ("b", "a")]
    tables = [good[:1], [*good, None, {"path": 3}]]
    points = [
        Point(step, np.array(json.dumps(table)))
        for step, table in enumerate(tables)
    ]
    assert read_paths(points) == [row["path"] for row in read_layers(points)]
    assert read_paths(points) == ["b", "a"]
    assert read_paths([]) == []
