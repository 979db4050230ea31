"""The monitoring callback."""

import contextlib
import time
import weakref
from collections import Counter

import keras
from keras.src.utils import io_utils

from keras_mixprec._checks import check_integer, check_number
from keras_mixprec.callbacks.closing import OptimizerSummary, TrainingSummary
from keras_mixprec.callbacks.examiner import Examiner
from keras_mixprec.callbacks.hopeless import reason_to_stop
from keras_mixprec.callbacks.metric_guard import MetricGuard
from keras_mixprec.callbacks.prober import Prober
from keras_mixprec.callbacks.recorder import Recorder
from keras_mixprec.callbacks.watch import SUSPICIOUS_STEPS, Watch
from keras_mixprec.formats import format_power
from keras_mixprec.loss_scaling.adopt import adopt
from keras_mixprec.loss_scaling.ensure import lacks_loss_scaling
from keras_mixprec.policies import PrecisionPlan, precision_summary
from keras_mixprec.reporting import RunLog
from keras_mixprec.reporting.markdown import markdown_table
from keras_mixprec.reporting.run_log import check_local

# The guard of each model: it stays with the model's metrics.
_GUARDS = weakref.WeakKeyDictionary()


class MixPrecMonitor(keras.callbacks.Callback):
    """Shows the loss scale, skipped steps and layer dtypes of a training run.

    Writes to `<log_dir>/mixprec`, for TensorBoard and as `events.jsonl`:

    | tag | what | when |
    |---|---|---|
    | `mixprec/loss_scale`, `mixprec/log2_loss_scale` | scale in use | U |
    | `mixprec/skipped_steps` | skipped so far | U |
    | `mixprec/gradient_norm` | unscaled norm of all gradients | U |
    | `mixprec/gradient_norm_by_variable/<path>` | of each gradient | U |
    | `mixprec/overflow_count/<path>` | steps in which it overflowed | U |
    | `mixprec/layer_dtypes` (text) | dtypes of each layer | start, change |
    | `mixprec/skipped_step` (text) | what overflowed at which scale | U |
    | `mixprec/{activation,gradient,weight}_headroom_bits` | least one | P |
    | `mixprec/gradient_subnormal` | largest share in one layer | P |
    | `mixprec/weight_gradient_below` | same, below all of float16 | P |
    | `mixprec/lost_updates` | same, of weights that a step left alone | P |
    | `mixprec/nonfinite_layers` | layers with infinities or NaNs | P |
    | `mixprec/heat/<n>` | all of these by layer, for the plugin | P |
    | `mixprec/{activation,grad}_exponent/<path>` | histograms | epoch |

    U: every `update_freq` steps and at the end of an epoch. P: when a step was
    probed. The x axis counts
    batches, skipped ones included, on over several calls of `fit`. Between
    two looks the compiled step itself keeps the record, so a skipped step is
    not lost when nobody looks.

    Works with `keras_mixprec.LossScaleOptimizer`, and with Keras' own, which
    it exchanges for one that shares its state and follows its rule. A model
    with several optimizers as attributes is logged by attribute name.

    A probed step is taken by an instrumented twin of the compiled train step,
    which measures the range of every activation, gradient and weight on the
    device and changes none. Steps are probed every `probe_every` steps, after
    the scale grew and after a skipped step, as far as `max_overhead` allows.
    The twin is compiled once that takes, as far as the first step tells, no
    more than five times that share; `events.jsonl` says how long it took.

    When five steps in a row are skipped, the next batch is diagnosed as by
    `keras_mixprec.diagnose`, and what is wrong with which layer is printed and
    written to `events.jsonl`. Faults that skip no step are looked for as far
    as `max_overhead` allows, which is after minutes.

    While an optimizer skips bad steps, a batch whose loss is not finite is
    kept out of the running loss and metrics, so that callbacks which stop, or
    save the best, see the loss of the steps that were taken. An epoch without
    any such step reports float32's largest number.

    Args:
        log_dir: String or path-like. Defaults to `"logs"`.
        update_freq: Int, batches. Defaults to `50`.
        probe_every: Int, steps. `0` for no probes. Defaults to `100`.
        max_overhead: Float, share of the training time. Looks and probes are
            thinned to stay below it, setting up, compiling the twin and the
            last look apart. Defaults to `0.02`.
        keep_failing_batches: Int. How many batches of skipped steps to keep
            with all that made them fail, the first ones. While there is room,
            every batch is held until its step is known to have succeeded,
            which waits for the device in every step. Defaults to `0`.
        stop_after: Int. Skipped steps in a row after which training stops, if
            the loss scale cannot fall any further or the weights are not
            finite any more. Defaults to `None`, never.
        verbose: `0` or `1`. Whether to print the summary at the end. Defaults
            to `1`.

    Attributes:
        summary: The `TrainingSummary` of the last `fit`, `None` before.
        verdicts: List of the `Verdict`s of the last `fit`, each fault once.
        failing_batches: List of the `FailingBatch`es of the last `fit`. Each
            has `save(path)` and `replay(model)`, and is loaded by
            `keras_mixprec.diagnosis.FailingBatch.load(path)`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is outside its range.
        OSError: When training starts, if `log_dir` cannot be written to.

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
        log_dir="logs",
        update_freq: int = 50,
        probe_every: int = 100,
        max_overhead: float = 0.02,
        keep_failing_batches: int = 0,
        stop_after: int | None = None,
        verbose: int = 1,
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
        self.verbose = check_integer("verbose", verbose, high=1)
        self.summary = None
        self.verdicts = []
        self.failing_batches = []
        self._log = None

    # Setting up and tearing down.

    def on_train_begin(self, logs=None):
        """Opens the log, guards the metrics and takes the first look."""
        model = self.model
        self._log = RunLog(self.log_dir)
        self._examiner = Examiner(self._log, self.verbose)
        self.verdicts = self._examiner.verdicts
        self._prober = Prober(
            self._log, self.probe_every, self.max_overhead, self.verbose
        )
        self._recorder = Recorder(self.keep_failing_batches)
        self.failing_batches = self._recorder.kept
        self._first_step = self._epoch_start = self._step = self._log.next_step
        self._last_look = self._last_layers = self._plan = None
        with _variable_scope(model):
            self._watches = _watch_optimizers(model)
        self._log_layers()
        self._look()
        self._begun, self._spent = time.perf_counter(), 0.0

    def on_train_end(self, logs=None):
        """Takes the last look, writes the summary and closes the log."""
        self._settle()
        for part in self._recorder, self._prober, self._examiner:
            part.disarm()
        self._look()
        self._log_layers()
        self.summary = self._summarize()
        self._log.event(
            self._step, {"kind": "train_end", "summary": str(self.summary)}
        )
        self._log.close()
        if self.verbose:
            io_utils.print_msg(str(self.summary))

    # `on_train_batch_end` would make Keras fetch the logs of every step from
    # the device before it starts the next one.
    def on_train_batch_begin(self, batch, logs=None):
        """Looks at the steps before this one, if it is time to."""
        self._settle()
        self._step = self._epoch_start + batch
        self._prober.collect(self._step)
        due = self._step - self._last_look >= self.update_freq
        if due and self._within_budget():
            self._timed(self._look)
        if self._in_a_row >= SUSPICIOUS_STEPS:
            self._examine_if_wanted()
            self._probe_if_wanted()
        else:
            self._probe_if_wanted()
            self._examine_if_wanted()
        self._predict_scale_if_wanted()
        if not self._recorder.full:
            self._recorder.hold(self._model, self._step, self._scaling())

    def on_epoch_begin(self, epoch, logs=None):
        """Starts counting the batches of the epoch."""
        self._epoch_start = self._step

    def on_epoch_end(self, epoch, logs=None):
        """Looks at the last steps of the epoch."""
        self._step = self._step_at_epoch_end()
        self._prober.collect(self._step)
        if self._within_budget():
            self._timed(self._look)
        if self._within_budget():
            self._timed(lambda: self._prober.write_histograms(self._step))
        self._timed(self._log_layers)

    def _step_at_epoch_end(self):
        # The last call of several steps may have been cut short.
        last = self._step + getattr(self._model, "steps_per_execution", 1)
        if self.params.get("steps"):
            return min(last, self._epoch_start + self.params["steps"])
        if "" in self._watches:
            # An epoch of unknown length may end with a call of no step.
            steps = self._first_step + self._watches[""].attempted()
            return max(self._step, min(last, steps))
        return last

    # Looking.

    def _budget(self):
        elapsed = time.perf_counter() - self._begun
        spent = self._spent + self._examiner.spent + self._prober.spent
        return self.max_overhead * elapsed - spent

    def _within_budget(self):
        return self._budget() > 0

    def _examine_if_wanted(self):
        looked = self._last_look == self._step
        if (
            looked
            and not self._prober.armed
            and self._examiner.wants(self._in_a_row, self._budget())
        ):
            self._examiner.arm(self._model, self._step)

    def _probe_if_wanted(self):
        steps = self._step - self._first_step
        if (
            self.probe_every
            and not self._examiner.armed
            and self._prober.wants(
                self._model, self._step, self._budget(), steps
            )
        ):
            elapsed = time.perf_counter() - self._begun
            self._prober.arm(self._model, self._step, elapsed / steps)

    def _predict_scale_if_wanted(self):
        if self._step > self._first_step:
            return
        for optimizer in self._scaling().values():
            automatic = getattr(optimizer.rule, "initial_scale", None) == "auto"
            if automatic and not optimizer.attempted_steps:
                self._examiner.arm_first_scale(
                    self._model, optimizer, self._step
                )

    def _settle(self):
        if not self._recorder.full:
            self._recorder.settle(self.model, self._scaling())

    def _scaling(self):
        return {
            name or "optimizer": watch.optimizer
            for name, watch in self._watches.items()
        }

    def _timed(self, work):
        started = time.perf_counter()
        work()
        self._spent += time.perf_counter() - started

    def _look(self):
        if self._step == self._last_look:
            return
        self._last_look = self._step
        _ = self.model  # On JAX this brings the variables up to date.
        scalars = {}
        self._in_a_row = 0
        for name, watch in self._used_watches().items():
            reading = watch.read()
            self._in_a_row = max(self._in_a_row, reading.in_a_row)
            self._stop_if_hopeless(reading)
            if reading.new_steps or reading.grown:
                self._prober.hurry()
            scalars |= reading.scalars(name)
            self._log_skipped(name, watch, reading)
        if scalars:
            self._log.scalars(self._step, scalars)

    def _stop_if_hopeless(self, reading):
        if reading.collapsed:
            self._examiner.tell_collapse(
                reading.loss_scale, reading.in_a_row, self._step
            )
        reason = reason_to_stop(reading, self.verdicts, self.stop_after)
        if reason and not self._model.stop_training:
            self._model.stop_training = True
            self._log.event(self._step, {"kind": "stopped", "reason": reason})
            if self.verbose:
                io_utils.print_msg(f"\nMixPrecMonitor stops here: {reason}.")

    def _used_watches(self):
        # `compile` without an optimizer makes one that a `train_step` with
        # several of its own never uses.
        return {
            name: watch
            for name, watch in self._watches.items()
            if name != "optimizer" or watch.optimizer.attempted_steps
        }

    def _log_skipped(self, name, watch, reading):
        offset = self._first_step - watch.first_attempted
        for step in reading.new_steps:
            self._log.event(
                self._step,
                {
                    "kind": "skipped_step",
                    "optimizer": name,
                    "at_step": offset + step.step,
                    "scale": step.scale,
                    "variables": step.variables,
                },
            )
        if reading.unseen:
            self._log.event(
                self._step,
                {
                    "kind": "skipped_steps_not_kept",
                    "optimizer": name,
                    "count": reading.unseen,
                },
            )
        if reading.new_steps:
            self._log.text(
                self._step,
                f"mixprec/skipped_step{'/' + name if name else ''}",
                markdown_table(_rows(reading.new_steps, offset)),
            )

    def _log_layers(self):
        # With what has changed since the last step none was taken.
        if self._step == self._last_layers:
            return
        plan = PrecisionPlan.from_model(self.model)
        if plan != self._plan:
            self._plan, self._last_layers = plan, self._step
            self._log.layers(
                self._step, precision_summary(self.model).to_list()
            )

    def _summarize(self):
        model = self.model
        return TrainingSummary(
            dtypes=dict(
                Counter(
                    row["compute_dtype"]
                    for row in precision_summary(model).to_list()
                )
            ),
            optimizers={
                name: OptimizerSummary(
                    steps=w.attempted(),
                    skipped=w.optimizer.skipped_steps - w.first_skipped,
                    in_a_row=w.optimizer.consecutive_skipped_steps,
                    first_scale=w.first_scale,
                    last_scale=float(w.optimizer.loss_scale),
                    overflow_counts=w.overflow_counts(),
                )
                for name, w in self._used_watches().items()
            },
            headroom=self._prober.least_headroom(),
            folder=self._log.folder,
            unscaled_float16=lacks_loss_scaling(model),
        )


def _variable_scope(model):
    # TensorFlow's; replicas would share what is made outside of it.
    strategy = getattr(model, "distribute_strategy", None)
    return strategy.scope() if strategy else contextlib.nullcontext()


def _watch_optimizers(model):
    """Returns a `Watch` of each loss scale optimizer, by attribute name."""
    wrapper = keras.optimizers.LossScaleOptimizer
    found = {n: o for n, o in vars(model).items() if isinstance(o, wrapper)}
    changed = False
    for name, optimizer in found.items():
        # Which variables others are for only the model's `train_step` knows.
        weights = model.trainable_variables if name == "optimizer" else []
        if weights and not optimizer.built:
            optimizer.build(weights)
        found[name] = adopt(optimizer)
        if found[name] is not optimizer:
            setattr(model, name, found[name])
            changed = True
    guard = _GUARDS.setdefault(model, MetricGuard())
    guard.enabled = bool(found)
    if found:
        changed |= guard.guard(model)
    if changed:
        _remake_functions(model)
    if list(found) == ["optimizer"]:
        return {"": Watch(model.optimizer)}
    return {name: Watch(optimizer) for name, optimizer in found.items()}


def _remake_functions(model):
    # Both hold the metrics' variables.
    if getattr(model, "train_function", None) is not None:
        model.make_train_function(force=True)
    if getattr(model, "test_function", None) is not None:
        model.make_test_function(force=True)


def _rows(steps, offset):
    return [
        {
            "step": offset + step.step,
            "loss scale": format_power(step.scale),
            "non-finite gradients": ", ".join(step.variables[:5])
            + (f" and {n} more" if (n := len(step.variables) - 5) > 0 else ""),
        }
        for step in steps
    ]
