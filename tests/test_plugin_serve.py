"""`keras-mixprec serve`: the page and its data without TensorBoard."""

import json
import shutil
import socket

import pytest
from node_page import served
from page_server import ask, interrupt, running
from plugin_runs import write

from keras_mixprec.cli import main
from keras_mixprec.reporting.run import Run
from keras_mixprec.reporting.run_files import RunFiles
from keras_mixprec.reporting.run_log import RunLog
from keras_mixprec.reporting.runs import row_of
from keras_mixprec.reporting.text_formats import to_json
from keras_mixprec.tensorboard_plugin import endpoints
from keras_mixprec.tensorboard_plugin.endpoints import Endpoints

RUN, LONG = "healthy/mixprec", "x" * 5000
METRIC = "weight_headroom_bits"
PAGES = "/", "/data/runs", "/static/page.js"
STOP = {"kind": "stopped", "reason": "why", "step": 3}


@pytest.fixture
def url(shared_page):
    return shared_page.home


def json_of(url, target, **query):
    status, _, body = ask(url, target, **query)
    return json.loads(body) if status == 200 else None


def data_of(folder, run):
    return Run(run, RunFiles(folder / run))


# What it answers.


def test_the_runs_are_those_of_the_folder(url, told):
    listed = {run.pop("run"): run for run in json_of(url, "/data/runs")}
    assert [*listed] == [f"{name}/mixprec" for name in told]
    assert all(run["written"] > 0 for run in listed.values())
    wide = {name for name, run in listed.items() if not run["in_16_bits"]}
    assert wide == {"wide/mixprec"}


def test_a_run_is_what_its_files_say(url, told, canonical):
    known = json.loads(to_json(told["healthy"]))
    for metric in known["heat"]["metrics"]:
        # The page asks for these by metric.
        del metric["steps"], metric["values"]
    assert json_of(url, "/data/run", run=RUN) == known
    data = data_of(canonical["healthy"].log_dir.parent, RUN)
    query = {"run": RUN, "metric": METRIC, "columns": 7}
    _, headers, body = ask(url, "/data/heat", **query)
    assert body == data.heat_bytes(METRIC, 7)
    assert headers["Content-Type"].startswith("application/octet-stream")
    query = {"run": RUN, "layer": "embed", "part": "gradient"}
    found = json_of(url, "/data/histogram", **query)
    assert found == data.histogram("embed", "gradient")
    assert found["counts"][0] == [1, 2, 4, 8]


@pytest.mark.parametrize("target", PAGES)
def test_head_says_what_get_would(url, target):
    status, headers, body = ask(url, target, "HEAD")
    _, known, whole = ask(url, target)
    assert (status, body) == (200, b"")
    assert headers["Content-Length"] == str(len(whole))
    assert headers["Content-Type"] == known["Content-Type"]


# What it refuses.


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 403) for host in ("evil.example", "127.0.0.1.evil.example")),
        *((host, 200) for host in ("localhost:1", "127.0.0.1", "LOCALHOST:9")),
    ],
)
@pytest.mark.parametrize("target", PAGES)
def test_only_names_of_this_machine_are_answered(url, host, status, target):
    found, _, body = ask(url, target, host=host)
    assert found == status
    assert status == 200 or b"127.0.0.1" in body


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "MADE_UP"]
)
def test_other_methods_are_refused(url, method):
    status, headers, _ = ask(url, "/data/runs", method, body=b"a=1")
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "target",
    [
        "/static/%2e%2e%2fplugin.py",
        "/static/index.js",
        "/../../etc/passwd",
        "/data/run/..",
        "/data/nothing",
        "http://evil.example/",
    ],
)
def test_other_paths_are_refused(url, target):
    status, headers, body = ask(url, target)
    assert status in (400, 404) or target.startswith("http")
    assert len(body) < 300 or b"start.js" in body
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("route", "query", "status"),
    [
        ("run", {}, 400),
        ("run", {"run": "../../etc"}, 404),
        ("run", {"run": LONG}, 400),
        ("heat", {"run": RUN, "metric": "none", "columns": "9"}, 404),
        *(
            ("heat", {"run": RUN, "metric": "m", "columns": columns}, 400)
            for columns in ("", "0", "2001", "9" * 400, "²")
        ),
        ("histogram", {"run": RUN, "layer": "a", "part": "b"}, 404),
    ],
)
def test_senseless_questions_are_refused(url, route, query, status):
    found, headers, body = ask(url, f"/data/{route}", **query)
    assert found == status
    assert len(body) < 300
    assert headers["Content-Type"].startswith("text/plain")


def test_it_listens_on_the_loopback_address_alone(url):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
        outward.connect(("192.0.2.1", 9))  # Sends nothing.
        address = outward.getsockname()[0]
    if address.startswith("127."):
        pytest.skip("this machine has no other address")
    port = int(url.strip("/").rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address, port), timeout=600)


# Runs that come, grow, go, or are damaged.


def test_a_run_is_served_while_it_goes_on_until_it_is_removed(tmp_path):
    with served(tmp_path) as url:
        assert json_of(url, "/data/runs") == []
        for count in 40, 1:
            with RunLog(tmp_path) as log:
                for step in range(count):
                    log.event(step, {"kind": "skipped_step", "at_step": step})
                    found = json_of(url, "/data/run", run="mixprec")
                    assert len(found["events"]) == step + 1
                    assert found["last_step"] == step
            shutil.rmtree(log.folder)
            assert ask(url, "/data/run", run="mixprec")[0] == 404


def test_rows_of_runs_come_as_they_are_read(tmp_path, monkeypatch):
    for name in "abc":
        write(tmp_path / name, "a", STOP)
    monkeypatch.setattr(endpoints, "_PATIENCE", 0)
    answers = Endpoints({"": str(tmp_path)})
    seen = []
    for _ in range(4):
        rows = json.loads(answers.data("summaries", {}).body)
        seen.append([row.get("unread", False) for row in rows])
    assert seen[0] == [False, True, True]
    assert seen[2] == seen[3] == [False] * 3
    known = [data_of(tmp_path, f"{name}/mixprec") for name in "abc"]
    assert rows == json.loads(to_json([*map(row_of, known)]))


def test_a_run_that_goes_while_all_are_read_is_left_out(tmp_path):
    class Late(Endpoints):
        def listed(self):
            (only,) = super().listed()
            return [only | {"run": "gone"}, only]

    write(tmp_path, "a")
    rows = Late({"": str(tmp_path)}).data("summaries", {}).body
    assert [row["run"] for row in json.loads(rows)] == ["mixprec"]


# The command.


def test_the_command_needs_no_backend_and_ends_quietly(tmp_path, capsys):
    with running(tmp_path) as (url, process):
        for words in url, str(tmp_path), "no run yet":
            assert words in process.said
        write(tmp_path, "a")
        (run,) = json_of(url, "/data/runs")
        assert run["in_16_bits"]
        # A port in use is one sentence.
        port = url.strip("/").rpartition(":")[2]
        assert main(["serve", str(tmp_path), "--port", port]) == 2
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1
        assert f"port {port}" in printed
        assert "--port 0" in printed
        assert interrupt(process) == (0, "\n", "")
