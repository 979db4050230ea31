"""What `MixPrecMonitor` and `PrecisionTuner` cost a healthy run that lasts.

Each arm is one long `fit` of the same mixed_float16 model with our
`LossScaleOptimizer`: without a callback, with the monitor, and with monitor
and tuner, all at their defaults. The fits run in threads that take turns,
epoch by epoch, so that noise meets all alike. A ratio is the median, over the
epochs after the first, of an epoch's time to that without a callback in the
same round; the ratio of the fastest epochs stands beside it in brackets.
"First epoch" is what setting up, the diagnosis before the first step and the
compilation of the probed step added to it, once.

    python benchmarks/steady_cost.py
    python benchmarks/steady_cost.py --setups torch --models transformer
"""

import pathlib
import queue
import statistics
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.timing import argument_parser, print_table, ratio

MODELS = ("convolutional", "40 Dense(64)", "transformer")

_BATCH = 64


def measure(jit_compile, name, rounds, steps):
    """Returns the table cells of one model on the active backend."""
    with tempfile.TemporaryDirectory() as folder:
        arms = {
            kind: _Arm(jit_compile, name, steps, rounds + 1, callbacks)
            for kind, callbacks in _callbacks(folder).items()
        }
        seconds = {kind: [] for kind in arms}
        kinds = list(arms)
        for turn in range(rounds + 1):
            shift = turn % len(kinds)
            for kind in kinds[shift:] + kinds[:shift]:
                seconds[kind].append(arms[kind].epoch())
        for arm in arms.values():
            arm.finish()
    first = {kind: times.pop(0) for kind, times in seconds.items()}
    none, *others = kinds
    return [
        f"{1e3 * statistics.median(seconds[none]) / steps:.2f}",
        *(ratio(seconds[kind], seconds[none], digits=3) for kind in others),
        *(f"{first[kind] - first[none]:.1f} s" for kind in others),
    ]


def _callbacks(folder):
    import keras_mixprec as kmp

    def monitor(name):
        return kmp.MixPrecMonitor(pathlib.Path(folder, name), verbose=0)

    return {
        "none": [],
        "monitor": [monitor("alone")],
        "both": [monitor("beside"), kmp.PrecisionTuner(verbose=0)],
    }


class _Arm:
    """One `fit`, whose epochs run when they are asked for."""

    def __init__(self, jit_compile, name, steps, epochs, callbacks):
        import keras
        import numpy as np

        import keras_mixprec
        from benchmarks.models import MODELS

        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy("mixed_float16")
        model, shape = MODELS[name]()
        model.compile(
            keras_mixprec.LossScaleOptimizer(keras.optimizers.Adam(1e-4)),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=jit_compile,
        )
        random = np.random.default_rng(0)
        x = random.normal(size=(steps * _BATCH, *shape)).astype("float32")
        y = random.integers(0, 10, size=len(x))
        self._turn, self._done = queue.Queue(), queue.Queue()
        wait = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: self._turn.get()
        )
        tell = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: self._done.put(None)
        )

        def fit():
            try:
                model.fit(
                    x,
                    y,
                    _BATCH,
                    epochs=epochs,
                    shuffle=False,
                    verbose=0,
                    callbacks=[wait, *callbacks, tell],
                )
            except BaseException as error:
                self._done.put(error)

        self._thread = threading.Thread(target=fit, daemon=True)
        self._thread.start()

    def epoch(self):
        """Lets one epoch run; returns its seconds."""
        start = time.perf_counter()
        self._turn.put(None)
        error = self._done.get()
        if error is not None:
            raise error
        return time.perf_counter() - start

    def finish(self):
        """Waits for the end of `fit`."""
        self._thread.join()


def main():
    """Prints the table."""
    parser = argument_parser(__doc__, rounds=21, steps=200)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    arguments = parser.parse_args()
    header = ["without, ms a step", "monitor", "monitor and tuner"]
    header += ["first epoch: monitor", "first epoch: both"]
    models = {name: name for name in arguments.models}
    rest = arguments.rounds, arguments.steps
    print_table(header, arguments.setups, models, measure, *rest)


if __name__ == "__main__":
    main()
