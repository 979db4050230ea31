"""The monitoring callback."""

import contextlib
import os
from typing import TYPE_CHECKING, Any

from keras_mixprec._checks import check_choice, check_integer, check_number
from keras_mixprec._console import print_message
from keras_mixprec._files import check_local
from keras_mixprec.backend import active
from keras_mixprec.callbacks.session import CopiedCallback, Session
from keras_mixprec.diagnosis.verdict import Verdict
from keras_mixprec.loggers.forwarded_log import ForwardedLog, check_loggers
from keras_mixprec.monitoring.before_training import (
    check_before_training,
    events_before_training,
)
from keras_mixprec.monitoring.failures import warn_disabled
from keras_mixprec.reporting.run_log import NoLog

if TYPE_CHECKING:
    from keras_mixprec.reporting.training_summary import TrainingSummary


class MixPrecMonitor(CopiedCallback):
    """Shows the loss scale, skipped steps and layer dtypes of a training run.

    Writes to `<log_dir>/mixprec`, both as TensorBoard logs and as
    `events.jsonl`:

    | tag | value | when |
    |---|---|---|
    | `mixprec/loss_scale`, `mixprec/log2_loss_scale` | scale in use | U, S |
    | `mixprec/skipped_steps` | steps skipped so far in this log | U |
    | `mixprec/nonfinite_losses/<kind>` | batches with a `<kind>` loss | U |
    | `mixprec/nonfinite_gradients/<kind>` | steps with `<kind>` gradients | U |
    | `mixprec/gradient_norm` | unscaled norm of all gradients | U |
    | `mixprec_gradient_norm_by_variable/<path>` | norm of one gradient | U |
    | `mixprec_overflow_count/<path>` | steps with overflow in a gradient | U |
    | `mixprec/layer_dtypes` (text) | dtypes of each layer | start, change |
    | `mixprec/skipped_step` (text) | skipped steps, scales, gradients | U |
    | `mixprec_ranges/<part>_headroom_bits` | smallest headroom | R |
    | `mixprec_ranges/gradient_subnormal` | largest share in one layer | R |
    | `mixprec_ranges/weight_gradient_below` | largest underflow share | R |
    | `mixprec_ranges/lost_updates` | weights that an update cannot change | R |
    | `mixprec_ranges/attention_logits_largest` | largest of all layers | R |
    | `mixprec_ranges/nonfinite_layers` | layers with infinities or NaNs | R |
    | `mixprec_performance/<name>` | step time, samples per second ... | U |
    | `mixprec/heat/<n>` | all ranges by layer, for the plugin | R |
    | `mixprec_<part>_exponent/<path>` | histograms | H |

    `<part>` is `activation`, `gradient` or `weight`; weights have no histogram.
    `<kind>` is `inf`, `-inf` or `nan`. The curve of a kind begins when the kind
    is first seen.

    U: every `update_freq` steps, at the end of an epoch (short epochs may be
    left out), and whenever a step was skipped or a loss was not finite. S: at
    each step that changed the scale. R: when ranges are read. H: when ranges
    are read and the step count has doubled. The x axis counts batches,
    including skipped ones, and continues over several calls to `fit`. The
    compiled train step records each skipped step, so no skipped step between
    two readings is lost.

    A value at step `s` was read after `s` steps; step 0 is before training.
    Step `s + 1` runs with the scale logged at step `s`, and a fault found in
    step `s + 1` is logged at `s`. A `skipped_step` event has the number of the
    skipped step itself as `at_step`, and the scale of that step. Epochs,
    batches, rows and samples are counted from 0, as in callbacks and arrays. If
    you set a scale between two readings, the log shows the new scale from the
    second reading on, and `events.jsonl` has a `loss_scale_not_known` event.

    A full disk or a removed folder does not end training. One warning reports
    the problem, and the missing data are logged once the folder is writable
    again. If another run, in any process, is writing to the same `log_dir`,
    this run writes to `<log_dir>/mixprec_2` and so on.

    With several workers, the first worker writes the log, with the findings of
    all workers. Every worker needs the monitor with the same arguments, because
    all workers stop together.

    The monitor replaces Keras' own `LossScaleOptimizer` with
    `keras_mixprec.LossScaleOptimizer`, which has the same state and rule.
    Training stays the same, unless a `train_step` forgets to scale the loss.
    Keras' own optimizer divides gradients by the loss scale even if the loss
    was never scaled. The new optimizer applies such gradients undivided and
    warns. If a model has several optimizers as attributes, they are logged by
    attribute name.

    To read ranges, the monitor runs the `train_step` on the next batch without
    an update, and measures every activation, gradient and weight. Then it
    undoes all changes. Only JAX compiles this extra step. Ranges are always
    read after the first step, after the last step, and whenever the step count
    has grown by a factor of 8. These readings do not count as overhead. Further
    readings follow every `probe_every` steps, after the scale grew, and after a
    skipped step, if `max_overhead` allows them. Histograms are logged whenever
    the step count has doubled. The summary and `events.jsonl` show the time of
    the readings.

    After five skipped steps in a row, the monitor diagnoses the next batch as
    `keras_mixprec.diagnose` does. The monitor prints the faults of layers and
    writes them to `events.jsonl`. To find faults that skip no step, it also
    diagnoses a batch after `20 / max_overhead` steps (1,000 by default), and
    whenever the step count has doubled. A `PrecisionTuner` makes its own checks
    instead. The schedule does not depend on the speed of the machine.

    If a part of the monitor fails, a warning names the part, and training
    continues without it.

    With loss scaling, batches with a non-finite loss do not count in the
    running loss and metrics. Callbacks such as `EarlyStopping` and
    `ModelCheckpoint` therefore see the loss of the good batches only. Before
    its first good batch, an epoch shows metrics without data. An epoch without
    any good batch reports an infinite loss and the worst value of each metric,
    or NaN if Keras does not know whether larger is better. After such an epoch,
    and once weights are not finite, batches show NaN, so that `TerminateOnNaN`
    ends the run. The state of layers, such as the moving mean of a
    `BatchNormalization`, stays finite too. After `fit` the model and its
    metrics behave as before.

    A custom training loop calls the methods of the callback as `fit` does, for
    example in a `keras.callbacks.CallbackList`. The epoch methods are optional.
    A copy (`copy.deepcopy`, `pickle`) has the results, but not the model.

    Args:
        log_dir: String or path-like. The folder of the log. Defaults to
            `"logs"`.
        update_freq: Int. Batches between two readings of the counters. Defaults
            to `50`.
        probe_every: Int. Steps between two readings of ranges. `0` turns them
            off. Defaults to `100`.
        max_overhead: Float. The overhead that is allowed, as a share of the
            training time. To stay below this limit, the monitor reads unchanged
            counters and further ranges less often. Diagnoses and work that
            happens once are not limited. Up to half of the limit, at most 1.25
            percentage points, is reserved for overhead that cannot be timed.
            Each kind of reading takes at most half of the rest. `1` lifts the
            limit, and `0` reads no ranges. Defaults to `0.02`.
        keep_failing_batches: Int. The number of batches of skipped steps to
            keep, with all state needed to repeat their steps. Until this many
            are kept, the monitor checks every step, so every step waits for the
            device. Defaults to `0`.
        stop_after: Int. Training stops after this many skipped steps in a row,
            whatever the loss scale; one more step may run before it stops. The
            counters are read at least once in this many steps. Defaults to
            `None`, which never stops.
        verbose: `0` or `1`, whether to print the summary at the end. Defaults
            to `1`.
        on_stop: `"stop"` to end `fit` as `model.stop_training` does, or
            `"raise"` to end it with a `FloatingPointError`. With `"raise"` a
            job fails, and `keras.callbacks.BackupAndRestore` keeps the backup
            that it would delete if `fit` returned. Both values close the log
            and leave a `summary`. Defaults to `"stop"`.
        lint: The result of `keras_mixprec.lint(model, ...)`. Its findings of
            high and medium severity are logged. The report and the tab show
            them with the verdicts. Defaults to `None`, because checking the
            model takes seconds.
        doctor: The result of `keras_mixprec.doctor()`. Its findings are logged
            and shown in the same way. Defaults to `None`.
        loggers: List of loggers that also get curves, events and the report:
            `WandbLogger()`, `MLflowLogger()` or any object with the methods of
            `Logger`, all from `keras_mixprec.loggers`. Defaults to `()`.

    Attributes:
        summary: The `TrainingSummary` of the last `fit`, `None` before the
            first `fit`.
        verdicts: List of the `Verdict`s of the last `fit`, one for each fault.
        failing_batches: List of the `FailingBatch`es of the last `fit`. Each
            has `save(path)` and `replay(model)`. To load one, call
            `keras_mixprec.diagnosis.failing_batch.FailingBatch.load(path)`.
        report: The `MixPrecReport` of all runs in `log_dir`, `None` before the
            first `fit`. With several workers, it is the first worker's report.
            A notebook shows the report like the TensorBoard tab, and
            `report.save_html(path)` saves it.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is outside its range, or, when training starts,
            if the same `fit` has a second `MixPrecMonitor`.
        OSError: When training starts, if `log_dir` is not writable.
        FloatingPointError: During training, with `on_stop="raise"`.

    Example:
    >>> import tempfile
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(LossScaleOptimizer("sgd"), loss="mse")
    >>> monitor = MixPrecMonitor(tempfile.mkdtemp(), verbose=0)
    >>> _ = model.fit(
    ...     np.ones((8, 2)), np.ones((8, 1)), verbose=0, callbacks=[monitor]
    ... )
    >>> monitor.summary.optimizers[""].skipped
    0
    """

    def __init__(
        self,
        log_dir: str | os.PathLike = "logs",
        update_freq: int = 50,
        probe_every: int = 100,
        max_overhead: float = 0.02,
        keep_failing_batches: int = 0,
        stop_after: int | None = None,
        verbose: int = 1,
        on_stop: str = "stop",
        lint: Any = None,
        doctor: Any = None,
        loggers: Any = (),
    ):
        super().__init__()
        self.log_dir = check_local(log_dir)
        self.update_freq = check_integer("update_freq", update_freq, low=1)
        self.probe_every = check_integer("probe_every", probe_every)
        self.max_overhead = check_number(
            "max_overhead", max_overhead, low=0, high=1
        )
        self.keep_failing_batches = check_integer(
            "keep_failing_batches", keep_failing_batches
        )
        self.stop_after = stop_after
        if stop_after is not None:
            self.stop_after = check_integer("stop_after", stop_after, low=1)
        self.on_stop = check_choice("on_stop", on_stop, ("stop", "raise"))
        self.verbose = check_integer("verbose", verbose, high=1)
        self._before_training = check_before_training(lint, doctor)
        self.loggers = check_loggers(loggers)
        self.summary: TrainingSummary | None = None
        self.verdicts: list[Verdict] = []
        self.failing_batches: list = []
        self._session: Any = None
        self._has_logged = False
        self._is_chief, self._report_dir = True, self.log_dir

    @property
    def report(self) -> Any:
        """The report built from the log."""
        # Import the report lazily, because training does not need the report.
        from keras_mixprec.reporting.report import load_report

        if not self._has_logged:
            return None
        try:
            return load_report(self._report_dir)
        except FileNotFoundError as error:
            if self._is_chief:
                raise
            raise FileNotFoundError(
                "The first worker has written the log to a folder that this "
                "worker cannot read. Use `monitor.report` on the first worker. "
                f"Received: log_dir={self._report_dir!r}"
            ) from error

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Opens the log."""
        self.summary = None
        events = events_before_training(*self._before_training, self.model)
        self._session = Session.join(self, self, self._open_log, events)
        self._has_logged = True
        self.verdicts = self._session.verdicts
        self.failing_batches = self._session.failing_batches

    def _sum_up(self):
        # Import the summary code lazily, because only the end of `fit` needs
        # it.
        from keras_mixprec.monitoring.summary import summarize
        from keras_mixprec.reporting.training_summary import end_events

        watch = self._session.watch
        self.summary = summarize(watch)
        for event in end_events(self.summary):
            watch.log.event(watch.step, event)

    def abandoned(self) -> None:
        """Summarizes a `fit` that an exception has ended."""
        self._is_chief = self._session.log.writes
        with contextlib.suppress(Exception):
            self._sum_up()
            if self.verbose:
                print_message(str(self.summary))
        super().abandoned()

    def _open_log(self):
        # Several workers that write to one log folder would overwrite each
        # other's files.
        if active.processes().rank(self.model) != 0:
            return NoLog()
        return ForwardedLog(self.log_dir, self.loggers, warn_disabled)

    def on_test_end(self, logs: dict | None = None) -> None:
        """Reports the faults of an `evaluate` outside of `fit`."""
        super().on_test_end(logs)
        if self._session is None:
            from keras_mixprec.monitoring.validation import watch_evaluation

            self.verdicts = watch_evaluation(
                self.model, logs or {}, self._open_log, self.verbose
            )
            self._has_logged |= bool(self.verdicts)

    def on_train_end(self, logs: dict | None = None) -> None:
        """Reads the counters, writes the summary and closes the log."""
        session = self._session
        session.finish()
        log, watch = session.log, session.watch
        watch.attempt("sum up this run", self._sum_up)
        self._is_chief, self._report_dir = log.writes, watch.log_dir
        session.leave(self)
        self._session = None
        if log.writes:
            log.finish(self.summary, lambda: self.report)
        if self.verbose and self.summary:
            print_message(str(self.summary))
        session.raise_if_failed()
