"""Runs with known losses, gradients and overflows.

`one_weight` has a float16 weight of 1 and a learning rate of 0. A batch of the
number `v` has the loss `v * v` and the gradient `2 * v * v`. Both are exact in
float16 for the numbers of `good`. A batch of `BAD` overflows in the forward
pass.
"""

import inspect
import json
import os

import keras
import numpy as np
import pytest
from optimizer_models import BACKEND
from reporting_readers import read_events, read_tag

import keras_mixprec as kmp

BAD = 1e30
ROWS = 4

JITS = {"tensorflow": [True, False], "jax": [True], "torch": [False]}[BACKEND]
# Op by op on TensorFlow; JAX always compiles, torch never does.
JIT = JITS[-1]
# Marks for files whose tests mostly run on one backend.
one_backend = pytest.mark.one_backend
every_backend = pytest.mark.every_backend
# By default the tests compile with XLA, like `compile`.
each_jit = pytest.mark.parametrize(
    "jit",
    [
        pytest.param(JITS[0], marks=every_backend),
        *(pytest.param(jit, marks=pytest.mark.slow) for jit in JITS[1:]),
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
only_tensorflow, only_jax, only_torch = (
    pytest.mark.skipif(name != BACKEND, reason=f"a feature of {name}")
    for name in ("tensorflow", "jax", "torch")
)
not_torch, not_jax = (
    pytest.mark.skipif(name == BACKEND, reason=f"{name} lacks it")
    for name in ("torch", "jax")
)


def good(count, start=1):
    """Returns numbers whose squares float16 holds, as it does the gradient."""
    return [k / 64 for k in range(start, start + count)]


def with_bad(values, *positions):
    """Returns `values` with an overflowing batch at each position."""
    return [BAD if i in positions else v for i, v in enumerate(values)]


def compiling(jit):
    """The arguments of `compile`; without `jit` TensorFlow traces nothing."""
    if jit is None and BACKEND == "tensorflow":
        return {"run_eagerly": True, "jit_compile": False}
    return {"jit_compile": JIT if jit is None else jit}


def one_weight(wrap=kmp.LossScaleOptimizer, jit=None, **arguments):
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
        **{"loss": "mse"} | compiling(jit) | arguments,
    )
    return model


def dense(
    *middle,
    inputs=4,
    outputs=1,
    optimizer="sgd",
    loss="mse",
    policy="mixed_float16",
    rules=None,
    scale=None,
    kind=keras.Sequential,
    jit=None,
    **arguments,
):
    """Returns a model of the layers in the middle and `head`, a Dense."""
    head = keras.layers.Dense(outputs, name="head")
    model = kind([keras.Input((inputs,)), *middle, head])
    kmp.apply_policy(model, policy, rules=rules)
    if policy == "mixed_float16":
        optimizer = kmp.LossScaleOptimizer(optimizer, initial_scale=scale)
    model.compile(optimizer, loss, **compiling(jit) | arguments)
    return model


class Squares(keras.layers.Layer):
    """Overflows float16 if an input exceeds 255."""

    def call(self, x):
        return keras.ops.square(x)


class OwnStep(keras.Sequential):
    """Overrides `train_step` as users do."""

    def train_step(self, *args):
        return super().train_step(*args)


def stream(values):
    """Yields a batch of each number, on over the epochs."""
    for value in values:
        yield np.full((ROWS, 1), value, "float32"), np.zeros((ROWS, 1))


def arrays(values):
    """Returns the batches of `values` as two arrays."""
    x, y = zip(*stream(values), strict=True)
    return np.concatenate(x), np.concatenate(y)


def fit(model, data, callbacks, epochs=1, **arguments):
    """Trains on a list of numbers, one per batch, or on any data for Keras."""
    if isinstance(data, list):
        arguments["steps_per_epoch"] = len(data) // epochs
        data = stream(data)
    elif isinstance(data, tuple):
        arguments = {"batch_size": ROWS} | arguments
    arguments = {"shuffle": False, "verbose": 0} | arguments
    data = data if isinstance(data, tuple) else (data,)
    arguments |= {"epochs": epochs, "callbacks": callbacks}
    return model.fit(*data, **arguments).history


def monitor(log_dir, **arguments):
    """Returns a monitor that looks whenever it is asked to."""
    usual = {"verbose": 0, "max_overhead": 1.0, "probe_every": 0}
    return kmp.MixPrecMonitor(log_dir, **usual | arguments)


# The defaults of the monitor.
DEFAULTS = {"max_overhead": 0.02, "probe_every": 100}


class Run:
    """The model, monitor, history and log of a watched `fit`."""

    def __init__(self, folder, model, watcher, history):
        self.folder, self.model = folder, model
        self.watcher, self.history = watcher, history
        self.summary, self.verdicts = watcher.summary, watcher.verdicts

    def told(self, kind=None):
        return told(self.folder, kind)

    def scalars(self, tag):
        return scalars(self.folder, tag)

    def texts(self, tag):
        return texts(self.folder, tag)

    def tags(self):
        return tags(self.folder)

    def overview(self):
        return overview(self.folder)


def watched(folder, data, model=None, *others, **arguments):
    """Trains a model with a monitor and other callbacks.

    Args:
        folder: For the log.
        data: As in `fit`.
        model: Defaults to `one_weight()`.
        *others: Callbacks.
        **arguments: Of the monitor and of `fit`.
    """
    names = inspect.signature(kmp.MixPrecMonitor).parameters.keys() & arguments
    watcher = monitor(folder, **{n: arguments.pop(n) for n in names})
    model = model or one_weight()
    history = fit(model, data, [watcher, *others], **arguments)
    return Run(folder, model, watcher, history)


def scalars(log_dir, tag):
    """Returns a curve as a dict step -> number."""
    tag = tag if tag.startswith("mixprec_") else f"mixprec/{tag}"
    points = read_tag(os.path.join(log_dir, "mixprec"), tag)
    return {step: float(value) for step, value in points.items()}


def tags(log_dir):
    """Returns the tags of a log, without the name of the main group."""
    return {
        value.tag.removeprefix("mixprec/")
        for event in read_events(os.path.join(log_dir, "mixprec"))
        for value in event.summary.value
    }


def told(log_dir, kind=None):
    """The events in `events.jsonl`, of one kind if that is given."""
    with open(os.path.join(log_dir, "mixprec", "events.jsonl")) as lines:
        events = [json.loads(line) for line in lines]
    return [event for event in events if kind in (None, event["kind"])]


def texts(log_dir, tag):
    """Dict step -> Markdown of one entry of the Text tab."""
    points = read_tag(os.path.join(log_dir, "mixprec"), f"mixprec/{tag}")
    return {step: value.item().decode() for step, value in points.items()}


def overview(log_dir):
    """Returns the only run in the report of a folder."""
    (run,) = kmp.load_report(log_dir).to_dict().values()
    return run


def prose(text):
    """A printed text without its line breaks."""
    return " ".join(str(text).split())


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
    """Checks the table and the curve of the loss scale, from step 0."""
    steps = range(len(scales))
    points = scalars(log_dir, f"loss_scale/{optimizer}".rstrip("/"))
    assert max(points) == steps[-1]
    line = np.interp(steps, list(points), np.log2(list(points.values())))
    np.testing.assert_allclose(2.0**line, scales, rtol=1e-5)
    courses = {c["optimizer"]: c for c in overview(log_dir)["scale"]}
    course = courses[optimizer]
    places = np.searchsorted(course["steps"], steps, side="right") - 1
    rows = np.array(course["scale"])[places]
    np.testing.assert_allclose(rows, scales, rtol=1e-5)
