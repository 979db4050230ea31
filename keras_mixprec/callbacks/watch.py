"""Runs the tasks between the steps of one `fit`."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from keras_mixprec import _clock
from keras_mixprec._console import in_progress_bar, print_message
from keras_mixprec.backend import active
from keras_mixprec.backend.common import any_worker, of_all_workers
from keras_mixprec.diagnosis.verdict import FOUND_BY, Verdict
from keras_mixprec.guards.train_function import StepCount, TrainFunction
from keras_mixprec.monitoring.attach import LayerLog, guard_of
from keras_mixprec.monitoring.audits import Examiner
from keras_mixprec.monitoring.counter_log import CounterLog
from keras_mixprec.monitoring.counters import Counters
from keras_mixprec.monitoring.diagnoses import Diagnoses
from keras_mixprec.monitoring.failing_batches import BadData
from keras_mixprec.monitoring.failures import (
    explain_error,
    failure_event,
    warn_disabled,
)
from keras_mixprec.monitoring.held_batches import HeldBatches, keep_failing
from keras_mixprec.monitoring.metric_values import MetricValues
from keras_mixprec.monitoring.progress import Progress
from keras_mixprec.monitoring.range_log import RangeLog
from keras_mixprec.monitoring.speed import READINGS, OverheadBudget, SpeedLog
from keras_mixprec.monitoring.task import Task


class Watch:
    """Watches one model during one `fit`, for all callbacks.

    All work except training is a `Task`. Before a step, the tasks that are due
    run in the order of the list. The watch remembers the next due step, so most
    steps check no task.

    Args:
        session: The `Session`.

    Attributes:
        model: The `keras.Model`, with variables that may be out of date on
            JAX.
        settings, log, verdicts, failing_batches: As in the session.
        who: String. The name of the callback in messages.
        first_step: Int. The number of steps taken before this `fit`.
        several_workers: Boolean, whether several workers train the model
            together.
        budget: `OverheadBudget` of all tasks.
        examiner: `Examiner`, which diagnoses batches.
        held: `HeldBatches`, which waits for batches that fail.
        ranges: `RangeLog`, which reads the ranges of all layers.
        bad_data: `BadData`.
        layers: `LayerLog`.
        counters: `Counters` of the model.
        counter_log: `CounterLog`, which reads and logs the counters.
        performance: `SpeedLog`.
        progress: `Progress`, which checks that the model learns.
        tuning: The tuner's `Tuning`, `None` without a tuner.
        log_dir: String. The first worker's log folder, if it is known.
        first_batch: The first batch, `None` before.
        is_before_step: Boolean, whether work runs between the start of a step
            and its update. On JAX, the variables hold no values then.
        failure: String. The reason to end `fit` with an exception, or `None`.
    """

    def __init__(self, session):
        self._session = session
        self.model, self.settings = session.model, session.settings
        self.log = session.log
        self.verdicts = session.verdicts
        self.failing_batches = session.failing_batches
        model, log, settings = self.model, self.log, self.settings
        # Create the train function now: `train_on_batch` would create it too
        # late for the metric guard.
        model.make_train_function()
        self.log_dir = settings.log_dir
        monitor, tuner = "MixPrecMonitor", "PrecisionTuner"
        self.who = monitor if session.has_monitor else tuner
        # Step numbers continue from the last step of an earlier `fit`.
        first_step = self.first_step = max(log.next_step - 1, 0)
        self.several_workers = active.processes().workers(model) > 1
        self.first_batch: Any = None
        self.is_before_step = False
        self.failure: str | None = None
        self._has_stopped = False
        self._disabled: set[str] = set()
        self._idle_until: float = first_step
        agrees = settings.probe_every or settings.stop_after is not None
        freq = settings.update_freq
        self._agree_every = min(freq, settings.stop_after or freq)
        self._next_agreement = math.inf
        if self.several_workers and agrees:
            self._next_agreement = first_step + self._agree_every
        steps_per_call = getattr(model, "steps_per_execution", 1)
        self._count = StepCount(first_step, steps_per_call)
        self._function = TrainFunction.of(model)
        self.budget = OverheadBudget(settings.max_overhead)
        self.ranges = RangeLog(self)
        self.bad_data = BadData()
        self.examiner = Examiner(self)
        self.held = HeldBatches(self)
        self.layers = LayerLog(model, log)
        self.counters = Counters(self.synchronized_model(), log, first_step)
        self._guard = guard_of(model)
        self.counter_log = CounterLog(self)
        self.performance = SpeedLog(self)
        self._metrics = MetricValues(log)
        self.progress = Progress(self)
        self._diagnoses = Diagnoses(self)
        make = session.make_tuning
        self.tuning = make(self) if make else None
        self._tasks = self._all_tasks()

    def _all_tasks(self) -> list[Task]:
        """Returns the tasks, in the order in which they run."""
        ranges, held = self.ranges, self.held
        examiner, progress = self.examiner, self.progress

        def at(owner, name="due_at"):
            return partial(getattr, owner, name)

        first_loss = at(examiner, "first_loss_due")
        deciding = self.tuning or self._diagnoses
        return [
            Task("record the first loss", examiner.note_first_loss, first_loss),
            Task("read the counters", self._read_if_due, at(self.counter_log)),
            Task("", self._agree, at(self, "_next_agreement")),
            # Ranges are read before diagnoses, because a diagnosis may change
            # dtypes.
            Task("measure layers", ranges.read, at(ranges)),
            Task("keep good states", examiner.keep_state, at(examiner.states)),
            Task("check whether the loss falls", progress.look, at(progress)),
            *deciding.tasks(),
            Task("wait for a batch that fails", held.check, at(held)),
        ]

    def start(self):
        """Logs settings and layers, and prepares the tasks."""
        model, attempt = self.synchronized_model(), self.attempt
        self._function.explain_errors(partial(explain_error, self))
        # Import the settings code lazily, because only the start of `fit` needs
        # it.
        from keras_mixprec.monitoring.precision_settings import log_begin

        before = self._session.before_training
        attempt("log settings", log_begin, self, before)
        attempt("log layers", self.log_layers)
        attempt("read the counters", self._read_counters)
        attempt("diagnose", self.examiner.begin, model)
        attempt("check whether the loss falls", self.progress.begin)
        attempt("measure layers", self.ranges.start)
        attempt("keep failing batches", keep_failing, self)

    @property
    def step(self) -> int:
        """The number of steps taken, including those of earlier `fit`s."""
        return self._count.step

    @property
    def taken(self) -> int:
        """The number of steps taken in this `fit`."""
        return self._count.step - self.first_step

    def synchronized_model(self):
        """Returns the model, with the variables of the last step."""
        return self._session.synchronized_model()

    def begin_epoch(self, epoch: int):
        """Begins an epoch."""
        self._begin_epoch()
        self.counter_log.loss.begin_epoch(self.step)
        self.bad_data.begin_epoch(self.step, epoch)

    def _begin_epoch(self):
        in_progress_bar(False)
        self._count.begin_epoch()

    def begin_batch(self, batch: int, shows_progress: bool):
        """Runs the tasks that are due."""
        self._guard.keep()
        if shows_progress:
            in_progress_bar(True)
        self._count.begin_batch(batch)
        step = self._count.step
        self.attempt("time steps", self.performance.clock.stamp, step)
        if step >= self._idle_until:
            self._act(step)
        if self.failure:
            self._count.cancel_batch()

    def _act(self, step):
        """Runs the tasks that are due, and finds the next due step."""
        if step > self.first_step:
            self.budget.begin()
        for task in self._tasks:
            if task.due() <= step:
                self.attempt(task.purpose, task.run, who=task.who)
        self.attempt("time steps", self.performance.clock.go_on, step)
        dates = (
            t.due() for t in self._tasks if t.purpose not in self._disabled
        )
        self._idle_until = max(min(dates), step + 1)

    def attempt(
        self, task: str, work: Callable, *arguments, who: str = ""
    ) -> Any:
        """Runs a function; if it fails, its task is disabled.

        Args:
            task: As `Task.purpose`. Work with a disabled purpose is skipped.
            work: Function.
            *arguments: The arguments of the function.
            who: String. The callback to name if the function fails. Defaults to
                the watch's.

        Returns:
            The result of `work`, or `None` if it fails or is disabled.
        """
        if not task:
            return work(*arguments)
        if task in self._disabled:
            return None
        try:
            return work(*arguments)
        # An error in a monitoring task must not end training.
        except Exception as error:
            self.disable(task, error, who)
        return None

    def disable(self, task: str, error, who: str, kind: str = "task_failed"):
        """Disables a task from now on, with one warning.

        Args:
            task: As for `attempt`.
            error: The exception of the task.
            who: As for `attempt`.
            kind: String. The kind of the event.
        """
        self._disabled.add(task)
        self.log.event(self.step, failure_event(kind, error, task=task))
        warn_disabled(task, error, who or self.who)

    def is_disabled(self, task: str) -> bool:
        """Returns whether a task has failed."""
        return task in self._disabled

    def on_next_batch(self, work: Callable) -> Callable:
        """Calls `work(batch)` before the model trains on its next batch.

        The batch is `None` if only other workers have one. `work` may rebuild
        the train function.

        Returns:
            An object to pass to `waits_for`.
        """
        visit = partial(self._visit, work)
        self._function.before_next(visit)
        return visit

    def _visit(self, work, batch):
        if self.first_batch is None:
            self.first_batch = batch
        self._idle_until = 0  # Check all tasks again before the next step.
        self.is_before_step = True
        # Each task that waits for a batch counts its own seconds, so do not
        # count them here too.
        with self.examiner.examining(is_overhead=None):
            work(batch)
        self.is_before_step = False

    def waits_for(self, visit: Callable | None) -> bool:
        """Returns whether the work of `on_next_batch` is still waiting."""
        return self._function.waits(visit)

    def begin_validation(self, knows_steps: bool):
        """Keeps the loss of the epoch before a validation resets it."""
        self.performance.clock.end_epoch(knows_steps)
        self.attempt("log the loss", self.counter_log.hold_loss)
        self.budget.pause()

    def end_epoch(self, steps: int | None, logs: dict | None):
        """Reads the counters and the logs at the end of an epoch.

        Args:
            steps: Int. The number of steps of the epoch, or `None` if it is not
                known.
            logs: Dict, as Keras passes it to `on_epoch_end`.
        """
        attempt, examiner = self.attempt, self.examiner
        attempted = None if steps else self.counters.attempted()
        self.performance.clock.end_epoch(bool(steps))
        self._count.end_epoch(steps, attempted)
        step = self.step
        # Record the loss of the first step before the next epoch resets the
        # loss metric.
        if examiner.first_loss_due <= step:
            attempt("record the first loss", examiner.note_first_loss)
        attempt("look at metrics", self._metrics.read, self.model, step, logs)
        # If epochs are short, do not read the counters after every epoch. The
        # gap between two readings grows with the step count.
        gap = min(self.taken // 8, self.settings.update_freq)
        attempt("read the counters", self._read_if_due, gap)
        attempt("check the validation", examiner.look_at_validation, logs)
        attempt("log the loss", self.counter_log.end_epoch, step, logs)
        started = _clock.now()
        if self.counter_log.step == step:
            attempt("log layers", self.log_layers)
            self._idle_until = 0  # Check all tasks again before the next step.
        self.budget.add(READINGS, _clock.now() - started)
        self._idle_until = min(self._idle_until, step + gap)

    def finish(self):
        """Finishes all tasks at the end of `fit`."""
        self._begin_epoch()
        attempt, step = self.attempt, self.step
        self.synchronized_model()
        attempt("wait for a batch that fails", self.held.check)
        self.performance.clock.end_epoch(known_length=True)
        self._function.cancel()
        attempt("read the counters", self._read_counters)
        attempt("time steps", self.performance.write, step, True)
        # Read the ranges before the diagnosis, because a range may be a reason
        # to diagnose a batch.
        attempt("measure layers", self.ranges.finish)
        attempt("check whether the loss falls", self.progress.finish)
        attempt("diagnose", self._diagnoses.finish)
        if self.tuning:
            self.tuning.end()
        if self.several_workers:
            attempt("share verdicts", self.share_verdicts)
        attempt("read the counters", self.counter_log.close)
        attempt("log layers", self.log_layers)
        from keras_mixprec.monitoring.precision_settings import log_end

        attempt("log settings", log_end, self.log, step)
        leave = self.examiner.schedule.leave
        what = "plan audits of the next `fit`"
        attempt(what, leave, self.model, self.taken)

    def repair(self, examination, batch, step: int, raised: bool = False):
        """Lets the tuner, if there is one, repair the faults of a diagnosis.

        Args:
            examination: `Examination`.
            batch: The examined batch, as `train_step` takes it.
            step: Int.
            raised: Boolean, whether the step has raised an error. Defaults to
                `False`.
        """
        if self.tuning:
            self.tuning.repair(examination, batch, step, raised)

    def log_layers(self):
        """Logs the dtypes of the layers if they have changed."""
        self.layers.write(self.step)

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
            self._stop(reason)

    def _agree(self):
        """Stops all workers at the same step, and shares verdicts.

        If one worker stops alone, the others wait for it forever.
        """
        self._next_agreement = self.step + self._agree_every
        reason = self.counter_log.reason_to_stop
        flags = [reason is not None, self.examiner.has_news]
        cannot_recover, news = any_worker(self.model, flags)
        if news:
            self.share_verdicts()
        if cannot_recover:
            self._stop(reason or "another worker cannot go on")

    def share_verdicts(self):
        """Reports the verdicts of other workers; every worker must call it."""
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
                self.examiner.report([verdict])

    def _stop(self, reason):
        """Stops training, or lets it end with an exception."""
        if self._has_stopped:
            return
        self._has_stopped = True
        self.log.event(self.step, {"kind": "stopped", "reason": reason})
        if self.settings.on_stop == "raise":
            where = self.log.folder or "the log of the first worker"
            self.fail(
                f"MixPrecMonitor stops at step {self.step}: {reason}. See "
                f"{where} for the cause, or pass `on_stop='stop'`."
            )
            return
        self.end_training()
        if self.settings.verbose:
            print_message(f"MixPrecMonitor stops here: {reason}.")

    def end_training(self):
        """Lets `fit` end after this step."""
        self.model.stop_training = True

    def fail(self, reason: str):
        """Lets `fit` end with an exception as soon as possible.

        Args:
            reason: String. The message of the exception.
        """
        self.failure = reason

    def take_failure(self) -> str | None:
        """Returns and clears the reason to end `fit` with an exception."""
        reason, self.failure = self.failure, None
        return reason
