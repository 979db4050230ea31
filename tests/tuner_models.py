"""Models whose repair is known beforehand."""

import keras
from monitor_models import BACKEND, Squares, stream

import keras_mixprec as kmp

# Inputs of `chain`: `big` can compute with GOOD in float16, but not with BIG.
GOOD, BIG = 1.0, 1000.0
# The layers that a batch of BIG needs in float32.
CURE = {"big": "float32", "last": "float32"}


def times(factor, name=None, **arguments):
    """A layer that multiplies by a number."""
    start = keras.initializers.Constant(factor)
    return keras.layers.Dense(
        1, use_bias=False, kernel_initializer=start, name=name, **arguments
    )


def compiled(
    model,
    rate=0.0,
    jit=None,
    wrap=kmp.LossScaleOptimizer,
    loss="mae",
    momentum=0.9,
    scale=1.0,
    **arguments,
):
    """Compiles a model, without tracing unless `jit` matters.

    With a loss scale of 1 no gradient overflows.
    """
    optimizer = keras.optimizers.SGD(rate, momentum=momentum)
    eagerly = jit is None and BACKEND == "tensorflow"
    model.compile(
        wrap(optimizer, **{} if scale is None else {"initial_scale": scale}),
        loss=loss,
        jit_compile=BACKEND == "jax" if jit is None else jit,
        **{"run_eagerly": eagerly} | arguments,
    )
    return model


def sequential(layers, features=1, **arguments):
    """A compiled model in mixed_float16 of what a function returns."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    layers = [keras.Input((features,)), *layers()]
    return compiled(keras.Sequential(layers, name="model"), **arguments)


def chain(jit=None, **arguments):
    """`first`, which multiplies by 1, `big` by 300, `last` by 1/256.

    A batch of the number `v` overflows in `big`, and then in what would cast
    its output, from `v = 219` on. With a rate of 0 nothing learns.
    """
    factors = {"first": 1.0, "big": 300.0, "last": 1 / 256}
    return sequential(
        lambda: [times(factor, name) for name, factor in factors.items()],
        jit=jit,
        **arguments,
    )


def regression(rate, jit=None, **of_weights):
    """Its update on an outlier is 1e11 times as large as on other batches."""
    return sequential(
        lambda: [Squares(name="squares"), keras.layers.Dense(1, **of_weights)],
        rate=rate,
        jit=jit,
        loss="mse",
        momentum=0.0,
        scale=None,
    )


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


def tuned(values, *callbacks, model=None, epochs=1, **arguments):
    """Trains a model, or `chain`, with a tuner; returns both."""
    model, callback = model or chain(), tuner(**arguments)
    fit(model, values, callback, *callbacks, epochs=epochs)
    return model, callback


def demoted(model):
    """Dict from path to policy of the layers not in mixed_float16."""
    plan = kmp.PrecisionPlan.from_model(model)
    return {p: q for p, q in plan.items() if q != "mixed_float16"}


def entries(callback, kind):
    """Returns the entries of one kind in a tuner's history."""
    return [entry for entry in callback.history if entry["kind"] == kind]


def done(callback):
    """Returns a tuner's history as pairs of kind and step."""
    return [(entry["kind"], entry["step"]) for entry in callback.history]
