"""`keras-mixprec serve`: the page and its data without TensorBoard."""

import json
import os
import shutil
import socket
import urllib.parse

import pytest
from page_server import ask, interrupt, served
from plugin_page import Page
from plugin_runs import train_both

import keras_mixprec as kmp
from keras_mixprec.cli import main
from keras_mixprec.reporting.file_source import FileSource
from keras_mixprec.reporting.run_data import RunData
from keras_mixprec.reporting.run_log import RunLog
from keras_mixprec.reporting.text_formats import to_json
from keras_mixprec.tensorboard_plugin.endpoints import Endpoints
from keras_mixprec.tensorboard_plugin.log_folder import LogFolder
from keras_mixprec.tensorboard_plugin.page_server import PageServer

RUNS = ["float16/mixprec", "tuned/mixprec"]


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    log_dir = tmp_path_factory.mktemp("logs")
    train_both(log_dir)
    return log_dir


@pytest.fixture(scope="module")
def port(logs):
    with served(logs) as (port, _):
        yield port


def json_of(port, target, **query):
    status, _, body = ask(port, target, **query)
    return json.loads(body) if status == 200 else None


def test_the_runs_are_those_of_the_folder(port):
    listed = json_of(port, "/data/runs")
    written = [run.pop("written") for run in listed]
    told = {"newer_schema": False, "in_16_bits": True}
    assert listed == [{"run": r} | told for r in RUNS]
    assert 0 < written[0] < written[1]


@pytest.mark.parametrize(
    ("dtype", "low"), [("float16", True), ("float32", False), (None, None)]
)
def test_what_a_run_computes_in_is_known_before_it_is_read(
    tmp_path, dtype, low
):
    folder = LogFolder(str(tmp_path))

    def listed():
        (own,) = folder.listed()
        return own["in_16_bits"]

    with RunLog(tmp_path / "own") as log:
        log.event(0, {"kind": "train_begin"})
        assert listed() is None
        if dtype:  # Logs of before do not say it.
            log.layers(0, [{"path": "a", "compute_dtype": dtype}])
        for step in range(100):
            log.event(step, {"kind": "train_end"})
        assert listed() is low
    assert listed() is low


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_what_its_files_say(port, logs, run):
    told = kmp.load_report(logs).to_dict()[run]
    for metric in told["heat"]["metrics"]:
        del metric["steps"], metric["values"]
    assert json_of(port, "/data/run", run=run) == json.loads(to_json(told))


def test_heat_and_histogram_are_what_the_files_say(port, logs):
    data = RunData(RUNS[1], FileSource(logs / RUNS[1]))
    query = {"run": RUNS[1], "metric": "weight_headroom_bits", "columns": 7}
    _, headers, body = ask(port, "/data/heat", **query)
    assert body == data.heat("weight_headroom_bits", 7)
    assert headers["Content-Type"].startswith("application/octet-stream")
    query = {"run": RUNS[1], "layer": "in_1", "part": "gradient"}
    found = json_of(port, "/data/histogram", **query)
    assert found == data.histogram("in_1", "gradient")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "192.168.0.1:6007",
        "[::1]",
        "x",
    ],
)
@pytest.mark.parametrize("target", ["/", "/data/runs", "/static/page.js"])
def test_other_hosts_are_refused(port, host, target):
    status, _, body = ask(port, target, host=host)
    assert (status, b"127.0.0.1" in body) == (403, True)


@pytest.mark.parametrize("host", ["localhost:6007", "127.0.0.1", "LOCALHOST:9"])
def test_names_of_this_machine_are_not(port, host):
    assert ask(port, "/data/runs", host=host)[0] == 200


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "MADE_UP"]
)
def test_other_methods_are_refused(port, method):
    status, headers, _ = ask(port, "/data/runs", method, body=b"a=1")
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "target",
    [
        "/static/../plugin.py",
        "/static/%2e%2e%2fplugin.py",
        "/static/index.js",
        "//etc/passwd",
        "/../../etc/passwd",
        "/data/",
        "/data/run/..",
        "/data/nothing",
        "/data/run?run=../../etc",
        "/data/run?run=/etc",
        "/favicon.ico",
        "http://evil.example/",
        "*",
    ],
)
def test_other_paths_are_refused(port, target):
    status, headers, body = ask(port, target)
    assert status in (400, 404) or target.startswith("http")
    assert len(body) < 300 or b"start.js" in body
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("target", ["/", "/data/runs", "/static/page.js"])
def test_head_says_what_get_would(port, target):
    status, headers, body = ask(port, target, "HEAD")
    _, known, whole = ask(port, target)
    assert (status, body) == (200, b"")
    assert headers["Content-Length"] == str(len(whole))
    assert headers["Content-Type"] == known["Content-Type"]


def test_it_listens_on_the_loopback_address_alone(port):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
        outward.connect(("192.0.2.1", 9))  # Sends nothing.
        address = outward.getsockname()[0]
    if address.startswith("127."):
        pytest.skip("this machine has no other address")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address, port), timeout=600)


def test_ctrl_c_ends_it_quietly(logs):
    with served(logs) as (port, process):
        assert process.said == (
            f"http://127.0.0.1:{port}/ shows {logs}; Ctrl+C ends it\n"
        )
        assert ask(port, "/")[0] == 200
        assert interrupt(process) == (0, "\n", "")


