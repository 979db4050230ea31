"""What the callbacks of one `fit` share, so that together they cost once."""

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from keras_mixprec import _clock
from keras_mixprec._console import in_progress_bar, print_message
from keras_mixprec._fit_end import SESSION_ATTRIBUTE
from keras_mixprec.backend import active
from keras_mixprec.backend.common import (
    any_worker,
    of_all_workers,
    optimizers_of,
)
from keras_mixprec.callbacks.settings import Settings
from keras_mixprec.diagnosis.verdict import FOUND_BY, Verdict
from keras_mixprec.guards.train_function import StepCount, TrainFunction
from keras_mixprec.monitoring.attach import (
    CHARTS,
    METRICS,
    SETTINGS,
    LayerLog,
    guard_of,
    settings_of,
    stop_watching,
    watch_spikes,
)
from keras_mixprec.monitoring.audits import Examiner
from keras_mixprec.monitoring.counter_log import CounterLog
from keras_mixprec.monitoring.counters import Counters
from keras_mixprec.monitoring.failing_batches import BadData, Recorder
from keras_mixprec.monitoring.failures import (
    explain_error,
    failure_event,
    note_end,
    warn_disabled,
)
from keras_mixprec.monitoring.overhead import READINGS, OverheadBudget
from keras_mixprec.monitoring.progress import Progress
from keras_mixprec.monitoring.range_log import RangeLog
from keras_mixprec.monitoring.range_schedule import RangeReader
from keras_mixprec.numerics.held_optimizer import is_scaling
from keras_mixprec.policies.layers import has_own_step

# How often, between two readings, to ask whether one that is due is
# within budget: asking takes 20 us, 1% of a step of small layers in JAX.
_RETRIES = 8


class Task(NamedTuple):
    """Something that is done beside training, before some of the steps.

    Attributes:
        purpose: String, a verb and its object. Tasks of one purpose are given
            up together, if one of them fails.
        run: Function without arguments.
        due: Function that returns the step from which on there is something to
            do, infinite for never.
        thinned: Boolean. Whether the budget may hold it back when it is due.
    """

    purpose: str
    run: Callable
    due: Callable
    thinned: bool = False


