"""`benchmarks.gpu` in processes, as on a GPU: what ends one ends no other."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest
from zoo import CASES

from benchmarks.gpu import run as runner
from benchmarks.gpu.results import Results
from benchmarks.gpu.run import run

ROOT = pathlib.Path(__file__).parents[1]


def start(folder, *arguments):
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny"]
    command += ["--backends", "torch", "--out", folder, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)


def test_an_item_that_fails_is_not_the_end(tmp_path):
    cases = ["no_such_case", "healthy_mlp"]
    run(tmp_path, ["diagnosis"], ["torch"], 5, tiny=True, cases=cases)
    found = Results(tmp_path / "gpu.jsonl").parts()["torch", "diagnosis"]
    assert found.left() == ["no_such_case"]
    assert found.last["no_such_case"]["error"] == "KeyError: 'no_such_case'"
    assert "healthy_mlp" in (tmp_path / "gpu.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["diagnosis", "repair"])
def test_every_case_of_the_zoo_has_its_row(part, tmp_path):
    # No case may take more than three times its part of these minutes.
    run(tmp_path, [part], ["torch"], 120, tiny=True, cases=[*CASES])
    found = Results(tmp_path / "gpu.jsonl").parts()["torch", part]
    assert found.items == [*CASES]
    assert not found.left()


def test_a_part_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_RESERVE", 0.0)
    run(tmp_path, ["optimizer", "diagnosis"], ["torch"], 1 / 60, tiny=True)
    found = Results(tmp_path / "gpu.jsonl").parts()
    (error,) = [r["error"] for r in found["torch", "optimizer"].last.values()]
    assert "was at the end of its time" in error
    assert "end of its time" in (tmp_path / "gpu.md").read_text()


def test_what_no_time_is_left_for_is_said(tmp_path):
    run(tmp_path, ["repair"], ["torch"], 0, tiny=True)
    text = (tmp_path / "gpu.md").read_text()
    assert "- torch: no time was left for it" in text


def test_a_kill_leaves_no_process_and_resume_goes_on(tmp_path):
    results = Results(tmp_path / "gpu.jsonl")
    killed = start(tmp_path, "--parts", "diagnosis")
    while not any("process" in record for record in results.records()):
        assert killed.poll() is None
        time.sleep(0.1)
    killed.send_signal(signal.SIGTERM)
    assert killed.wait(600) == 128 + signal.SIGTERM
    killed.stderr.close()
    begun = results.records()[-1]
    while alive(begun["process"]):  # Else the test takes for ever.
        time.sleep(0.05)
    refused = start(tmp_path, "--parts", "diagnosis")
    assert b"Add --resume" in refused.communicate()[1]
    start(tmp_path, "--parts", "diagnosis", "--resume").communicate()
    assert not results.parts()["torch", "diagnosis"].left()


def alive(process):
    """Whether it runs: what has ended may wait for who asks how."""
    try:
        status = pathlib.Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
