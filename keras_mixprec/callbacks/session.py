"""What the callbacks of one `fit` share, so that together they cost once."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from keras_mixprec.backend.common import any_worker
from keras_mixprec.callbacks.fit_state import FitState, Parts
from keras_mixprec.callbacks.settings import Settings
from keras_mixprec.monitoring.attach import (
    CHARTS,
    METRICS,
    SETTINGS,
    after_epoch,
    after_errors,
    keep_watching,
    log_epoch,
    settings_of,
    stop_watching,
)
from keras_mixprec.monitoring.failing_batches import BadData
from keras_mixprec.monitoring.failures import explain_error
from keras_mixprec.monitoring.overhead import READINGS

# The attribute of a model that holds its session: elsewhere it keeps it alive.
_SESSION_ATTRIBUTE = "_keras_mixprec_session"


class Session:
    """Watches one model during one `fit`, for every callback that joins.

    The callback that joined first passes the events of `fit` on.

    Attributes:
        model: The `keras.Model`, with variables that may be out of date on
            JAX.
        parts: `Parts`, what it works with.
        state: `FitState` of this `fit`, from its first step on.
        started: Boolean. Whether it watches; not before the model is built.
        bad_data: `BadData` of this `fit`.
        on_diagnosis: What `join` was given.
    """

    def __init__(self, model, settings):
        self.model = model
        self.parts = Parts.of(model, settings)
        self.state: Any = None
        self.bad_data = BadData()
        self._members = []
        self._params = self._on_end = None
        self.on_diagnosis: Callable | None = None
        self.started = self._finished = self._has_waited = False

    @classmethod
    def join(
        cls,
        callback,
        settings: Settings,
        on_diagnosis: Callable | None = None,
        on_end: Callable | None = None,
    ) -> "Session":
        """Returns the session of a callback's model.

        Args:
            callback: A `keras.callbacks.Callback`, in its `on_train_begin`.
            settings: `Settings`.
            on_diagnosis: Function of `Examination`, batch and step, which
                follows each diagnosis after skipped steps, for a callback that
                audits the model at times of its own; with `raised=True` after
                a step that has raised. Defaults to `None`.
            on_end: Function without arguments, of that callback, for the end of
                training. Defaults to `None`.
        """
        model = callback.model
        session = vars(model).get(_SESSION_ATTRIBUTE)
        if session and session._has(callback):
            raise ValueError(
                "`callbacks` must not have one callback twice. Received: the "
                f"same {type(callback).__name__} again: {callback!r}"
            )
        # It may be left from a `fit` that an exception ended.
        if not session or session.started or not session._is_of(callback):
            if session:
                session.log.close()
            stop_watching(model)
            session = vars(model)[_SESSION_ATTRIBUTE] = cls(model, settings)
        elif settings.log_dir is not None:
            session._check_only(settings)
            session.parts = Parts.of(model, settings)
        if on_diagnosis:
            session.on_diagnosis, session._on_end = on_diagnosis, on_end
        session._params = callback.params
        session._members.append(callback)
        return session

    def _is_of(self, callback):
        """Whether this is the session of the callback's `fit`."""
        # In which Keras gives all callbacks the same dict.
        return callback.params is self._params

    def _has(self, callback):
        return self._is_of(callback) and callback in self._members

    def _check_only(self, settings):
        if self.settings.log_dir is not None:
            raise ValueError(
                "A `fit` can have one `MixPrecMonitor` only. Received: those "
                f"of log_dir={self.settings.log_dir!r} and "
                f"log_dir={settings.log_dir!r}"
            )

    def leave(self, callback):
        """The last callback to leave closes the log."""
        self._members.remove(callback)
        if not self._members:
            stop_watching(self.model)
            self.log.close()
            if vars(self.model).get(_SESSION_ATTRIBUTE) is self:
                del vars(self.model)[_SESSION_ATTRIBUTE]

    @property
    def settings(self):
        """As in `Parts`."""
        return self.parts.settings

    @property
    def log(self):
        """As in `Parts`."""
        return self.parts.log

    @property
    def budget(self):
        """As in `Parts`."""
        return self.parts.budget

    @property
    def examiner(self):
        """As in `Parts`."""
        return self.parts.examiner

    @property
    def prober(self):
        """As in `Parts`."""
        return self.parts.prober

    @property
    def counters(self):
        """As in `FitState`."""
        return self.state.counters

    @property
    def first_step(self) -> int:
        """The step at the start of this `fit`."""
        return self.state.first_step if self.state else 0

    @property
    def step(self) -> int:
        """Batches trained on, those that earlier `fit`s logged included."""
        return self.state.count.step if self.state else 0

    # What `fit` calls.

    def begin_epoch(self, callback, epoch: int):
        """Starts counting the batches of an epoch."""
        if callback is self._members[0] and self._can_start():
            self._start()
            after_epoch(self.model)
            self.state.begin_epoch()
            self.state.counter_log.begin_epoch(self.step)
            self.bad_data.begin_epoch(self.step, epoch)

    def begin_batch(self, callback, batch: int):
        """Reads the counters before this step, if it is time to."""
        if callback is not self._members[0]:
            return
        if not self._can_start():
            self._has_waited = True
            return
        self._start()
        keep_watching(self.model)
        self.state.begin_batch(batch, self._params)
        self.state.performance.clock.stamp(self.step)
        if self.step >= self.state.idle_until:
            self._act()
        if self.parts.early_stop.failed:
            self.state.count.cancel_batch()
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
        self._keep_if_failed()
        if self.step > self.first_step:
            self.budget.begin(self.step)
        self.prober.collect(self.step)
        since = self.step - self.state.counter_log.step
        due = since >= self.settings.update_freq
        if due and self.budget.left(READINGS) > 0:
            self._read_counters()
        if self.step >= self.state.next_agreement:
            self._agree()
        if self.state.counter_log.state.trouble:
            self._examine_if_wanted()
            self._probe_if_wanted()
        else:
            self._probe_if_wanted()
            self._examine_if_wanted()
        self._predict_scale_if_wanted()
        self.parts.ranges.read_if_due(self.synchronized_model, self.step)
        self.state.performance.before_step(self.step)
        if not self.parts.recorder.full:
            self.parts.recorder.hold(
                self.model, self.step + 1, self.counters.optimizers()
            )
        self.state.idle_until = self.step + self.state.idle_steps(self.parts)

    def end_epoch(self, callback, logs: dict | None):
        """Reads the counters at the end of an epoch, and what it reports."""
        if callback is not self._members[0] or not self.started:
            return
        self.parts.recorder.end_epoch()
        self.state.end_epoch(self.model, callback.params, logs)
        self.prober.collect(self.step)
        self.parts.ranges.end_epoch(self.step)
        if self.budget.left(READINGS) > 0:
            self._read_counters()
        self.state.counter_log.loss.end_epoch(self.step, logs)
        started = time.perf_counter()
        self.log_layers()
        log_epoch(self.log, self.step)
        self.budget.add(READINGS, time.perf_counter() - started)
        self.state.idle_until = self.step
        self.raise_if_failed()

    def raise_if_failed(self):
        """Ends `fit` with an exception if that was asked for."""
        self.parts.early_stop.raise_if_failed(self._members)

    def finish(self):
        """Reads the counters once more; `fit` has ended."""
        if self._finished:
            return
        self._start()  # There may have been no epoch.
        self._finished = True
        self.state.begin_epoch()
        after_epoch(self.model)
        self.synchronized_model()
        self._keep_if_failed()
        self.state.performance.clock.end_epoch(known_length=True)
        for part in self.parts.recorder, self.prober, self.examiner:
            part.disarm()
        self._read_counters()
        self.state.performance.finish(self.step)
        self._examine_at_the_end()
        if self._on_end:
            self._on_end()
        self.state.counter_log.close()
        self.log_layers()
        from keras_mixprec.monitoring import precision_settings

        precision_settings.log_end(self.log, self.step)
        self.examiner.schedule.leave(self.model, self.step - self.first_step)
        self.parts.ranges.finish(self.model, self.step)
        self.examiner.report_zeros(self.step)

    def _start(self):
        if self.started:
            return
        self.started = True
        self.model.make_train_function()  # `train_on_batch` does it too late.
        self.state = FitState.begin(self)
        explain = self.examiner.on_error = partial(explain_error, self)
        after_errors(self.model, explain)
        self.log.layout(self.step, CHARTS)
        settings = settings_of(self.model)
        self.log.settings(settings, SETTINGS, METRICS)
        # Not needed before a `fit` begins.
        from keras_mixprec.monitoring import precision_settings

        settings = settings | self.settings.logged()
        at = self.log, self.step
        precision_settings.log_begin(*at, self.has_tuner, settings)
        for event in self.settings.before_training:
            self.log.event(self.step, event)
        self.log_layers()
        self._read_counters()
        self.parts.ranges.start(self.model, self.step, self.examiner)

    def synchronized_model(self):
        """Returns the model, with variables that are those of the last step."""
        # On JAX reading `callback.model` sees to that.
        return self._members[0].model

    def nonfinite_steps(self) -> tuple[int, int]:
        """Returns how many steps were skipped or had a non-finite loss.

        And how many were skipped since the last one applied.
        """
        with self.state.counter_log.synchronized():
            return self.counters.nonfinite_steps(), self.counters.in_a_row()

    # Reading, probing, diagnosing.

    @property
    def has_tuner(self) -> bool:
        """Whether a `PrecisionTuner` is part of this `fit`."""
        return self.on_diagnosis is not None

    def _examine_if_wanted(self):
        counters, step = self.state.counter_log, self.step
        if counters.step != step or self.prober.armed:
            return
        if self.examiner.wants(counters.state.trouble, self.has_tuner):
            work = partial(self._examine, step=step)
            self.examiner.on_next_batch(self.model, step, work)

    def _examine(self, batch, step, is_overhead=True):
        if batch is None:
            return
        who = "MixPrecMonitor" * self.settings.verbose
        with self.examiner.diagnosing(step, is_overhead):
            found = self.examiner.examine(self.model, batch, step, who)
            if self.on_diagnosis:
                self.on_diagnosis(*found, step)

    def _examine_at_the_end(self):
        """Diagnoses the first batch if no next one came after a reason to."""
        state, batch = self.state, self.parts.ranges.batch
        trouble = state.counter_log.state.trouble
        # A tuner has diagnosed one by now.
        if batch is None or self.has_tuner:
            return
        alone = not state.several_workers
        reason = trouble or self.examiner.wants_zeros
        if reason and self.examiner.wants(trouble, self.has_tuner):
            self._examine(batch, self.step)
        elif alone and self.examiner.wants_comparison(self.prober.dtypes):
            self._examine(batch, self.step, is_overhead=False)

    def _probe_if_wanted(self):
        if self._wants_probe() and not self.state.several_workers:
            self.prober.arm(self.model, self.step)

    def _wants_probe(self):
        at = self.step, self.step - self.first_step
        return not self.examiner.armed and self.prober.wants(self.model, *at)

    def _agree(self):
        """Does what all workers must do at one step, if all are for it.

        A worker whose step is probed, or who stops, while others go on waits
        for them for ever: the probed step adds gradients up in its own calls.
        """
        self.state.next_agreement = self.step + self.settings.update_freq
        reason = self.state.counter_log.state.reason_to_stop
        flags = [not self._wants_probe(), reason is not None]
        unwanted, unrecoverable = any_worker(self.model, flags)
        if unrecoverable:
            reason = reason or "another worker cannot go on"
            self.parts.early_stop.stop(self.step, reason)
        elif not unwanted:
            self.prober.arm(self.model, self.step)

    def _predict_scale_if_wanted(self):
        if self.step > self.first_step:
            return
        for reader in self.counters.all():
            initial = getattr(reader.optimizer.rule, "initial_scale", None)
            if initial == "auto" and not reader.optimizer.attempted_steps:
                # Few runs begin with a scale that is measured.
                from keras_mixprec.monitoring import first_scale

                first_scale.arm_first_scale(self, reader)

    def _keep_if_failed(self):
        if not self.parts.recorder.full:
            self.parts.recorder.keep_if_failed(
                self.synchronized_model(), self.counters.optimizers()
            )

    def _read_counters(self):
        self.state.counter_log.read(self.step)
        self.state.performance.write(self.step)
        reason = self.state.counter_log.state.reason_to_stop
        if reason and not self.state.several_workers:
            self.parts.early_stop.stop(self.step, reason)

    def log_layers(self):
        """Logs what the layers compute in, if that has changed."""
        if (dtypes := self.state.layers.write(self.step)) is not None:
            self.prober.dtypes = dtypes
