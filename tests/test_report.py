"""Reports of canonical logs agree with what was written."""

import base64
import builtins
import json
import math
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import urllib.parse
import zlib

import ml_dtypes
import numpy as np
import pytest
from canonical_logs import NAMES
from reporting_readers import read_heat

import keras_mixprec as kmp
from keras_mixprec import cli
from keras_mixprec.metrics import PROBED
from keras_mixprec.reporting import schema
from keras_mixprec.reporting.headline import STATES
from keras_mixprec.reporting.layer_tables import LEFT_OUT
from keras_mixprec.reporting.run_log import RunLog
from keras_mixprec.reporting.runs import gravity
from keras_mixprec.reporting.text_formats import to_json
from keras_mixprec.tensorboard_plugin.endpoints import Endpoints

pytestmark = pytest.mark.one_backend

each_log = pytest.mark.parametrize("name", NAMES)
ACTIVATION = "activation_headroom_bits"
PLUGIN = pathlib.Path(kmp.__file__).parent / "tensorboard_plugin"


@pytest.fixture(scope="module")
def reports(canonical):
    return {n: kmp.load_report(log.log_dir) for n, log in canonical.items()}


@pytest.fixture(scope="module")
def two(canonical, tmp_path_factory):
    """The folder of a run that fails and of one that is repaired."""
    folder = tmp_path_factory.mktemp("two")
    for name, copy in ("overflow", "z"), ("repaired", "a"):
        shutil.copytree(canonical[name].log_dir, folder / copy)
    return folder


def run_of(report):
    (run,) = report.to_dict().values()
    return run


def test_a_loss_scale_has_its_ends_and_extremes(tmp_path):
    with RunLog(tmp_path) as log:
        points = [[step, 2.0**n, 0, 0] for step, n in enumerate((4, 2, 9, 5))]
        log.rows(9, schema.SCALE, points, optimizer="")
    cards = {x["name"]: x for x in run_of(kmp.load_report(tmp_path))["cards"]}
    bits = re.findall(r"2\*\*(\d+)", cards["scale"]["sentence"])
    assert bits == ["4", "5", "2", "9"]


def unpacked(page):
    """Returns the data in a page, as its script reads them."""
    packed = re.search(r'MIXPREC_INLINE = "([^"]*)"', page)[1]
    return json.loads(zlib.decompress(base64.b64decode(packed)))


@each_log
def test_the_dict_has_what_was_logged(name, canonical, reports):
    run, folder = run_of(reports[name]), canonical[name].log_dir / "mixprec"
    with open(folder / "events.jsonl") as lines:
        logged = [json.loads(line) for line in lines]
    searches = [e for e in logged if e["kind"] == schema.TRADE_OFF_EVENT]
    assert (run["trade_off"] is None) == (not searches)
    key = lambda event: (event["step"], event["wall_time"])  # noqa: E731
    served = sorted(run["events"], key=key)
    for event, line in zip(served, sorted(logged, key=key), strict=True):
        # Only the log adds this key.
        known = line.keys() - {"failing_since"}
        assert {k: event[k] for k in known} == {k: line[k] for k in known}
    tables = read_heat(str(folder))
    heat = {m["name"]: m for m in (run["heat"] or {"metrics": []})["metrics"]}
    for place, metric in enumerate(PROBED if tables else ()):
        columns = np.stack([table[:, place] for table in tables.values()])
        assert (metric in heat) == (not np.isnan(columns).all())
        if metric in heat:
            assert heat[metric]["steps"] == list(tables)
            shown = [*heat[metric]["values"].values()]
            np.testing.assert_array_equal(np.transpose(shown), columns)
    for row, layer in enumerate(run["layers"] if tables else ()):
        # A layer that was demoted has the range of its new dtype.
        since = layer["dtypes"][-1][0]
        own = [t[row, 0] for step, t in tables.items() if step > since]
        if own and not (layer["inside"] or layer["lost_because"]):
            assert layer["least_headroom"] == min(own)


@each_log
def test_page_tab_and_dict_agree(name, canonical, reports):
    report = reports[name]
    page, run = unpacked(report.to_html()), run_of(report)
    tab = Endpoints({"": str(canonical[name].log_dir)})
    for url, answer in page.items():
        route, _, query = url.removeprefix("./data/").partition("?")
        query = dict(urllib.parse.parse_qsl(query)) | {"columns": "400"}
        sent = tab.data(route, query)
        if route == "heat":
            assert base64.b64decode(answer) == sent.body
            agrees_with(run["heat"], query["metric"], sent.body)
        elif route == "runs":  # A report does not go by the files' own dates.
            (listed,) = json.loads(sent.body)
            assert answer == [listed | {"written": answer[0]["written"]}]
        elif route != "what_if":  # Of as many columns as there is room for.
            assert answer == json.loads(sent.body)
    (told,) = (v for k, v in page.items() if k.startswith("./data/run?"))
    if run["heat"]:
        for metric in run["heat"]["metrics"]:
            del metric["steps"], metric["values"]
    assert told == json.loads(to_json(run))
    metrics = (run["heat"] or {"metrics": []})["metrics"]
    assert sum("/heat?" in url for url in page) == len(metrics)


