"""A tuned training in a process of its own, for `test_tuner_killed.py`.

    python tests/tuned_training.py FOLDER START [KILL]

Five epochs of 20 steps. From the 25th on, numbers are so large that a layer
overflows. START is how to go on: `backup` by `BackupAndRestore`, which begins
again if there is no backup; `checkpoint` by the last `ModelCheckpoint`; or
`new`. When each epoch begins and at the end, the state is written to a file in
FOLDER: `begin-0.json` and so on, the first of them as `begun.json` as well,
and `ended.json`. KILL is a step to be killed at, or `replace`: the second time
that the plan is written it is killed at the last moment.
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
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(16, "relu", name="first"),
            keras.layers.Dense(
                16,
                kernel_initializer=keras.initializers.RandomNormal(0, 50),
                name="big",
            ),
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


def state_of(model, tuner, losses):
    """All that has to outlive a kill."""
    optimizer = model.optimizer
    repairs = tuner._tuning.repairs
    return {
        "dtypes": {layer.name: layer.compute_dtype for layer in model.layers},
        "loss_scale": float(optimizer.loss_scale),
        "iterations": int(optimizer.iterations),
        "skipped": int(optimizer.skipped_steps),
        "slots": float(
            sum(
                np.abs(np.asarray(v.numpy(), "float64")).sum()
                for v in optimizer.variables
            )
        ),
        "weights": float(
            sum(np.abs(v.numpy()).sum(dtype="float64") for v in model.weights)
        ),
        "rebuilds": repairs.rebuilds,
        "tries": repairs.tries,
        "demotions": sorted(repairs.demotions),
        "losses": losses,
    }


class StepReader(keras.callbacks.Callback):
    """Writes the state when the first epoch begins, and at each end."""

    def __init__(self, folder, tuner, kill):
        super().__init__()
        self.folder, self.tuner, self.kill = folder, tuner, kill
        self.step, self.begun, self.losses = None, False, {}

    def on_epoch_begin(self, epoch, logs=None):
        """Writes it, whatever the backup has made of it."""
        self.step = epoch * STEPS
        self.write(f"begin-{epoch}")
        if not self.begun:
            self.begun = True
            self.write("begun")

    def on_train_batch_begin(self, batch, logs=None):
        """Is killed, if it is time to."""
        if self.kill == str(self.step + batch):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch, logs=None):
        """Notes the loss."""
        self.losses[str(epoch)] = logs["loss"]

    def on_train_end(self, logs=None):
        """Writes it."""
        self.write("ended")

    def write(self, name):
        """Writes the state to a file of this name."""
        state = state_of(self.model, self.tuner, self.losses)
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(state))


def kill_instead_of_replacing():
    """Dies when the plan is about to be replaced the second time."""
    replace, calls = os.replace, []

    def dying(source, target):
        calls.extend([target] if "plan.json" in str(target) else [])
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(source, target)

    os.replace = dying


def main(folder, start, kill=None):
    """Trains."""
    folder = pathlib.Path(folder)
    saved = folder / "checkpoint.keras"
    epoch = 0
    if start == "checkpoint":
        # Keras can load what has been imported only.
        assert kmp.LossScaleOptimizer
        model = keras.models.load_model(saved)
        epoch = int(model.optimizer.attempted_steps) // STEPS
    else:
        model = build()
    tuner = kmp.PrecisionTuner(folder / "plan.json", verbose=0)
    watch = StepReader(folder, tuner, kill)
    callbacks = [tuner, keras.callbacks.ModelCheckpoint(saved), watch]
    if start == "backup":
        backup = keras.callbacks.BackupAndRestore(folder / "backup")
        callbacks.insert(0, backup)
        kept = folder / "backup" / "training_metadata.json"
        if kept.exists():
            epoch = json.loads(kept.read_text())["epoch"]
    if kill == "replace":
        kill_instead_of_replacing()
    model.fit(
        batches(epoch * STEPS),
        initial_epoch=epoch if start == "checkpoint" else 0,
        epochs=EPOCHS,
        steps_per_epoch=STEPS,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
