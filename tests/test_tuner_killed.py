"""A tuned training that is killed goes on where it was."""

import json
import os
import signal
import subprocess
import sys

import pytest
from monitor_models import BACKEND

import keras_mixprec as kmp

SCRIPT = os.path.join(os.path.dirname(__file__), "tuned_training.py")

# Rounding, where a whole run is compared with two parts of one.
CLOSE = {"rel": 1e-4}


def train(folder, start, kill=None, dies=False):
    """Trains in a process of its own; returns what it wrote at the end."""
    arguments = [str(folder), start] + ([kill] if kill else [])
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    if dies:
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not (folder / "ended.json").exists()
        return None
    assert done.returncode == 0, done.stderr
    return state(folder, "ended")


def state(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nobody killed."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, "backup")
    return folder


def same(found, expected, *names):
    for name in names:
        value = expected[name]
        if isinstance(value, float):
            value = pytest.approx(value, **CLOSE)
        assert found[name] == value, name


def test_killed_after_a_demotion_it_goes_on_from_a_backup(whole, tmp_path):
    train(tmp_path, "backup", "70", dies=True)
    ended = train(tmp_path, "backup")
    # The backup is of the end of the third epoch, the 60th step.
    begun, known = state(tmp_path, "begun"), state(whole, "begin-3")
    # `norm` does too little to be cast to and from float16 between two others.
    assert begun["demotions"] == ["big", "norm"]
    assert begun["dtypes"]["big"] == "float32"
    assert begun["loss_scale"] == known["loss_scale"] != 2.0**8
    same(begun, known, "dtypes", "rebuilds", "tries", "demotions")
    same(begun, known, "iterations", "skipped", "slots", "weights")
    known = state(whole, "ended")
    last = str(max(map(int, known["losses"])))
    print(f"\n{BACKEND}: loss", known["losses"][last], ended["losses"][last])
    assert ended["losses"][last] == pytest.approx(
        known["losses"][last], **CLOSE
    )
    same(ended, known, "dtypes", "rebuilds", "tries", "demotions")
    same(ended, known, "loss_scale", "iterations", "skipped", "weights")
    plans = [folder / "plan.json" for folder in (whole, tmp_path)]
    assert len({path.read_text() for path in plans}) == 1


@pytest.mark.slow
def test_from_a_checkpoint_older_than_the_demotion(whole, tmp_path):
    # The demotion, of the second epoch, is in the plan, not in the checkpoint.
    train(tmp_path, "new", "39", dies=True)
    ended = train(tmp_path, "checkpoint")
    begun, known = state(tmp_path, "begun"), state(whole, "begin-1")
    same(begun, known, "loss_scale", "iterations", "slots", "weights")
    known = state(whole, "ended")
    same(begun, known, "dtypes", "rebuilds", "tries", "demotions")
    same(ended, known, "dtypes", "rebuilds", "tries", "demotions")
    # What is known fails no more; the loss scale may still be too high once.
    assert known["skipped"] >= 2
    assert ended["skipped"] <= 2
    last = str(max(map(int, known["losses"])))
    print(f"\n{BACKEND}: loss", known["losses"][last], ended["losses"][last])
    assert ended["losses"][last] <= 1.02 * known["losses"][last]


def test_killed_while_the_plan_is_written_the_old_one_stays(tmp_path):
    train(tmp_path, "new", "replace", dies=True)
    assert (tmp_path / "begin-1.json").exists()
    # That of before the first step.
    plan = kmp.PrecisionPlan.load(tmp_path / "plan.json")
    assert plan["big"] == "mixed_float16"
    assert plan.reasons == {}
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["tuner"]["rebuilds"] == 0
    # The new one was there, but not in its place.
    (unfinished,) = tmp_path.glob("plan.json*.tmp")
    os.utime(unfinished, (0, 0))
    plan.save(tmp_path / "plan.json")
    assert not unfinished.exists()
