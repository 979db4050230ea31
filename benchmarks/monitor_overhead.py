"""What `MixPrecMonitor` adds to `fit`, beside what other tools add.

All arms fit the same mixed_float16 model with our `LossScaleOptimizer` on the
same batches: without a callback, the same once more, whose ratio shows how much
equal models differ by themselves, with the monitor at its defaults, and with
every step probed. On TensorFlow as well: Keras' `TensorBoard` with histograms
of each epoch, `enable_check_numerics` and the Debugger V2. Fits of all arms
alternate in one process per backend. A ratio is the median, over the rounds,
of a fit's time to that without a callback in the same round, but for the
Debugger V2, which cannot be switched on twice; the ratio of the fastest fits
stands beside it in brackets. "Twin" is how long the probed step
took to compile, in the round before the first. "Same" says whether the losses
of all epochs and the final weights, with defaults, are the same bit for bit,
and otherwise by how much a weight differs at most.

    python benchmarks/monitor_overhead.py
    python benchmarks/monitor_overhead.py --setups torch --rounds 41
    python benchmarks/monitor_overhead.py --setups tensorflow --peers
"""

import contextlib
import functools
import json
import pathlib
import statistics
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.timing import argument_parser, interleave, print_table, ratio

MODELS = ("convolutional", "40 Dense(64)", "transformer")
PEERS = ("TensorBoard", "check_numerics", "CONCISE_HEALTH", "FULL_HEALTH")


def measure(jit_compile, name, rounds, steps):
    """Returns the table cells of one model on the active backend."""
    kinds = ("none", "none again", "defaults", "every step")
    arms, seconds = _interleaved(jit_compile, name, rounds, steps, kinds)
    return [
        f"{1e3 * statistics.median(seconds['none']) / steps:.2f}",
        ratio(seconds["none again"], seconds["none"], digits=3),
        ratio(seconds["defaults"], seconds["none"], digits=3),
        ratio(seconds["every step"], seconds["none"], digits=3),
        f"{arms['every step'].compilation:.1f} s",
        arms["defaults"].difference(arms["none"]),
    ]


def measure_peer(jit_compile, name_and_peer, rounds, steps):
    """Returns the table cells of another tool on one model."""
    name, peer = name_and_peer
    measured = _one_by_one if peer in PEERS[2:] else _interleaved
    _, seconds = measured(jit_compile, name, rounds, steps, ("none", peer))
    return [
        f"{1e3 * statistics.median(seconds['none']) / steps:.2f}",
        ratio(seconds[peer], seconds["none"], digits=3),
    ]


def _interleaved(jit_compile, name, rounds, steps, kinds):
    with tempfile.TemporaryDirectory() as folder:
        arms = {k: _Arm(jit_compile, name, steps, k, folder) for k in kinds}
        interleave(arms, 1)
        for arm in arms.values():
            arm.read_compilation()
        return arms, interleave(arms, rounds)


def _one_by_one(jit_compile, name, rounds, steps, kinds):
    # For the Debugger V2: TensorFlow 2.21 crashes if it is enabled again.
    with tempfile.TemporaryDirectory() as folder:
        arms, seconds = {}, {}
        for kind in kinds:
            arms[kind] = _Arm(jit_compile, name, steps, kind, folder)
            with _watching(kind, folder):
                seconds |= interleave({kind: arms[kind].fit}, 1 + rounds)
        return arms, {kind: found[1:] for kind, found in seconds.items()}


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

    def __call__(self):
        with _watching(self._kind, self._log_dir):
            self.fit()

    def fit(self):
        """Fits once."""
        history = self._fit(callbacks=self._callbacks()).history
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

    def read_compilation(self):
        """Notes how many seconds compiling the probed step took."""
        path = self._log_dir / "mixprec" / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        events = map(json.loads, lines)
        self.compilation = sum(e["seconds"] for e in events if "seconds" in e)

    def difference(self, other):
        """Returns whether the run was the same as another."""
        weights = zip(
            self._model.get_weights(), other._model.get_weights(), strict=True
        )
        largest = max(float(abs(a - b).max()) for a, b in weights)
        same = not largest and self._losses == other._losses
        return "yes" if same else f"{largest:.1e}"


@contextlib.contextmanager
def _watching(kind, folder):
    """Switches a tool of TensorFlow on, or keeps ours from diagnosing."""
    if kind in PEERS[1:]:
        import tensorflow as tf

        debugging = tf.debugging
    if kind == "check_numerics":
        debugging.enable_check_numerics()
        try:
            yield
        finally:
            debugging.disable_check_numerics()
    elif kind in PEERS[2:]:
        debugging.experimental.enable_dump_debug_info(
            str(folder), tensor_debug_mode=kind, circular_buffer_size=-1
        )
        try:
            yield
        finally:
            debugging.experimental.disable_dump_debug_info()
    elif kind == "every step":
        from keras_mixprec.callbacks import examiner

        # At this budget it would diagnose as often as it could.
        before, examiner._FIRST_COST = examiner._FIRST_COST, float("inf")
        try:
            yield
        finally:
            examiner._FIRST_COST = before
    else:
        yield


def main():
    parser = argument_parser(__doc__, rounds=15, steps=300)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument(
        "--peers", action="store_true", help="TensorFlow's tools as well"
    )
    arguments = parser.parse_args()
    rest = arguments.rounds, arguments.steps
    header = ["without, ms a step", "without again", "defaults"]
    header += ["every step", "twin", "same"]
    models = {name: name for name in arguments.models}
    print_table(header, arguments.setups, models, measure, *rest)
    if arguments.peers:
        # Each in a process of its own: they stay in what TensorFlow compiled.
        models = {f"{m}, {p}": (m, p) for m in models for p in PEERS}
        setups = [s for s in arguments.setups if s.startswith("tensorflow")]
        print_table([header[0], "with"], setups, models, measure_peer, *rest)


if __name__ == "__main__":
    main()