def test_a_port_in_use_is_one_sentence(port, logs, capsys):
    assert main(["serve", str(logs), "--port", str(port)]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert f"port {port} (Address already in use)" in printed
    assert "--port 0" in printed


def test_an_empty_folder_is_waited_on(tmp_path):
    with served(tmp_path) as (port, process):
        assert f"shows {tmp_path}, which has no run yet" in process.said
        assert json_of(port, "/data/runs") == []
        with RunLog(tmp_path) as log:
            log.event(3, {"kind": "skipped_step", "at_step": 3})
        (run,) = json_of(port, "/data/runs")
        assert json_of(port, "/data/run", run=run["run"])["last_step"] == 3


def test_a_run_is_served_while_it_goes_on(tmp_path):
    with served(tmp_path) as (port, _), RunLog(tmp_path) as log:
        for step in range(40):
            log.event(step, {"kind": "skipped_step", "at_step": step})
            found = json_of(port, "/data/run", run="mixprec")
            assert len(found["events"]) == step + 1


def test_a_run_that_is_removed_is_gone_and_a_new_one_is_read(tmp_path):
    with served(tmp_path) as (port, _):
        for count in 3, 1:
            with RunLog(tmp_path) as log:
                for step in range(count):
                    log.event(step, {"kind": "train_end", "n": step})
            found = json_of(port, "/data/run", run="mixprec")
            assert len(found["events"]) == count
            shutil.rmtree(log.folder)
            assert ask(port, "/data/run", run="mixprec")[0] == 404


def test_a_run_that_goes_while_all_are_read_is_left_out(logs):
    class Late(LogFolder):
        def listed(self):
            first, *_ = super().listed()
            return [first | {"run": "gone"}, first]

    rows = Endpoints().data(Late(str(logs)), "summaries", {}).body
    assert [row["run"] for row in json.loads(rows)] == [
        LogFolder(str(logs)).listed()[0]["run"]
    ]


def test_a_folder_of_any_name_is_shown(tmp_path):
    folder = tmp_path / os.fsdecode(b"r\xff")
    folder.mkdir()
    with PageServer(str(folder), 0) as server:
        assert rb"r\udcff" in server.answer("/").body


def test_a_run_of_any_name_is_read_by_everything(tmp_path, capsys):
    with RunLog(tmp_path / os.fsdecode(b"caf\xe9")) as log:
        log.event(3, {"kind": "stopped", "reason": "why"})
    report = kmp.load_report(tmp_path)
    report.save_html(tmp_path / "report.html")
    assert main(["report", str(tmp_path)]) == 1
    capsys.readouterr().out.encode()
    runs = LogFolder(str(tmp_path))
    (listed,) = runs.listed()
    assert [*report.to_dict()] == [listed["run"]]
    query = {"run": listed["run"]}
    found = json.loads(Endpoints().data(runs, "run", query).body)
    assert found["last_step"] == 3


def test_folders_are_listed_once_and_not_within_a_run(tmp_path, monkeypatch):
    for number in range(9):
        with RunLog(tmp_path / str(number)) as log:
            log.event(0, {"kind": "stopped", "reason": "why"})
        os.makedirs(os.path.join(log.folder, "batches", "inner"))
    walked, walk = [], os.walk

    def counted(top):
        for found in walk(top):
            walked.append(found[0])
            yield found

    monkeypatch.setattr(os, "walk", counted)
    runs, endpoints = LogFolder(str(tmp_path)), Endpoints()
    requests = 0
    rows = [{"unread": True}]
    while any(row.get("unread") for row in rows):
        rows = json.loads(endpoints.data(runs, "summaries", {}).body)
        requests += 1
    assert len(walked) == requests * (1 + 2 * 9)


def test_a_damaged_run_leaves_the_others_readable(logs, tmp_path):
    shutil.copytree(logs, tmp_path / "own")
    (name,) = [n for n in os.listdir(logs / RUNS[0]) if "tfevents" in n]
    path = tmp_path / "own" / RUNS[0] / name
    path.write_bytes(path.read_bytes()[:20_000] + b"\xff" * 64)
    with served(tmp_path / "own") as (port, _):
        assert json_of(port, "/data/run", run=RUNS[0]) is not None
        assert json_of(port, "/data/run", run=RUNS[1])["last_step"] == 40


WRONG = [
    (["/nowhere/logs"], "there is no folder /nowhere/logs"),
    ([__file__], f"there is no folder {__file__}"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=["no", "file"])
def test_what_is_no_folder_is_said(arguments, message, capsys):
    assert main(["serve", *arguments]) == 2
    assert capsys.readouterr().err == f"keras-mixprec: {message}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["a", "b"],
        ["a", "--port"],
        ["a", "--port", "x"],
        ["a", "--port", "-1"],
        ["a", "--port", "65536"],
        ["a", "--port", "1.5"],
        ["a", "--host", "0.0.0.0"],
    ],
    ids=" ".join,
)
def test_wrong_calls_are_refused(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["serve", *arguments])
    assert "\nkeras-mixprec" in capsys.readouterr().err


def test_the_page_shows_new_events_and_asks_nobody_else(driver, tmp_path):
    with served(tmp_path) as (port, _), RunLog(tmp_path) as log:
        log.layers(0, [{"path": "dense", "compute_dtype": "float16"}])
        log.event(1, {"kind": "skipped_step", "at_step": 1, "scale": 2.0})
        page = Page(driver)
        driver.get_log("browser")
        driver.get(f"http://127.0.0.1:{port}/")
        page.until(lambda: len(page.all("#events li[data-kind]")) == 1)
        log.event(2, {"kind": "skipped_step", "at_step": 2, "scale": 1.0})
        log.event(9, {"kind": "log_gap", "from_step": 3, "lost": 1})
        page.until(lambda: len(page.all("#events li[data-kind]")) > 1)
        assert driver.get_log("browser") == []
        asked = {urllib.parse.urlsplit(url).netloc for url in page.requests()}
        assert asked == {f"127.0.0.1:{port}"}
        assert driver.title.endswith(str(tmp_path))
