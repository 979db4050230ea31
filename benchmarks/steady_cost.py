"""Measures the cost of the callbacks in a healthy run, part by part.

Two equal `fit`s side by side differ by 2% to 5% on a shared machine, so their
ratio cannot show a cost of 1%. Therefore the script times each part where it
runs: in one `fit` of several epochs of a mixed_float16 model with our
`LossScaleOptimizer`, with all arguments at their defaults. The parts are:

- guard: the time that keeping bad batches out of metrics adds to the compiled
  step. Steps with and without the guard alternate on the same weights;
- hooks: the time in the callbacks' own methods, including waits for the device;
- special steps: the extra time of steps with a measurement or a diagnosis,
  compared to the median step.

The costs of hooks and special steps are shares of the time of all epochs after
the first. "Total" is the sum of the three parts. The columns "once" are the
seconds of the hooks and diagnoses in the first epoch, and of the measurements
that the budget does not limit.

    python benchmarks/steady_cost.py
    OMP_NUM_THREADS=1 python benchmarks/steady_cost.py --setups torch
    OMP_NUM_THREADS=1 python benchmarks/steady_cost.py --clock cpu
"""

import functools
import pathlib
import statistics
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.timing import (
    CLOCKS,
    add_clock,
    argument_parser,
    interleave,
    print_table,
)

MODELS = ("convolutional", "40 Dense(64)", "transformer")

# The number of pairs of single steps. The ratio of a pair varies by 10%, so the
# median of this many ratios is accurate to 0.3%.
_PAIRS = 1001

_PARTS = "guard + hooks + special = total"
HEADER = ["plain step, ms", f"monitor: {_PARTS}", f"both: {_PARTS}"]
HEADER += ["once: monitor", "once: both"]


def measure(
    jit_compile, name, rounds, steps, pairs=_PAIRS, clock=CLOCKS["wall"]
):
    """Returns the table cells of one model on the active backend."""
    import keras_mixprec as kmp

    guard = _guard(jit_compile, name, clock, pairs)
    shares, once = [], []
    for tuners in ([], [kmp.PrecisionTuner(verbose=0)]):
        with tempfile.TemporaryDirectory() as folder:
            monitor = kmp.MixPrecMonitor(folder, verbose=0)
            callbacks = [monitor, *tuners]
            epochs = rounds + 1
            run = _Run(jit_compile, name, steps, epochs, callbacks, clock)
        shares.append([guard, *run.shares()])
        once.append(run.once)
    return [
        f"{1e3 * run.median_step:.2f}",
        *(
            " + ".join(f"{s:.2%}" for s in parts) + f" = {sum(parts):.2%}"
            for parts in shares
        ),
        *(f"{seconds:.1f} s" for seconds in once),
    ]


def _guard(jit_compile, name, clock, pairs):
    """Returns how much the guard adds to a step, as a share."""
    from benchmarks.models import compiled
    from benchmarks.train_steps import stepper
    from keras_mixprec.monitoring.attach import watch_optimizers

    model, x, y = compiled(name, jit_compile, 1)
    watch_optimizers(model)
    run = stepper(model, x, y)
    functions = {True: model.train_function}
    model.make_train_function(force=True)
    functions[False] = model.train_function

    def step(guarded):
        model.train_function = functions[guarded]
        run(1)

    arms = {g: functools.partial(step, g) for g in functions}
    interleave(arms, min(pairs, 20))
    seconds = interleave(arms, pairs, clock)
    both = zip(seconds[True], seconds[False], strict=True)
    return statistics.median(guarded / own for guarded, own in both) - 1


