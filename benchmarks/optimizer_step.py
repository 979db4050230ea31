"""Measures the time that loss scaling adds to a train step.

Three arms train the same mixed_float16 model with Adam: without loss scaling,
with Keras' `LossScaleOptimizer`, and with ours. The fourth arm, the floor, is
our optimizer reading one number of each gradient instead of all numbers. The
floor is the minimum cost of any optimizer that can skip a step, because no
update may start before the last gradient is known.

Short rounds take turns in one process per backend. A ratio is the time of an
arm divided by the time without scaling in the same round. In the last column,
the divisor is the time of Keras' optimizer. The table has the median over the
rounds, and the ratio of the fastest rounds in brackets.

    python benchmarks/optimizer_step.py
    python benchmarks/optimizer_step.py --setups jax torch --rounds 101
"""

import contextlib
import functools
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.timing import argument_parser, interleave, print_table, ratio

# The number of layers and their width, by the name of the model.
SIZES = {"100 Dense(64)": (100, 64), "6 Dense(1024)": (6, 1024)}
HEADER = ["no scaling, ms", "Keras", "ours", "floor", "ours : Keras"]


def measure(jit_compile, model, rounds, steps):
    """Returns the table cells of one model on the active backend."""
    size, batch = model
    runs = {
        arm: _prepare(arm, jit_compile, size, batch)
        for arm in ("none", "keras", "ours", "floor")
    }
    arms = {arm: functools.partial(run, steps) for arm, run in runs.items()}
    interleave(arms, 1)
    seconds = interleave(arms, rounds)
    return [
        f"{1e3 * statistics.median(seconds['none']) / steps:.2f}",
        ratio(seconds["keras"], seconds["none"]),
        ratio(seconds["ours"], seconds["none"]),
        ratio(seconds["floor"], seconds["none"]),
        ratio(seconds["ours"], seconds["keras"]),
    ]


def _prepare(arm, jit_compile, size, batch):
    import keras
    import numpy as np

    from benchmarks.train_steps import stepper

    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    layers, width = size
    model = keras.Sequential([keras.Input((width,))])
    for _ in range(layers):
        model.add(keras.layers.Dense(width, "relu", True, "he_normal"))
    model.compile(
        _optimizer(arm),
        loss="mse",
        jit_compile=jit_compile,
        auto_scale_loss=False,
    )
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, batch, width)).astype("float32")
    with _one_number_each() if arm == "floor" else contextlib.nullcontext():
        run = stepper(model, x, y)
    if int(model.optimizer.iterations) != 2:
        raise RuntimeError("A skipped step is not a fair step to time.")
    return run


@contextlib.contextmanager
def _one_number_each():
    """Makes steps that are traced inside it read one number per gradient."""
    from keras import ops

    from keras_mixprec.backend import active

    backend = active.step()
    original = backend.gradient_norms
    backend.gradient_norms = lambda gradients: ops.abs(
        ops.stack([ops.reshape(g, [-1])[0] for g in gradients])
    )
    try:
        yield
    finally:
        backend.gradient_norms = original


def _optimizer(arm):
    import keras

    import keras_mixprec

    adam = keras.optimizers.Adam(1e-4)
    if arm == "keras":
        return keras.optimizers.LossScaleOptimizer(adam)
    if arm == "none":
        return adam
    return keras_mixprec.LossScaleOptimizer(adam)


def main():
    parser = argument_parser(__doc__, rounds=51, steps=4)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 128])
    arguments = parser.parse_args()
    print_table(
        HEADER,
        arguments.setups,
        {
            f"{name}, batch {batch}": (SIZES[name], batch)
            for name in arguments.models
            for batch in arguments.batches
        },
        measure,
        arguments.rounds,
        arguments.steps,
    )


if __name__ == "__main__":
    main()
