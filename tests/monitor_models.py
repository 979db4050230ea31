"""Runs whose losses, gradients and overflows are known beforehand.

One float16 weight of 1 that a learning rate of 0 keeps there: a batch of the
number `v` has the loss `v * v` and the gradient `2 * v * v`, both exact in
float16 for the numbers of `good`. A batch of `BAD` overflows in the forward
pass.
"""

import json
import os

import keras
import numpy as np
import pytest
from reporting_readers import read_events, read_tag

import keras_mixprec as kmp

BACKEND = keras.backend.backend()
BAD = 1e30
ROWS = 4

# TensorFlow op by op and under XLA; JAX always compiles, torch never does.
JITS = {
    "tensorflow": {False: "ops", True: "xla"},
    "jax": {True: "jit"},
    "torch": {False: "ops"},
}[BACKEND]
# Of two, that which `compile` does not choose by itself is among the slow
# tests.
each_jit = pytest.mark.parametrize(
    "jit",
    [
        pytest.param(jit, id=name, marks=marks)
        for (jit, name), marks in zip(
            reversed(JITS.items()), ([], [pytest.mark.slow]), strict=False
        )
    ],
)
OPTIMIZERS = {
    "ours": kmp.LossScaleOptimizer,
    "keras": keras.optimizers.LossScaleOptimizer,
    "auto": lambda inner: inner,
}
# Keras' own is the same when `compile` makes it, so that is tried only where
# it costs little.
each_optimizer = pytest.mark.parametrize(
    "wrap",
    [kmp.LossScaleOptimizer, keras.optimizers.LossScaleOptimizer],
    ids=["ours", "keras"],
)
not_torch = pytest.mark.skipif(BACKEND == "torch", reason="Keras has it not")


def good(count, start=1):
    """Returns numbers whose squares float16 holds, as it does the gradient."""
    return [k / 64 for k in range(start, start + count)]


def with_bad(values, *positions):
    """Returns `values` with an overflowing batch at each position."""
    return [BAD if i in positions else v for i, v in enumerate(values)]


def one_weight(wrap=kmp.LossScaleOptimizer, jit=False, **compiling):
    """Returns the compiled model."""
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
        ],
        name="model",
    )
    model.compile(
        wrap(keras.optimizers.SGD(0.0)),
        **{"loss": "mse", "jit_compile": jit} | compiling,
    )
    return model


def stream(values):
    """Yields a batch of each number, on over the epochs."""
    for value in values:
        yield np.full((ROWS, 1), value, "float32"), np.zeros((ROWS, 1))


def arrays(values):
    """Returns the batches of `values` as two arrays."""
    x, y = zip(*stream(values), strict=True)
    return np.concatenate(x), np.concatenate(y)


def fit(model, values, callbacks, epochs=1, **arguments):
    """Trains on one batch per number; returns the history."""
    return model.fit(
        stream(values),
        steps_per_epoch=len(values) // epochs,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
        **arguments,
    ).history


def monitor(log_dir, **arguments):
    """Returns a monitor that looks whenever it is asked to."""
    usual = {"verbose": 0, "max_overhead": 1.0, "probe_every": 0}
    return kmp.MixPrecMonitor(log_dir, **usual | arguments)


def scalars(log_dir, tag):
    """Dict step -> number of one curve, of the main group unless it says so."""
    tag = tag if tag.startswith("mixprec_") else f"mixprec/{tag}"
    points = read_tag(os.path.join(log_dir, "mixprec"), tag)
    return {step: float(value) for step, value in points.items()}


def tags(log_dir):
    """The tags of a log, those of the main group without its name."""
    return {
        value.tag.removeprefix("mixprec/")
        for event in read_events(os.path.join(log_dir, "mixprec"))
        for value in event.summary.value
    }


def told(log_dir, kind):
    """The events of one kind from `events.jsonl`."""
    with open(os.path.join(log_dir, "mixprec", "events.jsonl")) as lines:
        events = [json.loads(line) for line in lines]
    return [event for event in events if event["kind"] == kind]


def texts(log_dir, tag):
    """Dict step -> Markdown of one entry of the Text tab."""
    points = read_tag(os.path.join(log_dir, "mixprec"), f"mixprec/{tag}")
    return {step: value.item().decode() for step, value in points.items()}


class EveryStep(keras.callbacks.Callback):
    """Reads the scale after every batch."""

    def __init__(self, name="optimizer"):
        super().__init__()
        self.name, self.scales = name, []

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 0:
            self.on_train_batch_end(0)

    def on_train_batch_end(self, batch, logs=None):
        self.scales.append(float(getattr(self.model, self.name).loss_scale))


def assert_logged(log_dir, scales, optimizer=""):
    """Both forms in which the log has them; scales by step from 0 on."""
    steps = range(len(scales))
    points = scalars(log_dir, f"loss_scale/{optimizer}".rstrip("/"))
    assert max(points) == steps[-1]
    line = np.interp(steps, list(points), np.log2(list(points.values())))
    np.testing.assert_allclose(2.0**line, scales, rtol=1e-5)
    (run,) = kmp.load_report(log_dir).to_dict().values()
    courses = {course["optimizer"]: course for course in run["scale"]}
    course = courses[optimizer]
    places = np.searchsorted(course["steps"], steps, side="right") - 1
    rows = np.array(course["scale"])[places]
    np.testing.assert_allclose(rows, scales, rtol=1e-5)
