"""A comparison that is killed continues, and comes to the same result."""

import os
import pathlib
import signal
import subprocess
import sys

import compared_training
import pytest

from keras_mixprec.analysis.comparison import record as records

SCRIPT = pathlib.Path(compared_training.__file__)


def killed(path, *arguments):
    done = subprocess.run(
        [sys.executable, SCRIPT, path, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return {a["name"]: len(a["seeds"]) for a in records.read(path)["arms"]}


def measured(record):
    """What is no time."""
    return [
        [arm["name"], arm["status"], arm["notes"], arm["share_of_flops_16bit"]]
        + [(s["seed"], s["losses"], s["metric"]) for s in arm["seeds"]]
        for arm in record["arms"]
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "record.json"
    return compared_training.compare(path)


@pytest.mark.parametrize(
    ("policy", "seed", "done"),
    [
        ("float32", 0, {"float32": 0, "mixed_bfloat16": 0}),
        ("mixed_bfloat16", 1, {"float32": 1, "mixed_bfloat16": 1}),
    ],
)
def test_killed_at_any_stage_it_comes_to_the_same(
    whole, tmp_path, policy, seed, done
):
    path = tmp_path / "record.json"
    assert killed(path, policy, str(seed)) == done
    before = records.read(path)
    resumed = compared_training.compare(path)
    assert measured(resumed) == measured(whole)
    # What was finished was not done again, and its times are what they were.
    for arm, known in zip(resumed["arms"], before["arms"], strict=True):
        assert arm["seeds"][: len(known["seeds"])] == known["seeds"]


def test_a_process_each_comes_to_the_same(whole, tmp_path):
    path = tmp_path / "record.json"
    assert killed(path, "mixed_bfloat16", "0", "isolate") == dict.fromkeys(
        compared_training.POLICIES, 0
    )
    resumed = compared_training.compare(path, isolate=True)
    assert measured(resumed) == measured(whole)


def test_a_file_of_another_comparison_is_refused(whole, tmp_path):
    path = tmp_path / "record.json"
    records.write(path, {**whole, "steps": 9})
    with pytest.raises(ValueError, match="it differs in steps"):
        compared_training.compare(path)


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "record.json"
    path.write_text('{"format": ')
    with pytest.raises(ValueError, match="damaged or was cut short"):
        compared_training.compare(path)


def test_what_is_not_finite_survives_the_file(whole, tmp_path):
    path = tmp_path / "record.json"
    arm = {**whole["arms"][0], "step_seconds": [float("inf"), 1.0]}
    records.write(path, {**whole, "arms": [arm]})
    assert records.read(path)["arms"] == [arm]
