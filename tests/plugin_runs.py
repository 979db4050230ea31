"""Logged runs for tests of the page and the tab: trained ones, written ones."""

from functools import partial
from operator import itemgetter

import keras
import numpy as np
from canonical_logs import layer
from keras import layers

import keras_mixprec as kmp
from keras_mixprec.metrics import AUDITED, PROBED
from keras_mixprec.reporting import schema
from keras_mixprec.reporting.run_log import RunLog


class Overflowing(layers.Layer):
    """A layer that overflows float16 inside, but not in the output."""

    def call(self, x):
        return keras.ops.square(x * 300.0) / 300.0 / 300.0


def tiny_transformer():
    """A residual model with one block that float16 cannot bear."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    x = layers.Dense(16, name="embed")(inputs)
    for block in range(3):
        y = layers.LayerNormalization(name=f"norm_{block}")(x)
        y = layers.Dense(32, activation="relu", name=f"in_{block}")(y)
        if block == 1:
            y = Overflowing(name="overflowing")(y)
        y = layers.Dense(16, name=f"out_{block}")(y)
        x = layers.Add(name=f"add_{block}")([x, y])
    return keras.Model(inputs, layers.Dense(3, name="logits")(x))


def train(
    log_dir,
    *callbacks,
    epochs=2,
    policy="mixed_float16",
    build=tiny_transformer,
    scaled=True,
):
    """Trains in 16 bits and logs every step; returns the monitor."""
    model = build()
    kmp.apply_policy(model, policy)
    optimizer = keras.optimizers.Adam(1e-3)
    model.compile(
        kmp.LossScaleOptimizer(optimizer) if scaled else optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    monitor = kmp.MixPrecMonitor(
        log_dir, update_freq=1, probe_every=1, max_overhead=1, verbose=0
    )
    random = np.random.default_rng(0)
    x = random.normal(size=(160, 8)).astype("float32")
    y = random.integers(0, 3, 160)
    callbacks = [monitor, *callbacks]
    model.fit(x, y, 8, epochs=epochs, verbose=0, callbacks=callbacks)
    return monitor


def write(
    log_dir,
    rows,
    *events,
    heat=None,
    bins=None,
    loss=(),
    scale=None,
    tables=None,
):
    """Writes the log of an invented run.

    Args:
        log_dir: Path.
        rows: List of rows of the table of layers, or of their names.
        *events: Dicts with their step.
        heat: Dict step -> dict metric -> list of numbers, one for each layer.
        bins: Dict `(step, part, layer)` -> rows of a histogram.
        loss: Pairs of step and loss.
        scale: Dict optimizer -> rows of its loss scale.
        tables: Dict step -> the table of layers from then on.
    """
    rows = [x if isinstance(x, dict) else layer(x) for x in rows]
    paths = [row["path"] for row in rows]
    with RunLog(log_dir) as log:
        acts = [(0, log.layers, rows)]
        acts += [(event["step"], log.event, event) for event in events]
        for step, measured in (heat or {}).items():
            worst = {name: (PROBED | AUDITED)[name] for name in measured}
            table = np.array([*measured.values()], float).T
            family = schema.HEAT if {*worst} <= {*PROBED} else schema.ERRORS
            acts.append((step, log.heat, table, paths, worst, family))
        for (step, part, path), counts in (bins or {}).items():
            acts.append((step, log.histograms, [(part, path, counts)]))
        for row in loss:
            acts.append((row[0], log.rows, schema.LOSS, [row]))
        for name, lines in (scale or {}).items():
            rows = partial(log.rows, optimizer=name)
            acts.append((lines[-1][0], rows, schema.SCALE, lines))
        acts += [(step, log.layers, x) for step, x in (tables or {}).items()]
        for step, act, *arguments in sorted(acts, key=itemgetter(0)):
            act(step, *arguments)


def verdict(path, step=1, kind="forward_overflow", **more):
    """The event of a finding."""
    advice = f"Let it compute in float32: PrecisionRule({path!r})"
    about = {"kind": "verdict", "verdict": kind, "layer": path, "step": step}
    about |= {"direction": "forward", "advice": advice, "numbers": {}}
    return about | more
