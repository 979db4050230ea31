"""`benchmarks.gpu`: what ends one item ends no other, and all can go on."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import keras
import pytest

from benchmarks.gpu import parts
from benchmarks.gpu import run as runner
from benchmarks.gpu.parts import Part
from benchmarks.gpu.results import Results
from benchmarks.gpu.run import run
from benchmarks.gpu.table import write_table
from benchmarks.gpu.work import Task, work

ROOT = pathlib.Path(__file__).parents[1]
BACKEND = keras.backend.backend()
pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.skipif(BACKEND == "tensorflow", reason="not among its own"),
]


def start(*command):
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A part of which an item fails once, and another always."""
    failing = ["once", "always", "always"]

    def measure(item, tiny):
        if item in failing:
            failing.remove(item)
            raise RuntimeError(f"planted, {item}")
        return [{"ms": 1 / 3, "differs": ""}, {"note": f"of {item}"}]

    items = ["once", "always", "good"]
    planted = Part("Planted.", 1, lambda tiny, cases: items, measure)
    monkeypatch.setitem(parts.PARTS, "planted", planted)
    path = str(tmp_path / "gpu.jsonl")
    return Task(path, "run 1", BACKEND, "planted", True, [], None)


def finish(task):
    while work(task):
        pass
    known = Results(task.path).parts()[BACKEND, "planted"].last
    return {item: record.get("rows") for item, record in known.items()}


def test_what_fails_is_a_row_and_is_tried_again_by_the_next_run(task, tmp_path):
    assert finish(task)["good"]
    assert "RuntimeError: planted, once" in write_table(tmp_path)
    found = finish(task._replace(run="run 2"))
    assert found["once"]
    assert not found["always"]
    text = write_table(tmp_path)
    assert "2 of 3" in text
    assert f"- {BACKEND}, good: of good" in text


def test_what_a_kill_cut_off_is_measured_by_the_next_run(task, tmp_path):
    results = Results(task.path)
    results.add(**task.record(), on="", items=["good"])
    results.add(**task.record(), item="good", process=1)
    with open(task.path, "a") as file:
        file.write('{"run": "run 1", "ro')
    assert "good: was cut off" in write_table(tmp_path)
    assert finish(task._replace(run="run 2"))["good"]
    before = len(results.records())
    assert not work(task._replace(run="run 3", share=(2, 3)))
    assert len(results.records()) == before + 1  # It starts, no more.


# In processes, as on a GPU.


def test_a_part_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_RESERVE", 0.0)
    run(tmp_path, ["optimizer"], [BACKEND], 1 / 120, tiny=True)
    found = Results(tmp_path / "gpu.jsonl").parts()[BACKEND, "optimizer"]
    assert "of its time" in [*found.last.values()][0]["error"]
    assert "of its time" in (tmp_path / "gpu.md").read_text()


def test_a_kill_leaves_no_process_and_resume_goes_on(tmp_path):
    command = "-m", "benchmarks.gpu", "--tiny", "--backends", BACKEND
    command += "--out", tmp_path, "--parts", "diagnosis"
    results = Results(tmp_path / "gpu.jsonl")
    killed = start(*command)
    while not any("process" in record for record in results.records()):
        assert killed.poll() is None
        time.sleep(0.1)
    killed.send_signal(signal.SIGTERM)
    killed.communicate()
    assert killed.returncode == 128 + signal.SIGTERM
    begun = results.records()[-1]
    while alive(begun["process"]):  # Else the test takes for ever.
        time.sleep(0.05)
    assert "Add --resume" in start(*command).communicate()[1]
    start(*command, "--resume").communicate()
    assert not results.parts()[BACKEND, "diagnosis"].left()


def alive(process):
    """Whether it runs: what has ended may wait for who asks how."""
    try:
        status = pathlib.Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