class Session:
    """Watches one model during one `fit`, for every callback that joins.

    The callback that joined first passes the events of `fit` on.

    Attributes:
        model: The `keras.Model`, with variables that may be out of date on
            JAX.
        settings: `Settings` of the callback that has a log, if any.
        log: The `RunLog`.
        log_dir: String. Where the first worker logs, as far as is known.
        budget: `OverheadBudget`, what all of this costs.
        examiner: Diagnoses batches.
        ranges: Reads the ranges of all layers.
        range_log: `RangeLog`, which logs them.
        recorder: Keeps failing batches.
        bad_data: `BadData`.
        started: Boolean. Whether it watches; not before the model is built.
            What follows is not there before.
        first_step: Int. The step that this `fit` begins with.
        several_workers: Boolean. Whether several workers train the model
            together.
        counters: `Counters` of the model.
        counter_log: `CounterLog` of them.
        performance: `PerformanceLog`.
        progress: `Progress`, whether the model learns.
    """

    def __init__(self, model, params, settings):
        self.model = model
        self.bad_data = BadData()
        self._use(settings)
        self._members: list = []
        self._tuner: Any = None
        # In its `fit` Keras gives all callbacks the same dict.
        self._params = params
        self.started = self._finished = self._has_waited = False
        self._has_begun = self._stopped = False
        self._failure: str | None = None
        self._given_up: set[str] = set()
        self._is_diagnosis_due = self._hunts = self._has_hunted = False
        self._held: Any = None
        self.several_workers = False
        self.first_step = self._idle_until = 0
        self._next_agreement = math.inf
        self._asked_at: int | None = None
        # From the first step on.
        self._count: Any = None
        self.counters: Any = None
        self.counter_log: Any = None
        self.performance: Any = None
        self.progress = Progress(self)
        self._guard: Any = None
        self._layers: Any = None
        self._metrics: Any = None
        self._tasks: list[Task] = []

    def _use(self, settings):
        """Makes what settings ask for, with the log opened."""
        self.settings, self.log_dir = settings, settings.log_dir
        self.log = log = settings.open_log()
        verbose, share = settings.verbose, settings.max_overhead
        self.budget = OverheadBudget(share)
        self.range_log = RangeLog(log, verbose)
        # Only a monitor has a log; its session may have a tuner as well.
        has_monitor = settings.log_dir is not None
        who = "MixPrecMonitor" if has_monitor else "PrecisionTuner"
        zeros = self.range_log.zeros
        locate = partial(self.bad_data.located, self)
        in_a_row = self._in_a_row
        self.examiner = Examiner(
            log, verbose, share, self.budget, zeros, who, in_a_row, locate
        )
        self.ranges = RangeReader(log, settings, self.range_log, self.budget)
        self.recorder = Recorder(settings.keep_failing_batches)

    @classmethod
    def join(cls, callback, settings: Settings) -> "Session":
        """Returns the session of a callback's model.

        Args:
            callback: A `CopiedCallback`, in its `on_train_begin`.
            settings: `Settings`.
        """
        model, params = callback.model, callback.params
        session = vars(model).get(SESSION_ATTRIBUTE)
        is_own = session is not None and session._params is params
        if is_own and callback in session._members:
            raise ValueError(
                "`callbacks` must not have one callback twice. Received: the "
                f"same {type(callback).__name__} again: {callback!r}"
            )
        # It may be left from a `fit` that an exception ended.
        if not is_own or session.started:
            if session:
                session.log.close()
            stop_watching(model)
            session = cls(model, params, settings)
            vars(model)[SESSION_ATTRIBUTE] = session
        elif settings.log_dir is not None:
            session._check_only(settings)
            session._use(settings)
        session._members.append(callback)
        return session

    def _check_only(self, settings):
        if self.settings.log_dir is not None:
            raise ValueError(
                "A `fit` can have one `MixPrecMonitor` only. Received: those "
                f"of log_dir={self.settings.log_dir!r} and "
                f"log_dir={settings.log_dir!r}"
            )

    def add_tuner(self, tuning):
        """Lets a tuner repair what is found.

        Args:
            tuning: Object with `repair(examination, batch, step, raised)`,
                `recovers`, and `end()`, which is called at the end of training.
        """
        if self.has_tuner:
            raise ValueError(
                "A `fit` can have one `PrecisionTuner` only. Received: two in "
                "`callbacks`"
            )
        self._tuner = tuning

    def repair(self, examination, batch, step: int, raised: bool = False):
        """Lets the tuner repair what a diagnosis has found, if there is one.

        Args:
            examination: `Examination`.
            batch: What was examined, as `train_step` takes it.
            step: Int.
            raised: Boolean. Whether its step has raised. Defaults to `False`.
        """
        if self._tuner:
            self._tuner.repair(examination, batch, step, raised)

    def leave(self, callback):
        """The last callback to leave closes the log."""
        self._members.remove(callback)
        if not self._members:
            stop_watching(self.model)
            self.log.close()
            if self.several_workers:
                # The others' reports are of a log that the chief has closed.
                any_worker(self.model, [True])
            if vars(self.model).get(SESSION_ATTRIBUTE) is self:
                del vars(self.model)[SESSION_ATTRIBUTE]

    def abandon(self, error: BaseException):
        """Leaves the model as it was: an exception has ended `fit`."""
        model = self.model
        with contextlib.ExitStack() as stack:
            stack.callback(vars(model).pop, SESSION_ATTRIBUTE, None)
            stack.callback(self.log.close)
            stack.callback(stop_watching, model)
            stack.callback(self._members.clear)  # Summaries ask them.
            with contextlib.suppress(Exception):
                note_end(self, error)
            for callback in self._members:
                callback.abandoned()

    @property
    def step(self) -> int:
        """Batches trained on, those that earlier `fit`s logged included."""
        return self._count.step if self._count else 0

    # What `fit` calls.

    def begin_epoch(self, callback, epoch: int):
        """Starts counting the batches of an epoch."""
        if callback is self._members[0] and self._try_to_start():
            self._begin_epoch()
            self.counter_log.begin_epoch(self.step)
            self.bad_data.begin_epoch(self.step, epoch)

    def _begin_epoch(self):
        in_progress_bar(False)
        self._count.begin_epoch()

    def begin_batch(self, callback, batch: int):
        """Reads the counters before this step, if it is time to."""
        if callback is not self._members[0]:
            return
        if not self.started and not self._try_to_start():
            self._has_waited = True
            return
        self._guard.keep()
        # After the first batch, Keras may show a progress bar.
        verbose = (self._params or {}).get("verbose")
        in_progress_bar(batch > 0 and verbose in (1, "auto"))
        self._count.begin_batch(batch)
        step = self._count.step
        self.attempt("time steps", self.performance.clock.stamp, step)
        if step >= self._idle_until:
            self._act()
        if self._failure:
            self._count.cancel_batch()
            self.raise_if_failed()

    def _try_to_start(self):
        """Starts, unless the first batch of a loop by hand has to build it."""
        model = self.model
        # `fit` makes the train function before it begins.
        made = model.built or model.train_function is not None
        if made or self._has_waited:
            self._start()
        return self.started

    def attempt(
        self, task: str, work: Callable, *arguments, who: str = ""
    ) -> Any:
        """Does a part of the work; if it fails, training goes on without it.

        Args:
            task: String, what it does: a verb and its object.
            work: Function. What failed once is not done again.
            *arguments: What it is given.
            who: String. The callback that does it, if it is another one.

        Returns:
            What it returns, `None` if it fails or has failed.
        """
        if task in self._given_up:
            return None
        try:
            return work(*arguments)
        # Whatever it runs into, training continues.
        except Exception as error:
            self._given_up.add(task)
            event = failure_event("task_failed", error, task=task)
            self.log.event(self.step, event)
            warn_disabled(task, error, who or self.examiner.who)
        return None

    def _all_tasks(self) -> list[Task]:
        """Returns what is done beside training, in this order."""
        counters, ranges = self.counter_log, self.ranges

        def at_once(condition):
            return lambda: 0 if condition() else math.inf

        records = at_once(lambda: not self.recorder.full)
        is_read = at_once(
            lambda: self.examiner.armed or counters.step != self._asked_at
        )
        return [
            Task("keep failing batches", self._keep_if_failed, records),
            Task(
                "note the first loss",
                self._note_first_loss,
                lambda: math.inf if self._has_begun else self.first_step + 1,
            ),
            Task(
                "read the counters",
                self._read_if_due,
                lambda: counters.due_at,
            ),
            Task("", self._agree, lambda: self._next_agreement),
            Task("diagnose", self._examine_if_wanted, is_read),
            Task("diagnose", self._hunt, at_once(lambda: self._hunts)),
            Task(
                "diagnose",
                self._examine_scale_use,
                at_once(self._is_scale_use_unknown),
            ),
            Task(
                "keep good states",
                self._keep_state,
                lambda: self.examiner.states.due_at,
            ),
            # What waits last goes first: a diagnosis may change dtypes.
            Task(
                "measure layers",
                lambda: ranges.read(self.model, self.step),
                lambda: ranges.due_at,
                thinned=True,
            ),
            Task(
                "look whether the loss falls",
                self.progress.look,
                lambda: self.progress.due_at,
            ),
            Task("keep failing batches", self._hold_batch, records),
        ]

    def _act(self):
        """Does what is due, and notes when there is something to do again."""
        step = self.step
        if step > self.first_step:
            self.budget.begin()
        for task in self._tasks:
            if task.due() > step:
                continue
            if task.purpose:
                self.attempt(task.purpose, task.run)
            else:  # The other workers would wait for ever.
                task.run()
        self.attempt("time steps", self.performance.clock.go_on, step)
        # What the budget does not allow yet need not be asked for in each.
        freq = self.settings.update_freq
        retry = max(min(freq, self.settings.probe_every or freq) // _RETRIES, 1)
        dates = []
        for task in self._tasks:
            due = task.due()
            if due <= step:
                due = step + (retry if task.thinned else 1)
            if task.purpose not in self._given_up:
                dates.append(due)
        self._idle_until = min(dates)

    def watches(self, callback) -> bool:
        """Whether the `fit` of a callback that joined is under way."""
        return callback in self._members

    def begin_validation(self, callback):
        """Keeps the loss of the epoch, whose metric the validation resets."""
        if self.started and self._members[:1] == [callback]:
            self._end_stretch(callback)
            self.attempt("log the loss", self._hold_loss)
            self.budget.pause()

    def _end_stretch(self, callback):
        known_length = bool((callback.params or {}).get("steps"))
        self.performance.clock.end_epoch(known_length)

    def wait(self):
        """Waits for all steps so far."""
        with self.counter_log.synchronized():
            pass

    def _hold_loss(self):
        with self.counter_log.synchronized():
            self.counter_log.loss.hold()

    def _end_loss(self, logs):
        with self.counter_log.synchronized():
            self.counter_log.loss.end_epoch(self.step, logs)

    def end_epoch(self, callback, logs: dict | None):
        """Reads the counters at the end of an epoch, and what it reports."""
        if callback is not self._members[0] or not self.started:
            return
        attempt = self.attempt
        steps = (callback.params or {}).get("steps")
        attempted = None if steps else self.counters.attempted()
        self._end_stretch(callback)
        self._count.end_epoch(steps, attempted)
        step, metrics = self.step, self._metrics
        # The next epoch's sums begin at 0.
        if step > self.first_step and not self._has_begun:
            attempt("note the first loss", self._note_first_loss)
        attempt("look at metrics", metrics.read, self.model, step, logs)
        # Epochs of few steps are read at fewer and fewer of their ends.
        gap = min((step - self.first_step) // 8, self.settings.update_freq)
        attempt("read the counters", self._read_if_due, gap)
        attempt("look at the validation", self._look_at_validation, logs)
        attempt("log the loss", self._end_loss, logs)
        started = _clock.now()
        if self.counter_log.step == step:
            attempt("log layers", self.log_layers)
        self.budget.add(READINGS, _clock.now() - started)
        self._idle_until = min(self._idle_until, step + gap)
        self.raise_if_failed()

    def _look_at_validation(self, logs):
        from keras_mixprec.monitoring.metric_values import validated

        values = validated(logs)
        if not values:
            return
        with self.examiner.errors_reported(self.step):
            self.examiner.look_at_validation(
                self.synchronized_model(), self.step, values, self.repair
            )

    # Ending early.

    def stop(self, reason: str):
        """Stops training, once, or lets it end with an exception.

        Args:
            reason: String.
        """
        if self._stopped:
            return
        self._stopped = True
        self.log.event(self.step, {"kind": "stopped", "reason": reason})
        if self.settings.on_stop == "raise":
            where = self.log.folder or "the log of the first worker"
            self.fail(
                f"MixPrecMonitor stops at step {self.step}: {reason}. See "
                f"{where} for what is wrong, or pass `on_stop='stop'`."
            )
            return
        self.model.stop_training = True
        if self.settings.verbose:
            print_message(f"MixPrecMonitor stops here: {reason}.")

    def fail(self, reason: str):
        """Lets `fit` end with an exception as soon as it can.

        Args:
            reason: String. Its message.
        """
        self._failure = reason

    def raise_if_failed(self):
        """Raises what was asked for, with our own callbacks at their end.

        Others do not come to theirs, where `BackupAndRestore` deletes its
        backup.
        """
        reason, self._failure = self._failure, None
        if reason:
            for callback in [*self._members]:
                callback.on_train_end()
            raise FloatingPointError(reason)

    def finish(self):
        """Reads the counters once more; `fit` has ended."""
        if self._finished:
            return
        self._start()  # There may have been no epoch.
        self._finished = True
        self._begin_epoch()
        attempt, step = self.attempt, self.step
        self.synchronized_model()
        attempt("keep failing batches", self._keep_if_failed)
        self.performance.clock.end_epoch(known_length=True)
        self.examiner.disarm()
        attempt("read the counters", self._read_counters)
        attempt("time steps", self.performance.write, step, True)
        # What it shows may be reason for a diagnosis.
        attempt("measure layers", self.ranges.finish, self.model, step)
        attempt("look whether the loss falls", self.progress.finish)
        attempt("diagnose", self._examine_at_the_end)
        if self._tuner:
            self._tuner.end()
        if self.several_workers:
            attempt("share verdicts", self.share_verdicts)
        attempt("read the counters", self.counter_log.close)
        attempt("log layers", self.log_layers)
        from keras_mixprec.monitoring import precision_settings

        attempt("log settings", precision_settings.log_end, self.log, step)
        taken = step - self.first_step
        leave = self.examiner.schedule.leave
        attempt("plan audits of the next `fit`", leave, self.model, taken)

    def _start(self):
        if self.started:
            return
        # Not needed before a `fit` begins.
        from keras_mixprec.monitoring.metric_values import MetricValues
        from keras_mixprec.monitoring.performance import PerformanceLog

        self.started = True
        model, log, settings = self.model, self.log, self.settings
        model.make_train_function()  # `train_on_batch` does it too late.
        # What an earlier `fit` logged last is after the step that this begins
        # with.
        first_step = self.first_step = max(log.next_step - 1, 0)
        self._idle_until = first_step
        steps_per_call = getattr(model, "steps_per_execution", 1)
        self._count = StepCount(first_step, steps_per_call)
        self.examiner.follow_schedule_of(self.synchronized_model())
        self.several_workers = active.processes().workers(model) > 1
        to_agree_on = settings.probe_every or settings.stop_after is not None
        if self.several_workers and to_agree_on:
            self._next_agreement = first_step + settings.agree_every
        self._layers = LayerLog(model, log)
        self.counters = Counters(self.synchronized_model(), log, first_step)
        if self._tuner and self._tuner.recovers:
            watch_spikes(self.synchronized_model())
        self._guard = guard_of(model)
        self.counter_log = CounterLog(self, self.counters)
        self.performance = PerformanceLog(self)
        self._metrics = MetricValues(log)
        self._tasks = self._all_tasks()
        if not self.several_workers:
            self.examiner.states.begin(self.synchronized_model(), first_step)
        function = TrainFunction.of(self.model)
        function.on_error = partial(explain_error, self)
        attempt = self.attempt
        attempt("log settings", self._log_settings)
        attempt("log layers", self.log_layers)
        attempt("read the counters", self._read_counters)
        attempt("diagnose", self.examiner.begin, self.synchronized_model())
        self.progress.begin()
        start = self.ranges.start
        attempt("measure layers", start, self.model, self.step, self.examiner)

    def _log_settings(self):
        self.log.layout(self.step, CHARTS)
        settings = settings_of(self.model)
        self.log.settings(settings, SETTINGS, METRICS)
        # Not needed before a `fit` begins.
        from keras_mixprec.monitoring import precision_settings

        settings = settings | self.settings.logged()
        at = self.log, self.step
        model = self.model
        precision_settings.log_begin(*at, model, self.has_tuner, settings)
        for event in self.settings.before_training:
            self.log.event(self.step, event)

    def synchronized_model(self):
        """Returns the model, with variables that are those of the last step."""
        # On JAX reading `callback.model` sees to that.
        return self._members[0].model

    def _in_a_row(self):
        return self.counter_log.seen.in_a_row if self.counter_log else 0

    # Reading, diagnosing.

    @property
    def has_tuner(self) -> bool:
        """Whether a `PrecisionTuner` is part of this `fit`."""
        return self._tuner is not None

    def _examine_if_wanted(self):
        """Has the next batch diagnosed if there is reason to."""
        counters, step = self.counter_log, self.step
        self._asked_at = counters.step
        if counters.step == step and self._wants_diagnosis():
            self._is_diagnosis_due = True
            work = partial(self._examine, step=step)
            self.examiner.on_next_batch(self.model, step, work)

    def _wants_diagnosis(self):
        trouble = self.counter_log.trouble
        taken = self.step - self.first_step
        dtypes = self._layers.dtypes
        return self.examiner.wants(trouble, self.has_tuner, taken, dtypes)

    def _examine(self, batch, step):
        self._is_diagnosis_due = False
        if batch is None:
            return
        # The first one happens once.
        examiner, known = self.examiner, len(self.examiner.verdicts)
        is_overhead = examiner.schedule.cost is not None
        examiner.diagnose(self.model, batch, step, self.repair, is_overhead)
        # The next batch need not be one that fails. A tuner looks for that.
        failing = self.counter_log.trouble and bool(self.counters.used())
        is_sound = len(examiner.verdicts) == known and not examiner.gave_up
        several = getattr(self.model, "steps_per_execution", 1) > 1
        may_hunt = not (self.has_tuner or several or self._has_hunted)
        self._hunts = failing and is_sound and may_hunt

    def _hunt(self):
        """Holds each batch until its step is skipped, and examines that."""
        held, self._held = self._held, None
        optimizers = self.counters.optimizers().values()
        model = self.synchronized_model()
        if held is not None and any(o.last_step_skipped for o in optimizers):
            self._has_hunted = True
            self._examine(held, self.step)
            return

        def hold(batch):
            self._held = batch

        self.examiner.on_next_batch(model, self.step, hold)

    def _examine_at_the_end(self):
        """Diagnoses an earlier batch if no next one came after a reason to."""
        ranges, held = self.ranges, self.examiner.states.held
        batch, ranges.batch = ranges.batch, None
        if batch is None and held:
            batch = held[-1].batch
        if batch is not None and (
            self._is_diagnosis_due
            or self._wants_diagnosis()
            or self.progress.wants_comparison(self._layers.dtypes.values())
        ):
            self._examine(batch, self.step)

    def _is_scale_use_unknown(self):
        # A tuner diagnoses the first batch.
        watched = self.has_tuner or self.several_workers
        known = self.examiner.schedule.scale_use_known
        return self.model.built and not (watched or known)

    def _examine_scale_use(self):
        """Has the first batch examined, before weights can be lost."""
        model, step, examiner = self.model, self.step, self.examiner
        examiner.schedule.scale_use_known = True
        if any(map(is_scaling, optimizers_of(model).values())):
            examiner.on_next_batch(
                model,
                step,
                lambda batch: examiner.examine_scale_use(model, batch, step),
            )

    def _agree(self):
        """Does what all workers must do at one step, if all are for it.

        A worker who stops while others go on lets them wait for ever.
        """
        self._next_agreement = self.step + self.settings.agree_every
        reason = self.counter_log.reason_to_stop
        news = self.examiner.has_news
        flags = [reason is not None, news]
        unrecoverable, news = any_worker(self.model, flags)
        if news:
            self.share_verdicts()
        if unrecoverable:
            reason = reason or "another worker cannot go on"
            self.stop(reason)

    def share_verdicts(self):
        """Reports what other workers have found; every worker must call it."""
        own = {
            "log_dir": self.settings.log_dir if self.log.writes else None,
            "verdicts": [v.to_dict() for v in self.examiner.unshared()],
        }
        shared = of_all_workers(self.model, own)
        folders = [found["log_dir"] for found in shared]
        self.log_dir = next(filter(None, folders), self.log_dir)
        for worker, found in enumerate(shared):
            if worker == active.processes().rank(self.model):
                continue
            for fields in found["verdicts"]:
                verdict = Verdict(**fields)
                verdict.numbers[FOUND_BY] = f"worker {worker}"
                self.examiner.report(verdict, self.step)

    def _note_first_loss(self):
        self._has_begun = True
        if has_own_step(self.model):
            return  # It may report another loss than it trains on.
        counters = self.counter_log
        with counters.synchronized():
            self.examiner.began(counters.loss.read())

    def _keep_state(self):
        counters, model = self.counter_log, self.model
        with counters.synchronized():
            total = counters.loss.read()
        self.examiner.keep_state(model, self.step, total)

    def _keep_if_failed(self):
        if not self.recorder.full:
            self.recorder.keep_if_failed(
                self.synchronized_model(), self.counters.optimizers()
            )

    def _hold_batch(self):
        step, optimizers = self.step + 1, self.counters.optimizers()
        self.recorder.hold(self.model, step, optimizers, self.examiner)

    def _read_counters(self):
        self.counter_log.read(self.step)
        self._after_reading()

    def _read_if_due(self, gap=None):
        self.counter_log.read_if_due(self.step, gap)
        if self.counter_log.step == self.step:
            self._after_reading()

    def _after_reading(self):
        self.performance.write(self.step)
        reason = self.counter_log.reason_to_stop
        if reason and not self.several_workers:
            self.stop(reason)

    def log_layers(self):
        """Logs what the layers compute in, if that has changed."""
        self._layers.write(self.step)
