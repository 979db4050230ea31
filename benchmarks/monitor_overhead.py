"""Measures the time that `MixPrecMonitor` and other tools add to `fit`.

All arms fit the same mixed_float16 model with our `LossScaleOptimizer` on the
same batches:

- without a callback, twice: the ratio shows the difference of equal models;
- with the monitor at its defaults;
- with ranges measured before every step;
- with `--peers`: Keras' `TensorBoard` with histograms of each epoch, where a
  fit is one epoch, and on TensorFlow `enable_check_numerics` and Debugger V2.

The fits of all arms take turns. Each tool of TensorFlow has its own process,
because compiled functions keep the tool, and the debugger cannot be switched on
twice. A ratio is the time of a step divided by the time without a callback in
the same round. The table has the median over the rounds, and the ratio of the
fastest rounds in brackets. Slow tools fit an eighth of the steps. The column
"same" says whether losses and final weights equal those without the monitor bit
for bit. If they differ, it shows the largest difference of a weight.

    python benchmarks/monitor_overhead.py
    python benchmarks/monitor_overhead.py --setups torch --rounds 41
    OMP_NUM_THREADS=1 python benchmarks/monitor_overhead.py --clock cpu
    python benchmarks/monitor_overhead.py --setups tensorflow --peers
"""

import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.timing import (
    CLOCKS,
    add_clock,
    argument_parser,
    interleave,
    print_table,
    ratio,
)

MODELS = ("convolutional", "40 Dense(64)", "transformer")
OURS = ("none", "none again", "defaults", "every step")
TENSORFLOW_TOOLS = ("check_numerics", "CONCISE_HEALTH", "FULL_HEALTH")
PEERS = ("TensorBoard", *TENSORFLOW_TOOLS)
HEADER = ["without, ms a step", "without again", "defaults"]
HEADER += ["every step", "same"]

# The factor by which arms with slow steps run fewer steps.
_SHORTER = dict.fromkeys(("every step", *TENSORFLOW_TOOLS), 8)


def measure(jit_compile, name, rounds, steps, peers=(), clock=CLOCKS["wall"]):
    """Returns the table cells of one model on the active backend."""
    if os.environ["KERAS_BACKEND"] != "tensorflow":
        peers = [peer for peer in peers if peer not in TENSORFLOW_TOOLS]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())

        def prepare(kind):
            return _Arm(jit_compile, name, _steps_of(kind, steps), kind, folder)

        def process(kind):
            arguments = (jit_compile, name, _steps_of(kind, steps), kind)
            return stack.enter_context(_Process(*arguments, folder))

        ours = {kind: prepare(kind) for kind in OURS}
        arms = {kind: arm.fit for kind, arm in ours.items()}
        arms |= {peer: process(peer).fit for peer in peers}
        failed = _warm_up(arms)
        seconds = interleave(arms, rounds, clock)
        same = _difference(*(ours[kind].result() for kind in OURS[::2]))
    per_step = {
        kind: [s / _steps_of(kind, steps) for s in found]
        for kind, found in seconds.items()
    }
    ratios = {k: ratio(s, per_step["none"], 3) for k, s in per_step.items()}
    cells = [f"{1e3 * statistics.median(per_step['none']):.2f}"]
    cells += [ratios[kind] for kind in OURS[1:]]
    cells.append(same)
    if peers:
        cells += [failed.get(k) or ratios.get(k, "-") for k in PEERS]
    return cells


def _steps_of(kind, steps):
    return max(steps // _SHORTER.get(kind, 1), 1)


def _warm_up(arms):
    """Fits each arm once, removes arms that fail, and returns their errors."""
    failed = {}
    for kind in list(arms):
        try:
            arms[kind]()
        except Exception as error:
            if kind not in PEERS:
                raise
            failed[kind] = type(error).__name__
            del arms[kind]
    return failed


def _difference(one, other):
    """Returns "yes" for two equal runs, or the largest difference."""
    losses, weights = zip(one, other, strict=True)
    largest = max(
        float(abs(a - b).max()) for a, b in zip(*weights, strict=True)
    )
    same = not largest and losses[0] == losses[1]
    return "yes" if same else f"{largest:.1e}"


class _Process:
    """Runs one arm in its own process."""

    def __init__(self, *args):
        self._pool = concurrent.futures.ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), _start, args
        )

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self._pool.shutdown()

    def fit(self):
        """Runs one `fit` in the process."""
        self._pool.submit(_fit).result()


def _start(*args):
    global _arm
    _arm = _Arm(*args)


def _fit():
    _arm.fit()


class _Arm:
    def __init__(self, jit_compile, name, steps, kind, folder):
        from benchmarks.models import BATCH, compiled

        self._model, x, y = compiled(name, jit_compile, steps)
        self._losses = []
        self._fit = functools.partial(
            self._model.fit, x, y, BATCH, shuffle=False, verbose=0
        )
        self._kind = kind
        self._log_dir = pathlib.Path(folder, kind.replace(" ", "_"))
        _switch_on(kind, self._log_dir)

    def fit(self):
        """Runs one `fit`."""
        from keras_mixprec.backend import active

        with _undiagnosed(self._kind == "every step"):
            history = self._fit(callbacks=self._callbacks()).history
        active.runtime().wait([v.value for v in self._model.variables])
        self._losses += history["loss"]

    def _callbacks(self):
        import keras

        import keras_mixprec

        if self._kind == "TensorBoard":
            return [keras.callbacks.TensorBoard(self._log_dir, 1)]
        every = {"probe_every": 1, "max_overhead": 1.0}
        arguments = {"defaults": {}, "every step": every}.get(self._kind)
        if arguments is None:
            return []
        return [
            keras_mixprec.MixPrecMonitor(self._log_dir, verbose=0, **arguments)
        ]

    def result(self):
        """Returns the losses of all epochs and the weights."""
        return self._losses, self._model.get_weights()


def _switch_on(kind, folder):
    """Switches a tool of TensorFlow on."""
    if kind not in TENSORFLOW_TOOLS:
        return
    from tensorflow import debugging

    if kind == "check_numerics":
        debugging.enable_check_numerics()
    else:
        debugging.experimental.enable_dump_debug_info(
            str(folder), tensor_debug_mode=kind, circular_buffer_size=-1
        )


def _undiagnosed(wanted):
    """Returns a context in which no diagnosis starts, if wanted."""
    from keras_mixprec.monitoring import diagnoses

    if not wanted:
        return contextlib.nullcontext()
    return mock.patch.object(diagnoses, "_COST", float("inf"))


def main():
    """Prints the table."""
    parser = argument_parser(__doc__, rounds=15, steps=300)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument(
        "--peers", action="store_true", help="other tools as well"
    )
    add_clock(parser)
    arguments = parser.parse_args()
    if arguments.peers and arguments.clock == "cpu":
        parser.error("--peers run in other processes: --clock wall times them")
    peers = PEERS if arguments.peers else ()
    header = [*HEADER, *peers]
    models = {name: name for name in arguments.models}
    rest = arguments.rounds, arguments.steps, peers, CLOCKS[arguments.clock]
    print_table(header, arguments.setups, models, measure, *rest)


if __name__ == "__main__":
    main()
