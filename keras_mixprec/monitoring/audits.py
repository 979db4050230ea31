"""Diagnoses the next batch of `fit`, and reports verdicts."""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_mixprec import _clock
from keras_mixprec._console import print_message
from keras_mixprec.backend import active
from keras_mixprec.diagnosis.advice import advice
from keras_mixprec.diagnosis.course import Course
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
from keras_mixprec.monitoring.failures import failure_event, warn_disabled
from keras_mixprec.monitoring.overhead import DIAGNOSES
from keras_mixprec.numerics.dry_step import NotBuiltError
from keras_mixprec.reporting.schema import ERRORS
from keras_mixprec.verdict_kinds import KINDS

# What a column of `AUDITED` is called after the direction.
_ERROR = "_error_against_float32"

# What float32 does not repair either, and what the next steps have as well: no
# other diagnosis is made in so many steps, which would find the same.
_LASTING = {"divergence", "weights_lost"}
_PAUSE = 128

# Steps that a diagnosis is taken to cost: a run that shows nothing has one when
# these are the share of its steps that monitoring may take.
_COST = 20


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

    Attributes:
        verdicts: List of the `Verdict`s so far, each fault once.
        schedule: `AuditSchedule` of the model.
        in_a_row: Int. Steps skipped since the last one applied, as last read.
        paused_until: Int. The step before which no other diagnosis is made,
            after what no precision repairs.
        gave_up: Boolean. Whether a diagnosis failed, so that none follows.
        is_before_step: Boolean. Whether a step has begun that a diagnosis is
            made before. On JAX it has taken the variables of `fit` with it.
        locate: Function of a `Verdict` of bad data and the step of its batch,
            `None` if that is not known, that returns it with what else is known
            of bad data; `None` for none.
    """

    def __init__(self, log, verbose, max_overhead, budget, zeros, who):
        self.verdicts = []
        self._works = []
        self.schedule = AuditSchedule()
        self.in_a_row = 0
        self.paused_until = 0
        self._first = _COST / max_overhead if max_overhead else math.inf
        self._log = log
        self._verbose = verbose
        self._budget = budget
        self._zeros = zeros
        self.who = who
        self._examined_zeros = False
        self._examined_at = self._last_errors = -1
        self._last_kinds = set()
        self._reported = set()
        self._collapse = None
        self._examined_trouble = self._found = False
        self.gave_up = False
        self.locate: Callable | None = None
        # Before a step: warnings that are true once that is taken.
        self._unsaid: list = []
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
        if self._has_new_zeros and not self._examined_zeros:
            # A run that does not learn is lost. It is once in a run.
            self._examined_zeros = True
            return True
        narrow = not {*SIXTEEN_BITS}.isdisjoint(dtypes.values())
        return narrow and self.schedule.compare(taken, self._first)

    @property
    def _has_new_zeros(self):
        """Whether gradients are zero that no diagnosis has compared."""
        begun = [steps[0] for steps in self._zeros.lasting().values()]
        return any(step > self._examined_at for step in begun)

    @contextlib.contextmanager
    def diagnosing(self, step: int, is_overhead: bool, who: str = ""):
        """Context of `examine` and of what follows from what that returns.

        Whatever fails in it ends diagnoses, not training.

        Args:
            step: Int.
            is_overhead: Boolean. Whether it counts as overhead.
            who: String. The callback that asks, if it is another one.
        """
        with self._asked_by(who or self.who), self.errors_reported(step):
            started = _clock.now()
            self._last_kinds = set()
            try:
                yield
            finally:
                cost = self.schedule.cost = _clock.now() - started
                self._budget.add(DIAGNOSES, cost, is_overhead)
                if not self._last_kinds.isdisjoint(_LASTING):
                    self.paused_until = step + _PAUSE

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
        from keras_mixprec.monitoring.progress import progress

        when = f"after step {step}" if step else "before the first step"
        with progress(model, who, when, self.schedule.cost) as shown:
            first = self._first_batch
            few = rows(batch) if rows else batch
            try:
                found = examine_in_training(
                    model, few, step, self.schedule, first, raised
                )
            except active.replay().REFUSALS:
                if few is batch:
                    raise
                # The model may be made for batches of one size.
                few = batch
                found = examine_in_training(
                    model, few, step, self.schedule, first, raised
                )
            at = step + 1 if raised or self.is_before_step else None
            found = found._replace(
                findings=[self._located(f, at) for f in found.findings]
            )
            shown.findings = [
                finding
                for finding in found.findings
                if finding.verdict.kind != "scale_search"  # That is normal.
            ]
        self._last_kinds = {f.verdict.kind for f in found.findings}
        self._report([f.verdict for f in shown.findings], step)
        self.log_errors(found.errors, step)
        self._examined_at = step
        return found, few

    def _located(self, finding, at):
        verdict = finding.verdict
        if verdict.kind != "bad_data" or self.locate is None:
            return finding
        return finding._replace(verdict=self.locate(verdict, at))

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
        """Reports whether the update depends on the loss scale, once a model.

        Args:
            model: As for `examine`.
            batch: As for `examine`.
            step: Int.
        """
        if self.gave_up or self.schedule.scale_use_known:
            return
        self.schedule.scale_use_known = True
        started = _clock.now()
        with self.errors_reported(step):
            from keras_mixprec.diagnosis.examination import examine_scale_use

            self._report(examine_scale_use(model, batch, step), step)
        self._budget.add(DIAGNOSES, _clock.now() - started, False)

    def exact_loss(self, model, batch, step: int) -> float:
        """Returns the loss of a batch in float32, NaN if there is none.

        Args:
            model: As for `examine`.
            batch: As for `examine`, or `None`.
            step: Int.
        """
        loss, started = np.nan, _clock.now()
        with self.errors_reported(step):
            if batch is not None:
                from keras_mixprec.diagnosis.batch import loss_in_float32

                loss = loss_in_float32(model, batch)
        seconds = _clock.now() - started
        # It is a part of a repair.
        self._budget.add(DIAGNOSES, seconds, is_overhead=False)
        return loss

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

    def warn(self):
        """Says what is true only now that the step is taken."""
        unsaid, self._unsaid = self._unsaid, []
        for said in unsaid:
            warn_disabled(*said)

    def disarm(self):
        """Diagnoses no batch after all: there may be none before `fit` ends."""
        if self._function:
            self._function.cancel(self._examine_batch)

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

    def report_zeros(self, step: int):
        """Reports gradients of zero that no diagnosis has compared.

        Args:
            step: Int.
        """
        event = self._zeros.event()
        if event and self._examined_at < 0:
            self._log.event(step, event)

    def give_up(self, step: int, reason):
        """Reports that diagnoses fail; training continues.

        Args:
            step: Int.
            reason: The exception.
        """
        self.gave_up = True
        self._log.event(step, failure_event("diagnosis_failed", reason))
        self._warn("diagnose this model", reason)

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
    def _asked_by(self, who):
        before, self.who = self.who, who
        try:
            yield
        finally:
            self.who = before

    @contextlib.contextmanager
    def errors_reported(self, step: int):
        """Context in which what fails ends diagnoses, not training.

        Args:
            step: Int.
        """
        try:
            yield
        except NotBuiltError as error:
            self._put_off(step, error)
        # Whatever a diagnosis runs into, training continues.
        except Exception as error:
            self.give_up(step, error)

    def _put_off(self, step, error):
        """Reports, once, that the first step has to build the model."""
        if NotBuiltError not in self._reported:
            self._reported.add(NotBuiltError)
            self._log.event(step, failure_event("diagnosis_failed", error))
            what = "diagnose this model before its first step"
            self._warn(what, error)

    def _warn(self, what, reason):
        if self.is_before_step:
            self._unsaid.append((what, reason, self.who))
        else:
            warn_disabled(what, reason, self.who)

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
        if not harms or not verdict.step or self.in_a_row < 2:
            return verdict
        since = max(verdict.step - self.in_a_row + 1, 1)
        return dataclasses.replace(verdict, failing_since=since)