def agrees_with(heat, name, data):
    """Returns True if the page and the dict have the same metric."""
    (length,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + length])
    (metric,) = (m for m in heat["metrics"] if m["name"] == name)
    assert header["until"] == metric["steps"]
    assert header["layers"] == list(metric["values"])
    count = len(header["layers"]) * len(header["until"])
    numbers = np.frombuffer(data[4 + length :], "<f4", count)
    marks = np.frombuffer(data[4 + length + 4 * count :], "<u2")
    assert len(marks) == count * header["marked"]
    assert {*marks} <= {*range(len(header["origins"]) + 1), LEFT_OUT}
    is_headroom = name.endswith("headroom_bits")
    dtype = "float16" if is_headroom else ml_dtypes.bfloat16
    values = np.array([*metric["values"].values()]).astype(dtype)
    np.testing.assert_array_equal(
        numbers.astype(float), values.ravel().astype(float)
    )


def test_runs_are_as_grave_as_their_state_and_then_as_their_finding():
    def rank(state, level=None):
        return gravity(state, level and {"repaired": False, "level": level})

    levels = ["bad", "warning", "info", None]
    found = [rank(state, level) for state in STATES for level in levels]
    assert found == sorted({*found})


def test_calls_and_layers_of_such_names_are_distinct(tmp_path):
    with RunLog(tmp_path) as log:
        paths = "a", "a#1", "b"
        log.layers(0, [{"path": p, "compute_dtype": "float16"} for p in paths])
        table = [[4.0], [3.0], [2.0], [1.0]]
        log.heat(0, table, ["a", "a#1", "b", "b#1"], {ACTIVATION: "min"})
        # Rows are in the order of the model.
        log.heat(1, [[4.0]] * 3, ["b", "a", "gone"], {ACTIVATION: "min"})
    run = run_of(kmp.load_report(tmp_path))
    found = {x["path"]: x["least_headroom"] for x in run["layers"]}
    assert found == {"a": 4.0, "a#1": 3.0, "b": 1.0}
    assert run["heat"]["layers"] == ["a", "a#1", "b", "b#1", "gone"]


def test_a_pooled_range_does_not_cross_a_change_of_precision(tmp_path):
    metrics = {ACTIVATION: "min", "activation_nonfinite": "max"}
    change = {"before": "mixed_float16", "after": "float32"}
    with RunLog(tmp_path) as log:
        log.layers(0, [{"path": "a", "compute_dtype": "float16"}])
        for step in range(1, 2001):
            row = [-math.inf, 1] if step < 1500 else [-3, 0]
            log.heat(step, [row], ["a"], metrics)
            if step == 1499:
                log.event(step, {"kind": "demote", "layers": {"a": change}})
        log.layers(2000, [{"path": "a", "compute_dtype": "float32"}])
    (layer,) = run_of(kmp.load_report(tmp_path))["layers"]
    assert layer["least_headroom"] == -3


def test_a_notebook_gets_page_picture_and_text(reports, monkeypatch):
    pytest.importorskip("matplotlib")
    report = reports["healthy"]
    bundle = report._repr_mimebundle_()
    assert bundle["text/plain"] == str(report)
    assert bundle["text/html"].startswith('<iframe sandbox="allow-scripts')
    assert bundle["image/png"].startswith(b"\x89PNG")
    assert bundle["text/html"].count("<") == 2  # All inside is escaped.
    imported = builtins.__import__

    def refuse(name, *args):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError("No module", name="matplotlib")
        return imported(name, *args)

    figure = report.plot().figure
    assert report.plot(figure.axes[0]) is figure.axes[0]
    (curve, *_) = figure.axes[0].lines
    assert {*curve.get_ydata()} == {15.0}
    monkeypatch.setattr(builtins, "__import__", refuse)
    assert "image/png" not in report._repr_mimebundle_()
    with pytest.raises(ModuleNotFoundError):
        report.plot()


def test_the_command_line_prints_and_writes_it(two, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    report, page = kmp.load_report(two), tmp_path / "new" / "a.html"
    picture = tmp_path / "a.png"
    asked = ["report", str(two), "--html", str(page), "--png", str(picture)]
    # One of the runs is failing.
    assert cli.main(asked) == 1
    assert capsys.readouterr().out.startswith(str(report))
    assert page.read_text() == report.to_html()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["report", str(two / "a")]) == 0


@pytest.mark.parametrize(
    ("log_dir", "page"), [(".", "/dev/null/a"), ("a", "."), ("none", "a.html")]
)
def test_the_command_line_says_what_is_wrong(log_dir, page, two, capsys):
    page = os.path.join(two, page)
    assert cli.main(["report", str(two / log_dir), "--html", page]) == 2
    message = capsys.readouterr().err
    assert message.startswith("keras-mixprec: ")
    assert message.count("\n") == 1


def test_nobody_has_to_read_all_of_it(two):
    command = [sys.executable, "-m", "keras_mixprec", "report", str(two)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_what_is_no_log_of_this_version_is_an_error(tmp_path, monkeypatch):
    for log_dir in tmp_path, tmp_path / "nowhere":
        with pytest.raises(FileNotFoundError, match="Received: log_dir="):
            kmp.load_report(log_dir)
    with monkeypatch.context() as patch:
        patch.setattr(schema, "SCHEMA_VERSION", schema.SCHEMA_VERSION + 1)
        RunLog(tmp_path).close()
    with pytest.raises(ValueError, match="newer version"):
        kmp.load_report(tmp_path)


def test_a_report_outlives_its_log(two, tmp_path):
    folder = shutil.copytree(two, tmp_path / "own")
    report, other = kmp.load_report(folder), kmp.load_report(folder)
    shutil.rmtree(folder)
    np.testing.assert_equal(report.to_dict(), kmp.load_report(two).to_dict())
    assert unpacked(other.to_html())
