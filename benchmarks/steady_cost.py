"""What `MixPrecMonitor` and `PrecisionTuner` cost a healthy run that lasts.

Each arm is one long `fit` of the same mixed_float16 model with our
`LossScaleOptimizer`: without a callback, with the monitor, and with monitor
and tuner, all at their defaults. The fits run in threads that take turns every
twenty steps, so that noise meets all alike; the clock that the budgets go by
stands still while others run. A ratio is the median, over the epochs after the
first, of an epoch's time to that of the same epoch without a callback; the
ratio of the fastest epochs stands beside it in brackets. "First epoch" is what
setting up, the diagnosis before the first step and the compilation of the
probed step added to it, once. With one thread torch's own do not wait for each
other beside those of the other fits.

    OMP_NUM_THREADS=1 python benchmarks/steady_cost.py
    python benchmarks/steady_cost.py --setups torch --models transformer
"""

import math
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

# Steps between two changes of turn.
_TURN = 20


def measure(jit_compile, name, rounds, steps):
    """Returns the table cells of one model on the active backend."""
    time.perf_counter = _own_time
    with tempfile.TemporaryDirectory() as folder:
        arms = {
            kind: _Arm(jit_compile, name, steps, rounds + 1, callbacks)
            for kind, callbacks in _callbacks(folder).items()
        }
        kinds = list(arms)
        seconds = {kind: [0.0] * (rounds + 1) for kind in kinds}
        for kind in kinds:  # Up to the first step.
            seconds[kind][0] += arms[kind].run()
        for epoch in range(rounds + 1):
            for turn in range(math.ceil(steps / _TURN)):
                shift = turn % len(kinds)
                for kind in kinds[shift:] + kinds[:shift]:
                    seconds[kind][epoch] += arms[kind].run()
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
    """One `fit`, which goes on when it is asked to."""

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

        def wait(batch, logs):
            if batch % _TURN == 0:
                _finish_steps(model)
                self._done.put(None)
                _wait(self._turn)

        def fit():
            _wait(self._turn)
            try:
                model.fit(
                    x,
                    y,
                    _BATCH,
                    epochs=epochs,
                    shuffle=False,
                    verbose=0,
                    callbacks=[
                        keras.callbacks.LambdaCallback(
                            on_train_batch_begin=wait
                        ),
                        *callbacks,
                    ],
                )
                self._done.put(None)
            except BaseException as error:
                self._done.put(error)

        threading.Thread(target=fit, daemon=True).start()

    def run(self):
        """Lets it come to its next turn, or the end; returns the seconds."""
        start = _clock()
        self._turn.put(None)
        error = self._done.get()
        if error is not None:
            raise error
        return _clock() - start


def _finish_steps(model):
    # JAX may have some under way, which the next in turn would wait for.
    if hasattr(model, "_jax_state"):
        import jax

        jax.block_until_ready(model._jax_state)


_clock = time.perf_counter
_waited = threading.local()


def _wait(turn):
    start = _clock()
    turn.get()
    _waited.seconds = getattr(_waited, "seconds", 0.0) + _clock() - start


def _own_time():
    return _clock() - getattr(_waited, "seconds", 0.0)


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
