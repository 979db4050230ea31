"""Measures the cost of the callbacks in a run that diverges.

No precision helps such a run. Nearly every step is bad, and a diagnosis of each
step would find the same cause. A small network trains at a learning rate of
1e3. Whole fits take turns. Each ratio is the median over pairs with a plain
fit, in process time. "First" is the first fit, which also compiles the
diagnosis.

    python benchmarks/diverging_run.py
    OMP_NUM_THREADS=1 python benchmarks/diverging_run.py --setups torch jax
"""

import functools
import pathlib
import statistics
import sys
import tempfile
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.timing import (
    CLOCKS,
    argument_parser,
    interleave,
    print_table,
    ratio,
)

_BATCH = 64
_HEADER = ["plain fit, s", "first with the tuner", "tuner", "both"]


def measure(jit_compile, width, rounds, steps):
    """Returns the table cells of one width on the active backend."""
    warnings.simplefilter("ignore")  # The loss is not finite, as expected.
    arms = {
        kind: functools.partial(_fit, jit_compile, width, steps, kind)
        for kind in ("plain", "tuner", "both")
    }
    first = interleave(arms, 1, CLOCKS["cpu"])
    seconds = interleave(arms, rounds, CLOCKS["cpu"])
    return [
        f"{statistics.median(seconds['plain']):.2f}",
        f"{first['tuner'][0]:.2f} s",
        *(ratio(seconds[k], seconds["plain"], 1) for k in ("tuner", "both")),
    ]


def _fit(jit_compile, width, steps, kind):
    import keras
    import numpy as np

    import keras_mixprec

    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    x = random.normal(size=(_BATCH * steps, 16)).astype("float32")
    y = random.normal(size=(_BATCH * steps, 1)).astype("float32")
    hidden = [keras.layers.Dense(width, "relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((16,)), *hidden])
    model.add(keras.layers.Dense(1))
    keras_mixprec.apply_policy(model, "mixed_float16")
    optimizer = keras_mixprec.LossScaleOptimizer(keras.optimizers.SGD(1e3))
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    callbacks = []
    with tempfile.TemporaryDirectory() as folder:
        if kind != "plain":
            callbacks.append(keras_mixprec.PrecisionTuner(verbose=0))
        if kind == "both":
            callbacks.append(keras_mixprec.MixPrecMonitor(folder, verbose=0))
        model.fit(x, y, _BATCH, verbose=0, callbacks=callbacks)


def main():
    """Prints the table."""
    parser = argument_parser(__doc__, rounds=5, steps=1000)
    arguments = parser.parse_args()
    widths = {"5 Dense(64)": 64}
    print_table(
        _HEADER, arguments.setups, widths, measure,
        arguments.rounds, arguments.steps,
    )  # fmt: skip


if __name__ == "__main__":
    main()
