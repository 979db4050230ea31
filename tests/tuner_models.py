"""Models whose repair is known beforehand."""

import keras
import numpy as np
from monitor_models import BACKEND, ROWS

import keras_mixprec as kmp


def chain(
    jit=BACKEND == "jax", wrap=kmp.LossScaleOptimizer, rate=0.0, scale=1.0
):
    """`first`, which multiplies by 1, `big` by 300, `last` by 1/256.

    A batch of the number `v` overflows in `big`, and then in what would cast
    its output, from `v = 219` on. With a rate of 0 nothing learns. At a loss
    scale of 1 no gradient overflows.
    """
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")

    def times(factor, name):
        start = keras.initializers.Constant(factor)
        return keras.layers.Dense(
            1, use_bias=False, kernel_initializer=start, name=name
        )

    model = keras.Sequential(
        [
            keras.Input((1,)),
            times(1.0, "first"),
            times(300.0, "big"),
            times(1 / 256, "last"),
        ],
        name="model",
    )
    model.compile(
        wrap(keras.optimizers.SGD(rate, momentum=0.9), initial_scale=scale),
        loss="mae",
        jit_compile=jit,
    )
    return model


class Squares(keras.layers.Layer):
    """Overflows float16 where its input exceeds 255."""

    def call(self, x):
        return keras.ops.square(x)


def regression(rate, **of_weights):
    """Its update on an outlier is 1e11 times as large as on other batches."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential(
        [
            keras.Input((1,)),
            Squares(name="squares"),
            keras.layers.Dense(1, **of_weights),
        ]
    )
    model.compile(
        kmp.LossScaleOptimizer(keras.optimizers.SGD(rate)),
        loss="mse",
        jit_compile=BACKEND == "jax",
    )
    return model


# What a batch of 1000 needs in float32.
CURE = {"big": "float32", "last": "float32"}


def stream(values):
    """Yields a batch of each number."""
    for value in values:
        yield np.full((ROWS, 1), value, "float32"), np.zeros((ROWS, 1))


def fit(model, values, *callbacks, epochs=1, **arguments):
    """Trains on one batch per number; returns the history."""
    return model.fit(
        stream(list(values) * epochs),
        steps_per_epoch=len(values),
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
        **arguments,
    ).history


def tuner(plan=None, **arguments):
    """Returns a tuner that says nothing and looks often."""
    return kmp.PrecisionTuner(plan, **{"verbose": 0} | arguments)


def demoted(model):
    """Dict from path to policy of the layers not in mixed_float16."""
    plan = kmp.PrecisionPlan.from_model(model)
    return {p: q for p, q in plan.items() if q != "mixed_float16"}


def done(callback, kind=None):
    """The steps of a tuner's history, of one kind."""
    return [e["step"] for e in callback.history if kind in (None, e["kind"])]
