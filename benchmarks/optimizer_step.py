"""What loss scaling adds to a train step.

Three arms train the same mixed_float16 model with Adam: without loss scaling,
with Keras' `LossScaleOptimizer`, and with ours, all counters on. Short rounds
of each alternate in one process per backend, so that whatever else the
machine does meets all three alike. A ratio is the median, over the rounds, of
a round's time to the unscaled arm's in the same round; the ratio of the
fastest rounds stands beside it in brackets.

    python benchmarks/optimizer_step.py
    python benchmarks/optimizer_step.py --setups jax torch --rounds 41
"""

import argparse
import functools
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.timing import (
    in_subprocess,
    installed_backends,
    interleave,
    ratio,
    surroundings,
    table,
)

# Name: backend and `jit_compile`.
SETUPS = {
    "tensorflow": ("tensorflow", False),
    "tensorflow XLA": ("tensorflow", True),
    "jax": ("jax", True),
    "torch": ("torch", False),
}

# Name: number of layers and their width.
SIZES = {"small": (100, 64), "large": (6, 1024)}

HEADER = ["backend", "model", "no scaling, ms", "Keras", "ours"]


def measure(jit_compile, size, batch, rounds, steps):
    """Returns the table cells of one model on the active backend."""
    runs = {
        arm: _prepare(arm, jit_compile, size, batch)
        for arm in ("none", "keras", "ours")
    }
    arms = {arm: functools.partial(run, steps) for arm, run in runs.items()}
    interleave(arms, 1)
    seconds = interleave(arms, rounds)
    return [
        f"{1e3 * statistics.median(seconds['none']) / steps:.2f}",
        ratio(seconds["keras"], seconds["none"]),
        ratio(seconds["ours"], seconds["none"]),
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
    run = stepper(model, x, y)
    if int(model.optimizer.iterations) != 2:
        raise RuntimeError("A skipped step is no fair step to time.")
    return run


def _optimizer(arm):
    import keras

    import keras_mixprec

    adam = keras.optimizers.Adam(1e-4)
    if arm == "keras":
        return keras.optimizers.LossScaleOptimizer(adam)
    return keras_mixprec.LossScaleOptimizer(adam) if arm == "ours" else adam


def main():
    arguments = _parse()
    rows = []
    for setup in arguments.setups:
        backend, jit_compile = SETUPS[setup]
        for name in arguments.sizes:
            layers, width = SIZES[name]
            cells = in_subprocess(
                backend,
                measure,
                jit_compile,
                SIZES[name],
                arguments.batch,
                arguments.rounds,
                arguments.steps,
            )
            rows.append([setup, f"{layers} Dense({width})", *cells])
            print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    print(table(HEADER, rows))
    print()
    print(surroundings(list({SETUPS[s][0]: None for s in arguments.setups})))


def _parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    installed = installed_backends()
    setups = [s for s, (backend, _) in SETUPS.items() if backend in installed]
    parser.add_argument("--setups", nargs="+", choices=setups, default=setups)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=10, help="per round")
    parser.add_argument("--batch", type=int, default=128)
    return parser.parse_args()


if __name__ == "__main__":
    main()
