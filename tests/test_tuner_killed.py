"""A tuned training that is killed goes on where it was."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import tuned_training
from tuned_training import train

import keras_mixprec as kmp

# Processes that start late on other backends.
pytestmark = pytest.mark.one_backend

# Rounding, where a whole run is compared with two parts of one.
CLOSE = {"rel": 1e-4}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Folders of runs that were killed, by when."""
    folders = {
        kill: tmp_path_factory.mktemp(kill) for kill in ("70", "replace")
    }
    processes = [
        subprocess.Popen(
            [sys.executable, tuned_training.__file__, str(folder), kill],
            stderr=subprocess.PIPE,
            text=True,
        )
        for kill, folder in folders.items()
    ]
    for process in processes:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == -signal.SIGKILL, errors
    return folders


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nobody killed, and what it read."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder)


def assert_same(found, expected, names=None):
    for name in names or expected:
        value = expected[name]
        if isinstance(value, float):
            value = pytest.approx(value, **CLOSE)
        assert found[name] == value, name


def test_killed_after_a_demotion_it_goes_on_from_a_backup(whole, killed):
    folder, known = whole
    ended = train(killed["70"])
    # The backup is of the end of the third epoch, the 60th step.
    begun = ended.states[3]
    # `norm` does too little to be cast to and from float16 between two others.
    assert begun["demotions"] == ["big", "norm"]
    assert begun["dtypes"]["big"] == "float32"
    assert begun["loss_scale"] != 2.0**8
    assert_same(begun, known.states[3])
    assert_same(ended.states[-1], known.states[-1])
    assert ended.losses[4] == pytest.approx(known.losses[4], **CLOSE)
    plans = [place / "plan.json" for place in (folder, killed["70"])]
    assert len({path.read_text() for path in plans}) == 1


def test_from_a_checkpoint_older_than_the_demotion(whole, tmp_path):
    # The demotion, of the second epoch, is in the plan, not in the checkpoint.
    folder, known = whole
    shutil.copy(folder / "plan.json", tmp_path)
    found = train(tmp_path, checkpoint=folder / "1.keras")
    begun, ended = found.states[1], found.states[-1]
    changes = {"dtypes", "rebuilds", "tries", "demotions"}
    assert_same(begun, known.states[1], known.states[1].keys() - changes)
    assert_same(begun, known.states[-1], changes)
    assert_same(ended, known.states[-1], changes)
    # What is known fails no more; the loss scale may still be too high once.
    assert ended["skipped"] <= 2 <= known.states[-1]["skipped"]
    assert found.losses[4] <= 1.02 * known.losses[4]


def test_killed_while_the_plan_is_written_the_old_one_stays(killed):
    path = killed["replace"] / "plan.json"
    # That of before the first step.
    plan = kmp.PrecisionPlan.load(path)
    assert plan["big"] == "mixed_float16"
    assert plan.reasons == {}
    assert json.loads(path.read_text())["tuner"]["rebuilds"] == 0
    # The new one was there, but not in its place.
    (unfinished,) = path.parent.glob("plan.json*.tmp")
    os.utime(unfinished, (0, 0))
    plan.save(path)
    assert not unfinished.exists()
