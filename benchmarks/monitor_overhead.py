"""What `MixPrecMonitor` adds to `fit`.

Two arms fit the same mixed_float16 model with our `LossScaleOptimizer` on the
same batches: without and with the monitor, at its defaults. Fits of the two
alternate in one process per backend. The ratio is the median, over the
rounds, of the monitored fit's time to the other's in the same round; the
ratio of the fastest fits stands beside it in brackets. "Same" says whether
the losses of all epochs and the final weights are the same, bit for bit.

    python benchmarks/monitor_overhead.py
    python benchmarks/monitor_overhead.py --setups torch --rounds 41
"""

import functools
import pathlib
import statistics
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.timing import argument_parser, interleave, print_table, ratio

MODELS = ("convolutional", "40 Dense(64)", "transformer")

_BATCH = 64


def measure(jit_compile, name, rounds, steps):
    """Returns the table cells of one model on the active backend."""
    with tempfile.TemporaryDirectory() as log_dir:
        arms = {
            arm: _Arm(jit_compile, name, steps, log_dir if arm else None)
            for arm in (False, True)
        }
        interleave(arms, 1)
        seconds = interleave(arms, rounds)
    return [
        f"{1e3 * statistics.median(seconds[False]) / steps:.2f}",
        ratio(seconds[True], seconds[False], digits=3),
        "yes" if arms[True].equals(arms[False]) else "no",
    ]


class _Arm:
    def __init__(self, jit_compile, name, steps, log_dir):
        import keras
        import numpy as np

        import keras_mixprec
        from benchmarks.models import MODELS

        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy("mixed_float16")
        self._model, shape = MODELS[name]()
        self._model.compile(
            keras_mixprec.LossScaleOptimizer(keras.optimizers.Adam(1e-4)),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=jit_compile,
        )
        self._losses = []
        random = np.random.default_rng(0)
        x = random.normal(size=(steps * _BATCH, *shape)).astype("float32")
        y = random.integers(0, 10, size=len(x))
        self._fit = functools.partial(
            self._model.fit, x, y, _BATCH, shuffle=False, verbose=0
        )
        self._callbacks = (
            functools.partial(keras_mixprec.MixPrecMonitor, log_dir, verbose=0)
            if log_dir
            else None
        )

    def __call__(self):
        callbacks = [self._callbacks()] if self._callbacks else []
        history = self._fit(callbacks=callbacks).history
        self._losses += history["loss"]

    def equals(self, other):
        weights = zip(
            self._model.get_weights(), other._model.get_weights(), strict=True
        )
        return self._losses == other._losses and all(
            (a == b).all() for a, b in weights
        )


def main():
    parser = argument_parser(__doc__, rounds=15, steps=300)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    arguments = parser.parse_args()
    print_table(
        ["without, ms a step", "with", "same"],
        arguments.setups,
        {name: name for name in arguments.models},
        measure,
        arguments.rounds,
        arguments.steps,
    )


if __name__ == "__main__":
    main()
