"""What the callbacks of one `fit` share, so that together they cost once."""

import math
import time

from keras_mixprec.backend import active
from keras_mixprec.backend.common import any_worker
from keras_mixprec.callbacks.settings import Settings
from keras_mixprec.guards.train_function import StepCount
from keras_mixprec.monitoring.attach import (
    CHARTS,
    LayerLog,
    after_epoch,
    keep_watching,
    settings_of,
    stop_watching,
)
from keras_mixprec.monitoring.audits import Examiner
from keras_mixprec.monitoring.counter_log import ROWS_BY_VARIABLE, CounterLog
from keras_mixprec.monitoring.counters import Counters, EarlyStop
from keras_mixprec.monitoring.failing_batches import BadData, Recorder
from keras_mixprec.monitoring.overhead import LOOKS, OverheadBudget
from keras_mixprec.monitoring.probe_schedule import Prober
from keras_mixprec.monitoring.range_schedule import RangeReader
from keras_mixprec.monitoring.recorded_steps import TRIGGER_STEPS
from keras_mixprec.reporting.layer_tables import Thinning

# How often, between two looks or probes, to ask whether one that is due is
# within budget: asking takes 20 us, 1% of a step of small layers in JAX.
_RETRIES = 8

# The attribute of a model that holds its session: elsewhere it keeps it alive.
_KEPT_AS = "_keras_mixprec_session"


