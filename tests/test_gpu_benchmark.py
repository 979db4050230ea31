"""`benchmarks.gpu`: what fails ends no other item, and is tried again."""

import keras
import pytest

from benchmarks.gpu import parts
from benchmarks.gpu.parts import Part
from benchmarks.gpu.results import Results
from benchmarks.gpu.table import write_table
from benchmarks.gpu.work import Task, work

BACKEND = keras.backend.backend()
pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.skipif(BACKEND == "tensorflow", reason="not among its own"),
]


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
