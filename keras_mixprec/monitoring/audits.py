"""Diagnoses the next batch of `fit`, and reports verdicts."""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np

from keras_mixprec import _clock
from keras_mixprec._console import print_message
from keras_mixprec.backend import active
from keras_mixprec.diagnosis.advice import advice
from keras_mixprec.diagnosis.course import Course
from keras_mixprec.diagnosis.thresholds import DIVERGED, WORSE
from keras_mixprec.diagnosis.verdict import (
    FOUND_BY,
    Verdict,
    without_repeats,
)
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.guards.train_function import TrainFunction
from keras_mixprec.metrics import AUDITED
from keras_mixprec.monitoring.audit_schedule import (
    AuditSchedule,
    audit_schedule,
)
from keras_mixprec.monitoring.failing_batches import bad_data_behind
from keras_mixprec.monitoring.failures import failure_event, warn_disabled
from keras_mixprec.monitoring.kept_states import KeptStates
from keras_mixprec.monitoring.overhead import DIAGNOSES
from keras_mixprec.numerics.dry_step import NotBuiltError
from keras_mixprec.policies.layers import walk_with_model
from keras_mixprec.reporting.schema import ERRORS
from keras_mixprec.verdict_kinds import KINDS, LOST

# What a column of `AUDITED` is called after the direction.
_ERROR = "_error_against_float32"

# Steps after what float32 does not repair either, which the next ones have: no
# other diagnosis is made in so many steps, which would find the same.
_PAUSE = 128

# Steps that a diagnosis is taken to cost: a run that shows nothing has one when
# these are the share of its steps that monitoring may take.
_COST = 20

# A diagnosis that takes longer than so many seconds is announced; the first one
# of more layers than this is expected to.
_PATIENCE, _MANY = 2.0, 30