class Session:
    """Watches one model during one `fit`, for every callback that joins.

    The callback that joined first passes the events of `fit` on.

    Attributes:
        model: The `keras.Model`, with variables that may be out of date on
            JAX.
        first_step: Int. The step at the start of this `fit`.
        log: The `RunLog`.
        counters: `Counters` of the model, from the first step on.
        budget: `OverheadBudget`, what all of this costs.
        examiner, prober, ranges, recorder: The parts that diagnose, measure
            and keep.
        early_stop: `EarlyStop` of this `fit`.
        started: Boolean. Whether it watches; not before the model is built.
        bad_data: `BadData` of this `fit`.
    """

    def __init__(self, model, settings):
        self.model = model
        self.counters = None
        self.first_step = 0
        self._count = StepCount(0, 1)
        self.bad_data = BadData()
        self._members = []
        self._leader = self._params = None
        self.started = self._finished = self._has_waited = False
        self._configure(settings)

    @classmethod
    def join(
        cls, callback, settings: Settings, modest: bool = False
    ) -> "Session":
        """Returns the session of a callback's model.

        Args:
            callback: A `keras.callbacks.Callback`, in its `on_train_begin`.
            settings: `Settings`.
            modest: Boolean. Whether another callback's settings go before.
                Defaults to `False`.
        """
        model = callback.model
        session = vars(model).get(_KEPT_AS)
        # It may be left from a `fit` that an exception ended.
        if not session or session.started or not session._is_of(callback):
            if session:
                session.log.close()
            stop_watching(model)
            session = vars(model)[_KEPT_AS] = cls(model, settings)
        elif not modest:
            session._check_only(callback)
            session._configure(settings)
        if not modest:
            session._leader = callback
        session._params = callback.params
        session._members.append(callback)
        return session

    def _is_of(self, callback):
        """Whether this is the session of the callback's `fit`."""
        # In which Keras gives all callbacks the same dict.
        return callback.params is self._params and callback not in self._members

    def _check_only(self, callback):
        if self._leader is not None:
            raise ValueError(
                "A `fit` can have one `MixPrecMonitor` only. Received: those "
                f"of log_dir={self._leader.log_dir!r} and "
                f"log_dir={callback.log_dir!r}"
            )

    def leave(self, callback):
        """The last callback to leave closes the log."""
        self._members.remove(callback)
        if not self._members:
            stop_watching(self.model)
            self.log.close()
            if vars(self.model).get(_KEPT_AS) is self:
                del vars(self.model)[_KEPT_AS]

    def _configure(self, settings):
        self.settings = settings
        self.log = log = settings.open_log()
        verbose = settings.verbose
        self.budget = OverheadBudget(settings.max_overhead)
        self.examiner = Examiner(log, verbose, self.budget)
        self.prober = Prober(
            log,
            settings.probe_every,
            settings.max_overhead,
            verbose,
            self.budget,
        )
        self.ranges = RangeReader(
            self.model, log, settings, self.prober, self.budget
        )
        self.recorder = Recorder(settings.keep_failing_batches)
        self.early_stop = EarlyStop(self.model, log, settings)

    @property
    def step(self) -> int:
        """Batches trained on, those that earlier `fit`s logged included."""
        return self._count.step

    # What `fit` calls.

    def begin_epoch(self, callback, epoch: int):
        """Starts counting the batches of an epoch."""
        if callback is self._members[0] and self._can_start():
            self._start()
            after_epoch(self.model)
            self._count.begin_epoch()
            self.bad_data.begin_epoch(self.step, epoch)

    def begin_batch(self, callback, batch: int):
        """Looks at the steps before this one, if it is time to."""
        if callback is not self._members[0]:
            return
        if not self._can_start():
            self._has_waited = True
            return
        self._start()
        keep_watching(self.model)
        self._count.begin_batch(batch)
        if self.step >= self._idle_until:
            self._act()
        if self.early_stop.failed:
            self._count.cancel_batch()
            self.raise_if_failed()

    def _can_start(self):
        # In a loop written by hand its first batch may build the model; `fit`
        # makes the train function before it begins.
        return (
            self.started
            or self.model.built
            or self.model.train_function is not None
            or self._has_waited
        )

    def _act(self):
        self._settle()
        if self.step > self.first_step:
            self.budget.begin(self.step)
        self.prober.collect(self.step)
        due = self.step - self._counter_log.step >= self.settings.update_freq
        if due and self.budget.left(LOOKS) > 0:
            self._look()
        if self.step >= self._next_vote:
            self._vote()
        if self._counter_log.in_a_row >= TRIGGER_STEPS:
            self._examine_if_wanted()
            self._probe_if_wanted()
        else:
            self._probe_if_wanted()
            self._examine_if_wanted()
        self._predict_scale_if_wanted()
        self.ranges.read_if_due(self.synchronized_model, self.step)
        if not self.recorder.full:
            self.recorder.hold(
                self.model, self.step, self.counters.optimizers()
            )
        self._idle_until = self.step + self._idle_steps()

    def _idle_steps(self):
        """In how many steps there may be something to do."""
        armed = self.prober.armed or self.examiner.armed
        if armed or not self.recorder.full or self.step == self.first_step:
            return 1
        freq = self.settings.update_freq
        probe = self._next_vote if self._shared else self.prober.due_at
        dates = self._counter_log.step + freq, probe, self.ranges.due_at
        due = [at - self.step for at in dates]
        if min(due) > 0:
            return min(due)
        # What the budget does not allow yet need not be asked for in each.
        every = self.settings.probe_every or freq
        retry = max(min(freq, every) // _RETRIES, 1)
        return min([retry, *(steps for steps in due if steps > 0)])

    def end_epoch(self, callback):
        """Looks at the last steps of an epoch."""
        if callback is not self._members[0] or not self.started:
            return
        self.recorder.end_epoch()
        steps = (callback.params or {}).get("steps")
        attempted = None if steps else self.counters.attempted()
        self._count.end_epoch(steps, attempted)
        self.prober.collect(self.step)
        self.ranges.end_epoch()
        if self.budget.left(LOOKS) > 0:
            self._look()
        started = time.perf_counter()
        if self.budget.left(LOOKS) > 0 and self._by_epoch.due():
            self.prober.write_histograms(self.step)
        self.log_layers()
        self.budget.add(LOOKS, time.perf_counter() - started)
        self._idle_until = self.step
        self.raise_if_failed()

    def raise_if_failed(self):
        """Ends `fit` with an exception if that was asked for."""
        self.early_stop.raise_if_failed(self._members)

    def finish(self):
        """Takes the last look; `fit` has ended."""
        if self._finished:
            return
        self._start()  # There may have been no epoch.
        self._finished = True
        self._count.begin_epoch()
        after_epoch(self.model)
        self.synchronized_model()
        self._settle()
        for part in self.recorder, self.prober, self.examiner:
            part.disarm()
        self._look()
        self._counter_log.close()
        self.log_layers()
        self.examiner.schedule.leave(self.model, self.step - self.first_step)
        self.ranges.finish(self.model, self.step)

    def _start(self):
        if self.started:
            return
        self.started = True
        # In `fit` there is one; `train_on_batch` makes it too late.
        self.model.make_train_function()
        # What an earlier `fit` logged last is after the step that this begins
        # with.
        self.first_step = max(self.log.next_step - 1, 0)
        self._count = StepCount(
            self.first_step, getattr(self.model, "steps_per_execution", 1)
        )
        self._idle_until = self.first_step
        self._layers = LayerLog(self.model, self.log)
        self.examiner.follow_schedule_of(self.synchronized_model())
        self._shared = active.processes().workers(self.model) > 1
        settings = self.settings
        to_agree_on = settings.probe_every or settings.stop_after is not None
        self._next_vote = math.inf
        if self._shared and to_agree_on:
            self._next_vote = self.first_step + settings.update_freq
        self._by_epoch = Thinning(ROWS_BY_VARIABLE)
        self.counters = Counters(self.synchronized_model(), self.log, self.step)
        self._counter_log = CounterLog(self)
        self.log.layout(self.step, CHARTS)
        self.log.settings(settings_of(self.model))
        self.log.event(
            self.step, {"kind": "train_begin", "fit": self.log.fits + 1}
        )
        for event in settings.before_training:
            self.log.event(self.step, event)
        self.log_layers()
        self._look()
        self.ranges.start(self.model, self.step, self.examiner)

    def synchronized_model(self):
        """Returns the model, with variables that are those of the last step."""
        # On JAX reading `callback.model` sees to that.
        return self._members[0].model

    def bad_steps(self) -> tuple[int, int]:
        """Returns how many steps were skipped or had a non-finite loss.

        And how many were skipped since the last one applied.
        """
        with self._counter_log.synchronized():
            return self.counters.bad_steps(), self.counters.in_a_row()

    # Looking.

    def _examine_if_wanted(self):
        looked = self._counter_log.step == self.step
        if (
            looked
            and not self.prober.armed
            and self.examiner.wants(self._counter_log.in_a_row)
        ):
            self.examiner.arm(self.model, self.step)

    def _probe_if_wanted(self):
        if self._wants_probe() and not self._shared:
            self.prober.arm(self.model, self.step)

    def _wants_probe(self):
        steps = self.step - self.first_step
        return not self.examiner.armed and self.prober.wants(
            self.model, self.step, steps
        )

    def _vote(self):
        """Does what all workers must do at one step, if all are for it.

        A worker whose step is probed, or who stops, while others go on waits
        for them for ever: the probed step adds gradients up in its own calls.
        """
        self._next_vote = self.step + self.settings.update_freq
        reason = self._counter_log.reason_to_stop
        flags = [not self._wants_probe(), reason is not None]
        unwanted, unrecoverable = any_worker(self.model, flags)
        if unrecoverable:
            reason = reason or "another worker cannot go on"
            self.early_stop.stop(self.step, reason)
        elif not unwanted:
            self.prober.arm(self.model, self.step)

    def _predict_scale_if_wanted(self):
        if self.step > self.first_step:
            return
        for watch in self.counters.all():
            optimizer = watch.optimizer
            automatic = getattr(optimizer.rule, "initial_scale", None) == "auto"
            if automatic and not optimizer.attempted_steps:
                self.examiner.arm_first_scale(self.model, watch, self.step)

    def _settle(self):
        if not self.recorder.full:
            self.recorder.settle(
                self.synchronized_model(), self.counters.optimizers()
            )

    def _look(self):
        self._counter_log.read(self.step)
        reason = self._counter_log.reason_to_stop
        if reason and not self._shared:
            self.early_stop.stop(self.step, reason)

    def log_layers(self):
        """Logs what the layers compute in, if that has changed."""
        dtypes = self._layers.write(self.step)
        if dtypes is not None:
            self.prober.dtypes = dtypes