class _Run:
    """Runs one `fit`, and times its parts."""

    def __init__(self, jit_compile, name, steps, epochs, callbacks, clock):
        import keras

        from benchmarks.models import BATCH, compiled
        from keras_mixprec.diagnosis import in_training as examiner
        from keras_mixprec.monitoring.range_log import RangeLog

        self._clock = clock
        self._readings = 0.0
        self._steps, self._diagnoses = steps, 0.0
        self._hooks = 0.0  # Seconds in hooks during the current batch.
        # A tuple per batch: the seconds in hooks, the seconds of the step, and
        # whether the step was special.
        self._batches = []
        model, x, y = compiled(name, jit_compile, steps)
        for callback in callbacks:
            self._time_hooks(callback)
        begin = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: self._stamp(),
            # With this hook, Keras reads the loss of every step, and so waits
            # for the step to end. On a GPU, the first reader of the loss waits
            # in any case.
            on_train_batch_end=lambda batch, logs: None,
        )
        end = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: self._note_own(model),
            on_train_batch_begin=lambda batch, logs: self._note_special(model),
        )
        self._special = False
        self._last = self._clock()
        examine = examiner.examine
        examiner.examine = self._timed_diagnosis(examine)
        read = RangeLog._read
        RangeLog._read = self._timed_reading(read)
        try:
            model.fit(
                x,
                y,
                BATCH,
                epochs=epochs,
                shuffle=False,
                verbose=0,
                callbacks=[begin, *callbacks, end],
            )
        finally:
            examiner.examine = examine
            RangeLog._read = read
        self._stamp()

    @property
    def once(self):
        """Seconds of the first epoch's hooks and diagnoses, and of readings."""
        hooks = sum(h for h, _, _ in self._batches[: self._steps + 1])
        return hooks + self._diagnoses + self._readings

    @property
    def median_step(self):
        """Seconds of a plain step."""
        return statistics.median(s for _, s, _ in self._steady())

    def shares(self):
        """Returns the shares of hooks and special steps in the plain time."""
        steady = self._steady()
        hooks = sum(h for h, _, _ in steady)
        special = sum(s - self.median_step for _, s, odd in steady if odd)
        rest = sum(s for _, s, _ in steady) - special
        return hooks / rest, special / rest

    def _steady(self):
        return self._batches[self._steps + 1 :]

    def _time_hooks(self, callback):
        for name in dir(callback):
            if name.startswith("on_"):
                setattr(callback, name, self._timed(getattr(callback, name)))

    def _timed(self, method):
        @functools.wraps(method)
        def timed(*args, **kwargs):
            start, readings = self._clock(), self._readings
            try:
                return method(*args, **kwargs)
            finally:
                seconds = self._clock() - start
                self._hooks += seconds - (self._readings - readings)

        return timed

    def _timed_diagnosis(self, examine):
        def timed(*args, **kwargs):
            start = self._clock()
            found = examine(*args, **kwargs)
            if len(self._batches) <= self._steps:
                self._diagnoses += self._clock() - start
            return found

        return timed

    def _timed_reading(self, read):
        def timed(reader, model, step, is_extra, batch):
            start = self._clock()
            read(reader, model, step, is_extra, batch)
            seconds = self._clock() - start
            # Only extra measurements count as part of a step.
            if not is_extra:
                self._readings += seconds
                self._last += seconds

        return timed

    def _stamp(self):
        """Records the batch that ends now, where the next batch begins."""
        now = self._clock()
        step = now - self._last - self._hooks
        self._batches.append((self._hooks, step, self._special))
        self._last, self._hooks = now, 0.0

    def _note_own(self, model):
        self._own = model.train_function

    def _note_special(self, model):
        # A special step replaces `train_function` for the call.
        self._special = model.train_function is not self._own


def main():
    """Prints the table."""
    parser = argument_parser(__doc__, rounds=10, steps=200)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    add_clock(parser)
    arguments = parser.parse_args()
    models = {name: name for name in arguments.models}
    rest = arguments.rounds, arguments.steps, _PAIRS, CLOCKS[arguments.clock]
    print_table(HEADER, arguments.setups, models, measure, *rest)


if __name__ == "__main__":
    main()
