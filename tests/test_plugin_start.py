"""TensorBoard starts whatever is wrong with us or with a log."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import types

import pytest
from plugin_client import ask
from reporting_readers import get, poll, tensorboard

import keras_mixprec
from keras_mixprec.reporting import schema
from keras_mixprec.reporting.run_log import RunLog

PACKAGE = pathlib.Path(keras_mixprec.__file__).parent
# As users start it, but without TensorFlow, which would itself not come up
# with a broken `KERAS_BACKEND`.
MAIN = """
import sys, types
sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
from tensorboard import main
main.run_main()
"""
FLAGS = ("--host=127.0.0.1", "--port=0", "--reload_interval=1")


def start(log_dir, **environment):
    server = ("-P", "-c", MAIN)
    return tensorboard(str(log_dir), *FLAGS, server=server, **environment)


def write_run(log_dir):
    with RunLog(log_dir) as log:
        log.layers(0, [{"path": "dense", "compute_dtype": "float16"}])
        log.scalars(0, {"mixprec/loss_scale": 1.0})
        log.event(1, {"kind": "train_end"})
    return log.folder


def runs(url):
    return json.loads(ask(url, "data/runs").body or "[]")


def test_the_tab_needs_no_keras_and_no_backend(tmp_path):
    write_run(tmp_path / "logs")
    with start(tmp_path / "logs", KERAS_BACKEND="nonsense") as url:
        assert poll(lambda: runs(url))
        answer = ask(url, "data/run", run="mixprec")
        assert json.loads(answer.body)["layers"][0]["path"] == "dense"


@pytest.mark.parametrize(
    "broken",
    [
        "reporting/__init__.py",
        "formats.py",
        "tensorboard_plugin/plugin.py",
        "tensorboard_plugin/static",
    ],
)
def test_a_package_half_removed_costs_the_tab_alone(tmp_path, broken):
    write_run(tmp_path / "logs")
    copy = tmp_path / "path" / "keras_mixprec"
    shutil.copytree(PACKAGE, copy)
    if (copy / broken).is_dir():
        shutil.rmtree(copy / broken)
    else:
        # Not removed: it would be found where the package is installed.
        (copy / broken).write_text("raise ImportError('half removed')")
    path = {"PYTHONPATH": str(tmp_path / "path")}
    with start(tmp_path / "logs", **path) as url:
        assert poll(lambda: get(url, "runs")) == ["mixprec"]
        assert "mixed_precision" not in get(url, "plugins_listing")


def test_loading_the_loader_imports_nothing_else():
    code = (
        "import sys, keras_mixprec.tensorboard_plugin.loader\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    heavy = {"keras", "tensorflow", "jax", "torch", "ml_dtypes"}
    assert not heavy & set(done.stdout.split())


def damage_file(path):
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        file.write(b"\xff" * 64)


@pytest.mark.parametrize("where", ["file", "description", "event"])
def test_a_corrupt_log_leaves_the_others_readable(tmp_path, where, monkeypatch):
    write_run(tmp_path / "good")
    if where == "description":
        monkeypatch.setattr(
            "keras_mixprec.reporting.summaries.json",
            types.SimpleNamespace(dumps=lambda _: "{no"),
        )
    if where == "event":
        monkeypatch.setattr(
            "keras_mixprec.reporting.run_log.to_json", lambda _: "{no"
        )
    folder = write_run(tmp_path / "bad")
    if where == "file":
        (name,) = (x for x in os.listdir(folder) if "tfevents" in x)
        damage_file(os.path.join(folder, name))
    with start(tmp_path) as url:
        assert poll(lambda: {"run": "good/mixprec"} in _named(url))
        answer = ask(url, "data/run", run="good/mixprec")
        assert json.loads(answer.body)["last_step"] == 1
        assert ask(url, "data/run", run="bad/mixprec").status in (200, 404)


def _named(url):
    return [{"run": run["run"]} for run in runs(url)]


def test_a_newer_log_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "keras_mixprec.reporting.summaries.SCHEMA_VERSION",
        schema.SCHEMA_VERSION + 1,
    )
    write_run(tmp_path)
    with start(tmp_path) as url:
        (run,) = poll(lambda: runs(url))
        assert (run["run"], run["newer_schema"]) == ("mixprec", True)
        answer = ask(url, "data/run", run="mixprec")
        assert answer.status == 400
        assert b"newer version of keras_mixprec" in answer.body
