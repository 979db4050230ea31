"""`benchmarks.gpu`, run whole in sizes that a CPU does in seconds."""

import os
import pathlib
import subprocess
import sys

import keras
import pytest

from benchmarks.gpu import parts
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.results import Results
from benchmarks.gpu.table import write_table
from benchmarks.gpu.work import Task, work

ROOT = pathlib.Path(__file__).parents[1]
BACKEND = keras.backend.backend()

# What is not on a machine that has Keras, a backend and this package.
MISSING = {"tensorflow", "pytest", "sklearn", "matplotlib"} - {BACKEND}
BARE = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({sorted(MISSING)}))
runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)
"""


def rows(results):
    return {
        (part, item): record.get("rows")
        for (_, part), found in results.parts().items()
        for item, record in found.last.items()
    }


@pytest.mark.slow
def test_every_part_runs_with_nothing_but_the_backend(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", BARE, "--tiny", "--here", "--out", tmp_path],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = Results(tmp_path / "gpu.jsonl").parts()
    assert {part for _, part in found} == {*PARTS}
    for (_, part), known in found.items():
        assert not known.left(), done.stderr
        assert f"Keras {keras.__version__}" in known.on[0]
        assert f"## {part}\n" in done.stdout


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
    return rows(Results(task.path))


def test_what_fails_is_a_row_and_is_tried_again_by_the_next_run(task, tmp_path):
    assert finish(task)["planted", "good"]
    assert "RuntimeError: planted, once" in write_table(tmp_path)
    found = finish(task._replace(run="run 2"))
    assert found["planted", "once"]
    assert not found["planted", "always"]
    text = write_table(tmp_path)
    assert "2 of 3 done, 0 not as on a CPU" in text
    assert "- " + BACKEND + ", good: of good" in text


def test_what_a_kill_cut_off_is_measured_by_the_next_run(task, tmp_path):
    results = Results(task.path)
    results.add(**task.record(), on="", items=["good"])
    results.add(**task.record(), item="good", process=1)
    with open(task.path, "a") as file:
        file.write('{"run": "run 1", "ro')
    assert "good: was cut off" in write_table(tmp_path)
    assert finish(task._replace(run="run 2"))["planted", "good"]
    (good,) = [r for r in results.records() if r.get("rows")][-1:]
    before = len(results.records())
    assert not work(task._replace(run="run 3", share=(2, 3)))
    assert len(results.records()) == before + 1, good  # It starts, no more.
