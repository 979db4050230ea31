"""A tuned training that may be killed, for `test_tuner_killed.py`.

    python tests/tuned_training.py FOLDER KILL

Five epochs of 20 steps. From the 25th on, numbers are so large that a layer
overflows. KILL is a step to be killed at, or `replace`: the second time that
the plan is written it is killed at the last moment.
"""

import json
import os
import pathlib
import signal
import sys

import keras
import numpy as np

import keras_mixprec as kmp

EPOCHS, STEPS, ROWS, FEATURES = 5, 20, 16, 8
LARGE_FROM = 25


def build():
    """Two layers that learn, `big` between them overflows at large inputs."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    wide = keras.initializers.RandomNormal(0, 50)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(16, "relu", name="first"),
            keras.layers.Dense(16, kernel_initializer=wide, name="big"),
            keras.layers.LayerNormalization(name="norm"),
            keras.layers.Dense(1, name="last", dtype="float32"),
        ]
    )
    rule = kmp.DynamicLossScale(2.0**8, growth_interval=15)
    model.compile(
        kmp.LossScaleOptimizer(keras.optimizers.Adam(1e-3), rule),
        loss="mse",
        jit_compile=keras.backend.backend() == "jax",
    )
    return model


def batches(first_step):
    """Yields the batches from a step on, always the same."""
    teacher = np.random.default_rng(0).normal(size=(FEATURES, 1))
    for step in range(first_step, EPOCHS * STEPS):
        x = np.random.default_rng(step + 1).normal(size=(ROWS, FEATURES))
        y = np.tanh(x @ teacher)
        x = x * (2000.0 if step >= LARGE_FROM else 1.0)
        yield x.astype("float32"), y.astype("float32")


def state_of(model, tuner):
    """All that has to outlive a kill."""
    optimizer, repairs = model.optimizer, tuner._tuning.repairs

    def size(variables):
        found = [np.asarray(v.numpy(), "float64") for v in variables]
        return float(sum(np.abs(values).sum() for values in found))

    return {
        "dtypes": {layer.name: layer.compute_dtype for layer in model.layers},
        "loss_scale": float(optimizer.loss_scale),
        "iterations": int(optimizer.iterations),
        "skipped": int(optimizer.skipped_steps),
        "slots": size(optimizer.variables),
        "weights": size(model.weights),
        "rebuilds": repairs.rebuilds,
        "tries": repairs.tries,
        "demotions": sorted(repairs.demotions),
    }


class Reader(keras.callbacks.Callback):
    """Notes the state as each epoch begins and at the end; may be killed.

    Attributes:
        states: Dict from epoch to state; -1 is the end.
        losses: Dict from epoch to loss.
    """

    def __init__(self, tuner, kill):
        super().__init__()
        self.tuner, self.kill = tuner, kill
        self.states, self.losses = {}, {}

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self.states[epoch] = state_of(self.model, self.tuner)

    def on_train_batch_begin(self, batch, logs=None):
        if self.kill == str(self.epoch * STEPS + batch):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch, logs=None):
        self.losses[epoch] = logs["loss"]

    def on_train_end(self, logs=None):
        self.states[-1] = state_of(self.model, self.tuner)


def kill_instead_of_replacing():
    """Dies when the plan is about to be replaced the second time."""
    replace, calls = os.replace, []

    def dying(source, target):
        calls.extend([target] if "plan.json" in str(target) else [])
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(source, target)

    os.replace = dying


def train(folder, kill=None, checkpoint=None):
    """Trains, from the backup if there is one; returns the `Reader`.

    Saves a checkpoint of each epoch, and goes on from one if it is given.
    """
    kept = folder / "backup"
    model, epoch = build(), 0
    if checkpoint:
        model = keras.models.load_model(checkpoint)
        epoch = int(model.optimizer.attempted_steps) // STEPS
    elif (metadata := kept / "training_metadata.json").exists():
        epoch = json.loads(metadata.read_text())["epoch"]
    tuner = kmp.PrecisionTuner(folder / "plan.json", verbose=0)
    reader = Reader(tuner, kill)
    saved = keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras")
    callbacks = [tuner, saved, reader]
    if not checkpoint:
        callbacks.insert(0, keras.callbacks.BackupAndRestore(kept))
    if kill == "replace":
        kill_instead_of_replacing()
    model.fit(
        batches(epoch * STEPS),
        initial_epoch=epoch if checkpoint else 0,
        epochs=EPOCHS,
        steps_per_epoch=STEPS,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    return reader


if __name__ == "__main__":
    train(pathlib.Path(sys.argv[1]), sys.argv[2])