class Examiner:
    """Diagnoses the next batch of a model when there is reason to.

    There is reason if the optimizer has skipped several steps in a row, once if
    gradients of layers stay exactly zero, or to find what skips no step: after
    so many steps, and whenever twice as many were taken.

    Args:
        log: The `RunLog`.
        verbose: `0` or `1`. Whether to print what is found.
        max_overhead: Float. Share of the steps that diagnoses of a run that
            shows nothing may take.
        budget: `OverheadBudget`.
        zeros: `ZeroGradients` of the readings.
        who: String. The callback that asks, unless another one does.
        in_a_row: Function that returns the steps skipped since the last one
            applied, as last read.
        locate: Function of a `Verdict` of bad data and the step of its batch,
            `None` if that is not known, that returns it with what else is known
            of bad data.

    Attributes:
        verdicts: List of the `Verdict`s so far, each fault once.
        schedule: `AuditSchedule` of the model.
        states: `KeptStates` of it.
        paused_until: Int. The step before which no other diagnosis is made,
            after what no precision repairs.
        gave_up: Boolean. Whether a diagnosis failed, so that none follows.
        is_before_step: Boolean. Whether a step has begun that a diagnosis is
            made before. On JAX it has taken the variables of `fit` with it.
    """

    def __init__(
        self, log, verbose, max_overhead, budget, zeros, who, in_a_row, locate
    ):
        self.verdicts = []
        self._works = []
        self.schedule = AuditSchedule()
        self.states = KeptStates()
        self.paused_until = 0
        self._first = _COST / max_overhead if max_overhead else math.inf
        self._log = log
        self._verbose = verbose
        self._budget = budget
        self._zeros = zeros
        self._in_a_row, self._locate = in_a_row, locate
        self.who = who
        self._examined_zeros = self._examined_growth = False
        self._examined_at = self._last_errors = -1
        self._last_kinds = set()
        self._reported = set()
        self._collapse = None
        self._examined_trouble = self._found = False
        self.gave_up = False
        self.is_before_step = False
        self._step = 0
        self._validation: Any = None
        self._first_batch: Any = None
        self._function: TrainFunction | None = None
        self._shared = 0

    def follow_schedule_of(self, model, new: bool = False):
        """Continues the audits of a model where its last `fit` ended.

        Args:
            model: As for `audit_schedule`.
            new: As for `audit_schedule`.
        """
        self.schedule = audit_schedule(model, new)

    def begin(self, model):
        """Notes where training begins, by which a divergence is known.

        Args:
            model: The `keras.Model`, with variables that are synchronized.
        """
        if self.schedule.start is None:
            with (
                contextlib.suppress(NotImplementedError),
                active.processes().single_process(model),
            ):
                self.schedule.start = Course.of(model, math.nan)

    def began(self, loss: tuple | None):
        """Notes the loss of the first step, unless float32's is known.

        Args:
            loss: The sum of losses and their weights, `None` for none.
        """
        self.states.note(loss)
        start = self.schedule.start
        if start and loss and loss[1] and math.isnan(start.loss):
            self.schedule.start = start._replace(loss=loss[0] / loss[1])

    @property
    def armed(self) -> bool:
        """Whether the next batch is going to be diagnosed."""
        function = self._function
        return function is not None and function.waits(self._examine_batch)

    def wants(
        self, trouble: bool, has_tuner: bool, taken: int, dtypes: dict
    ) -> bool:
        """Whether to diagnose now.

        Args:
            trouble: Boolean. Whether skipped steps are more than a search for
                the loss scale.
            has_tuner: Boolean. Whether a `PrecisionTuner` audits the model, at
                times of its own.
            taken: Int. Steps taken in this `fit`.
            dtypes: Dict from layer path to compute dtype.
        """
        if self.gave_up or self.armed:
            return False
        if not trouble:
            self._examined_trouble = False
        elif not self._examined_trouble and not self._found:
            self._examined_trouble = True
            return True
        if has_tuner:
            return False
        if self.has_grown and not self._examined_growth:
            self._examined_growth = True
            return True
        if self._has_new_zeros and not self._examined_zeros:
            # A run that does not learn is lost. It is once in a run.
            self._examined_zeros = True
            return True
        narrow = not {*SIXTEEN_BITS}.isdisjoint(dtypes.values())
        return narrow and self.schedule.compare(taken, self._first)

    @property
    def has_grown(self) -> bool:
        """Whether the loss has grown as it does where training diverges."""
        return not self.states.growth < DIVERGED

    @property
    def _has_new_zeros(self):
        """Whether gradients are zero that no diagnosis has compared."""
        begun = [steps[0] for steps in self._zeros.lasting().values()]
        return any(step > self._examined_at for step in begun)

    def diagnose(
        self,
        model,
        batch,
        step: int,
        follow_up: Callable,
        is_overhead: bool,
        rows: Callable | None = None,
        who: str = "",
        verbose: int | None = None,
    ) -> Any:
        """Diagnoses a batch, and follows what is found up.

        Whatever fails in it ends diagnoses, not training.

        Args:
            model: As for `examine`.
            batch: As for `examine`.
            step: As for `examine`.
            follow_up: Function of an `Examination`, the rows that were
                examined, and the step.
            is_overhead: Boolean. Whether it counts as overhead.
            rows: As for `examine`.
            who: String. The callback that asks, if it is another one.
            verbose: `0` or `1`. Whether that shows its progress.

        Returns:
            What `follow_up` returns, `None` if anything fails.
        """
        who, verbose = who or self.who, verbose or self._verbose
        self._last_kinds = set()
        with self.errors_reported(step, who), self._timed(is_overhead) as took:
            try:
                found = self.examine(model, batch, step, who * verbose, rows)
                return follow_up(*found, step)
            finally:
                self.schedule.cost = took()
                if not self._last_kinds.isdisjoint(LOST):
                    self.paused_until = step + _PAUSE
        return None

    @contextlib.contextmanager
    def _timed(self, is_overhead=False):
        """Context of a diagnosis; yields a function that returns its time."""
        started = _clock.now()
        try:
            yield lambda: _clock.now() - started
        finally:
            seconds = _clock.now() - started
            self._budget.add(DIAGNOSES, seconds, is_overhead)

    def examine(
        self, model, batch, step: int, who: str, rows=None, raised=False
    ):
        """Diagnoses a batch now, after `step` steps, and reports what is wrong.

        Args:
            model: The `keras.Model`, with variables that are synchronized.
            batch: As `train_step` takes it.
            step: Int.
            who: String. The callback that shows its progress, none for
                nobody.
            rows: Function of the batch that returns the rows to examine.
                Defaults to `None`, all.
            raised: Boolean. Whether the step has raised. Defaults to `False`.

        Returns:
            The `Examination`, and the rows that were examined.
        """
        # With 20 other files, which a run without a diagnosis has no use for.
        from keras_mixprec.diagnosis.in_training import examine_in_training

        when = f"after step {step}" if step else "before the first step"
        conclude = _announce(model, who, when, self.schedule.cost)
        first, kept = self._first_batch, self.states
        few = rows(batch) if rows else batch
        try:
            found = examine_in_training(
                model, few, step, self.schedule, first, raised, kept
            )
        except active.replay().REFUSALS:
            if few is batch:
                raise
            # The model may be made for batches of one size.
            few = batch
            found = examine_in_training(
                model, few, step, self.schedule, first, raised, kept
            )
        at = step + 1 if raised or self.is_before_step else None
        if lost := bad_data_behind(model, found):
            found = found._replace(findings=[lost, *found.findings])
        found = found._replace(
            findings=[self._located(f, at) for f in found.findings]
        )
        verdicts = [finding.verdict for finding in found.findings]
        if any(v.kind == "divergence" for v in verdicts):
            self.look_at_task(model, few, step)
        self._last_kinds = {verdict.kind for verdict in verdicts}
        # A search for the scale is normal.
        faults = [v for v in verdicts if v.kind != "scale_search"]
        conclude(faults)
        self._report(faults, step)
        self.log_errors(found.errors, step)
        self._examined_at = step
        return found, few

    def _located(self, finding, at):
        verdict = finding.verdict
        if verdict.kind != "bad_data":
            return finding
        return finding._replace(verdict=self._locate(verdict, at))

    def look_at_validation(self, model, step: int, values: dict, follow_up):
        """Reports what is wrong with a validation.

        Args:
            model: As for `examine`.
            step: Int.
            values: Dict from metrics to numbers, as `validated` returns it.
            follow_up: Function of an `Examination`, a batch and a step that
                repairs layers.
        """
        # With the diagnosis, which a run without validation has no use for.
        from keras_mixprec.diagnosis.examination import Examination
        from keras_mixprec.diagnosis.in_training import divergence_by_now
        from keras_mixprec.monitoring.validation import ValidationWatch

        if self._validation is None:
            self._validation = ValidationWatch()
        findings, events, batch = self._validation.read(
            model,
            step,
            values,
            lambda: divergence_by_now(
                model, step, self.schedule, self._first_batch
            ),
        )
        for event in events:
            self._log.event(step, event)
        self._report([f.verdict for f in findings], step)
        if any(f.layers for f in findings):
            follow_up(Examination(findings), batch, step)

    def examine_scale_use(self, model, batch, step: int):
        """Reports whether the update depends on the loss scale.

        Args:
            model: As for `examine`.
            batch: As for `examine`.
            step: Int.
        """
        # If it fails, so will the step itself, or the first diagnosis.
        with contextlib.suppress(Exception), self._timed():
            from keras_mixprec.diagnosis.examination import examine_scale_use

            self._report(examine_scale_use(model, batch, step), step)

    def find_divergence(self, model, step: int) -> bool:
        """Reports why a loss that has not fallen did not, if steps show it.

        Args:
            model: As for `examine`.
            step: Int. How many steps were taken.
        """
        from keras_mixprec.diagnosis.in_training import divergence_since

        if self.gave_up:
            return False
        with self.errors_reported(step), self._timed():
            verdict = divergence_since(model, [*self.states.held], step)
            if verdict:
                self._report([verdict], step)
            return bool(verdict)
        return False

    def keep_state(self, model, step: int, total: tuple | None):
        """Keeps the state before the next step, unless training fails now.

        Args:
            model: As for `examine`.
            step: Int. How many steps were taken.
            total: As for `KeptStates.note`.
        """
        states = self.states
        states.wait(step)
        states.note(total)
        if states.growth <= WORSE and not self._in_a_row():
            self.on_next_batch(model, step, partial(states.keep, model, step))

    def look_at_task(self, model, batch, step: int):
        """Reports that outputs cannot reach the targets, or suit the loss.

        Args:
            model: As for `examine`.
            batch: As for `examine`; all samples of the `fit`, if they are
                known.
            step: Int.
        """
        from keras_mixprec.diagnosis.task import task_faults

        parts = keras.utils.unpack_x_y_sample_weight(batch)
        found = task_faults(model, *parts)
        self._report([fault.verdict(step) for fault in found], step)

    def exact_loss(self, model, batch, step: int) -> float:
        """Returns the loss of a batch in float32, NaN if there is none.

        Args:
            model: As for `examine`.
            batch: As for `examine`, or `None`.
            step: Int.
        """
        with self.errors_reported(step), self._timed():
            if batch is not None:
                from keras_mixprec.diagnosis.batch import loss_in_float32

                return loss_in_float32(model, batch)
        return np.nan

    def on_next_batch(self, model, step: int, work):
        """Calls `work(batch)` before the model trains on its next batch.

        Args:
            model: The `keras.Model`. Its train function may be rebuilt.
            step: Int. How many steps were taken.
            work: Function. If it fails, this examiner gives up. The batch is
                `None` if only other workers have one.
        """
        self._step = step
        if not self.armed:
            self._works = []
            self._function = TrainFunction.of(model)
            self._function.before_next(self._examine_batch)
        self._works.append(work)

    def _examine_batch(self, batch):
        works, self._works = self._works, []
        if self._first_batch is None:
            self._first_batch = batch
        self.is_before_step = True
        for work in works:
            with self.errors_reported(self._step):
                work(batch)
        self.is_before_step = False

    def disarm(self):
        """Diagnoses no batch after all: there may be none before `fit` ends."""
        if self._function:
            self._function.cancel(self._examine_batch)

    def forget_divergence(self, step: int):
        """Takes what comes for new: the model is what it was before.

        Args:
            step: Int. How many steps were taken.
        """
        self.forget_trouble()
        self.paused_until = step
        self._reported -= {(kind, None, None) for kind in LOST}

    def forget_trouble(self):
        """Takes skipped steps from here on for a new fault."""
        self._found = self._examined_trouble = False
        self._collapse = None

    def report_collapse(self, loss_scale: float, in_a_row: int, step: int):
        """Reports that the loss scale is at its floor and does not help.

        Unless the cause is reported, or a diagnosis has yet to find it.
        """
        kind = "scale_collapsed"
        numbers = {"loss_scale": loss_scale, "skipped_in_a_row": in_a_row}
        self._collapse = Verdict(
            kind, step=step, numbers=numbers, advice=advice(kind)
        )
        if self.gave_up or self._examined_trouble and not self.armed:
            self.report_rest(step)

    def report(self, verdict: Verdict, step: int):
        """Reports what was found without a diagnosis, once.

        Args:
            verdict: `Verdict`.
            step: Int.
        """
        self._report([verdict], step)

    @property
    def has_news(self) -> bool:
        """Whether there are verdicts that other workers do not know."""
        return len(self.verdicts) > self._shared

    def unshared(self) -> list[Verdict]:
        """Returns the verdicts that other workers do not know, once."""
        new = self.verdicts[self._shared :]
        self._shared = len(self.verdicts)
        return [v for v in new if FOUND_BY not in v.numbers]

    def has_reported(self, kind: str) -> bool:
        """Whether a fault of no layer has been reported."""
        return (kind, None, None) in self._reported

    def report_rest(self, step: int):
        """Reports a collapse that no diagnosis has found the cause of."""
        if self._collapse and not self._found:
            self._report([self._collapse], step)

    def give_up(self, step: int, reason, who: str = ""):
        """Reports that diagnoses fail; training continues.

        Args:
            step: Int.
            reason: The exception.
            who: String. The callback that asked, if it is another one.
        """
        if self.gave_up:
            return
        self.gave_up = True
        self._log.event(step, failure_event("diagnosis_failed", reason))
        warn_disabled("diagnose this model", reason, who or self.who)

    def log_errors(self, errors: dict, step: int):
        """Logs what a diagnosis measured, once for each step."""
        if errors and step > self._last_errors:
            self._last_errors = step
            table = [
                [own.get(n.removesuffix(_ERROR), np.nan) for n in AUDITED]
                for own in errors.values()
            ]
            self._log.heat(step, table, list(errors), AUDITED, ERRORS)

    @contextlib.contextmanager
    def errors_reported(self, step: int, who: str = ""):
        """Context in which what fails ends diagnoses, not training.

        Args:
            step: Int.
            who: String. The callback that asks, if it is another one.
        """
        try:
            yield
        except NotBuiltError as error:  # The first step has to build it.
            if NotBuiltError not in self._reported:
                self._reported.add(NotBuiltError)
                self._log.event(step, failure_event("diagnosis_failed", error))
                what = "diagnose this model before its first step"
                warn_disabled(what, error, who or self.who)
        # Whatever a diagnosis runs into, training continues.
        except Exception as error:
            self.give_up(step, error, who)

    def _report(self, verdicts, step):
        new = [*filter(self._is_new, verdicts)]
        new = [self._with_start(verdict) for verdict in new]
        self.verdicts.extend(new)
        for verdict in new:
            self._found |= verdict.kind != "scale_collapsed"
            event = verdict.event()
            if verdict.step != step:  # It is reported later than it happened.
                event["at_step"] = verdict.step
            self._log.event(step, event)
        for text in without_repeats(new) if self._verbose else []:
            print_message(text)

    def _is_new(self, verdict):
        fault = (verdict.kind, verdict.layer, verdict.direction)
        known = fault in self._reported
        self._reported.add(fault)
        return not known

    def _with_start(self, verdict):
        """The verdict with the step since which what it names fails steps."""
        harms = verdict.kind == "divergence" or (
            verdict.layer and KINDS[verdict.kind].level == "bad"
        )
        in_a_row = self._in_a_row()
        if not harms or not verdict.step or in_a_row < 2:
            return verdict
        since = max(verdict.step - in_a_row + 1, 1)
        return dataclasses.replace(verdict, failing_since=since)


def _announce(model, who: str, when: str, seconds: float | None) -> Callable:
    """Announces a diagnosis that begins, if it is expected to take long.

    Returns a function of the verdicts, which says at the end what came of it.
    `who` is empty to be silent.
    """
    layers = len(walk_with_model(model)) - 1  # The model itself is in it.
    long = layers > _MANY if seconds is None else seconds > _PATIENCE
    started = _clock.now()
    if who and long:
        print_message(f"{who}: checking {layers} layers {when} ...")

    def conclude(verdicts):
        took = _clock.now() - started
        if not who or not (long or took > _PATIENCE):
            return
        count = len({verdict.layer for verdict in verdicts} - {None})
        what = f": {count} at fault" if count else ""
        if not verdicts:
            what = ": none at fault"
        print_message(
            f"{who}: checked {layers} layers {when} in {took:.1f} s{what}."
        )

    return conclude
