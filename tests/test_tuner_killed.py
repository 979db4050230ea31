"""A tuned training that is killed continues where it stopped.

    python tests/test_tuner_killed.py FOLDER KILL

Five epochs of 20 steps. From the 25th on, numbers are so large that a layer
overflows. KILL is the step at which the process is killed.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest
from tuner_models import BIG, CURE, GOOD, chain, stream, tuner

# Processes that start late on other backends.
pytestmark = pytest.mark.one_backend

EPOCHS, STEPS = 5, 20
VALUES = np.linspace(GOOD, 2 * GOOD, EPOCHS * STEPS)
VALUES[25:] *= BIG
# Rounding, where a whole run is compared with two parts of one.
CLOSE = {"rel": 1e-4}


def train(folder, kill=None, checkpoint=None):
    """Trains, from a checkpoint or the backup if there is one.

    Returns:
        The losses by epoch, and the state that must survive a kill, by
        epoch; -1 is the end.
    """
    model, epoch, states, losses = chain(rate=2.0**-38, scale=2.0**4), 0, {}, {}
    metadata = folder / "backup" / "training_metadata.json"
    if checkpoint:
        model = keras.models.load_model(checkpoint)
        epoch = int(model.optimizer.attempted_steps) // STEPS
    elif metadata.exists():
        epoch = json.loads(metadata.read_text())["epoch"]
    first, callback = epoch if checkpoint else 0, tuner(folder / "plan.json")

    def note(epoch=-1, logs=None):
        optimizer, repairs = model.optimizer, callback._repairs
        variables = [*model.weights, *optimizer.variables]
        states[epoch] = {
            "sizes": [float(np.abs(v.numpy()).sum()) for v in variables],
            "skipped": int(optimizer.skipped_steps),
            "dtypes": {x.name: x.compute_dtype for x in model.layers},
            "rebuilds": repairs.rebuilds,
            "tries": repairs.tries,
            "demotions": sorted(repairs.demotions),
        }

    def die(batch, logs):
        if kill == str(max(states) * STEPS + batch):
            os.kill(os.getpid(), signal.SIGKILL)

    reader = keras.callbacks.LambdaCallback(
        on_epoch_begin=note,
        on_train_batch_begin=die,
        on_epoch_end=lambda epoch, logs: losses.update({epoch: logs["loss"]}),
        on_train_end=lambda logs: note(),
    )
    saving = keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras")
    backup = keras.callbacks.BackupAndRestore(folder / "backup")
    model.fit(
        stream(VALUES[epoch * STEPS :]),
        initial_epoch=first,
        epochs=EPOCHS,
        steps_per_epoch=STEPS,
        shuffle=False,
        verbose=0,
        callbacks=[*[backup] * (not checkpoint), callback, saving, reader],
    )
    return losses, states


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns folder, losses and states of a run that was not killed."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, *train(folder)


def assert_same(found, expected, *names):
    for name in names or expected:
        value = expected[name]
        if name == "sizes":
            value = pytest.approx(value, **CLOSE)
        assert found[name] == value, name


@pytest.mark.slow
def test_killed_after_a_demotion_it_goes_on_from_a_backup(whole, tmp_path):
    command = [sys.executable, __file__, tmp_path, "70"]
    done = subprocess.run(command, stderr=subprocess.PIPE, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder, known, expected = whole
    losses, states = train(tmp_path)
    # The backup is of the end of the third epoch, the 60th step.
    assert min(states.keys() - {-1}) == 3
    assert states[3]["demotions"] == list(CURE)
    assert states[3]["dtypes"]["big"] == "float32"
    assert_same(states[3], expected[3])
    assert_same(states[-1], expected[-1])
    assert losses[4] == pytest.approx(known[4], **CLOSE)
    plans = [place / "plan.json" for place in (folder, tmp_path)]
    assert len({path.read_text() for path in plans}) == 1


def test_from_a_checkpoint_older_than_the_demotion(whole, tmp_path):
    # The demotion, of the second epoch, is in the plan, not in the checkpoint.
    folder, known, expected = whole
    shutil.copy(folder / "plan.json", tmp_path)
    losses, states = train(tmp_path, checkpoint=folder / "1.keras")
    changes = "dtypes", "rebuilds", "tries", "demotions"
    assert_same(states[1], expected[1], "sizes", "skipped")
    assert_same(states[1], expected[-1], *changes)
    assert_same(states[-1], expected[-1], *changes)
    # Known faults do not return, but the loss scale may be too high once.
    assert states[-1]["skipped"] <= 2 <= expected[-1]["skipped"]
    assert losses[4] <= 1.02 * known[4]


if __name__ == "__main__":
    train(pathlib.Path(sys.argv[1]), sys.argv[2])
