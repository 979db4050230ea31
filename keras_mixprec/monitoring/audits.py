"""Diagnoses the next batch of `fit`, and reports verdicts."""

import contextlib
import dataclasses
import time
from collections.abc import Callable

import numpy as np

from keras_mixprec._console import print_message
from keras_mixprec.backend import active
from keras_mixprec.diagnosis.advice import advice
from keras_mixprec.diagnosis.verdict import Verdict, without_repeats
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.guards.train_function import DeferredCall
from keras_mixprec.metrics import AUDITED
from keras_mixprec.monitoring.audit_schedule import (
    AuditSchedule,
    audit_schedule,
)
from keras_mixprec.monitoring.failures import failure_event, warn_disabled
from keras_mixprec.monitoring.overhead import DIAGNOSES, Pause
from keras_mixprec.numerics.dry_step import NotBuiltError
from keras_mixprec.reporting.schema import ERRORS
from keras_mixprec.verdict_kinds import KINDS

# What a column of `AUDITED` is called after the direction.
_ERROR = "_error_against_float32"

# What float32 does not repair either, and what the next steps have as well.
_LASTING = {"divergence", "weights_lost"}

# Seconds that the first diagnosis of a healthy run is taken to cost.
_FIRST_COST = 1.0


class Examiner:
    """Diagnoses the next batch of a model when there is reason to.

    There is reason if the optimizer has skipped several steps in a row, once if
    gradients of layers stay exactly zero, or now and then to find what skips no
    step, as far as the budget allows.

    Args:
        log: The `RunLog`.
        verbose: `0` or `1`. Whether to print what is found.
        budget: `OverheadBudget`.
        zeros: `ZeroGradients` of the readings.
        who: String. The callback that asks, unless another one does.

    Attributes:
        verdicts: List of the `Verdict`s so far, each fault once.
        schedule: `AuditSchedule` of the model.
        in_a_row: Int. Steps skipped since the last one applied, as last read.
        pause: `Pause` after what no precision repairs.
        gave_up: Boolean. Whether a diagnosis failed, so that none follows.
        on_error: Function of an exception and a batch, as for `after_errors`,
            called after a step that raises on a batch that was handed over
            before, as that which compiles it is; `None` for none.
    """

    def __init__(self, log, verbose, budget, zeros, who):
        self.verdicts = []
        self._works = []
        self.schedule = AuditSchedule()
        self.in_a_row = 0
        self.pause = Pause(budget)
        self._log = log
        self._verbose = verbose
        self._budget = budget
        self._zeros = zeros
        self._who = who
        self._examined_zeros = False
        self._examined_at = self._last_errors = -1
        self._last_kinds = set()
        self._reported = set()
        self._collapse = None
        self._examined_trouble = self._found = False
        self.gave_up = False
        self.on_error: Callable | None = None
        self._deferred_call = DeferredCall()

    def follow_schedule_of(self, model, new: bool = False):
        """Continues the audits of a model where its last `fit` ended.

        Args:
            model: As for `audit_schedule`.
            new: As for `audit_schedule`.
        """
        self.schedule = audit_schedule(model, new)

    @property
    def armed(self) -> bool:
        """Whether the next batch is going to be diagnosed."""
        return self._deferred_call.armed

    @property
    def within_budget(self) -> bool:
        """Whether a diagnosis is within the overhead budget."""
        cost = self.schedule.cost or _FIRST_COST
        return self._budget.left(DIAGNOSES) > cost

    def wants(self, trouble: bool, has_tuner: bool) -> bool:
        """Whether to diagnose now.

        Args:
            trouble: Boolean. Whether skipped steps are more than a search for
                the loss scale.
            has_tuner: Boolean. Whether a `PrecisionTuner` audits the model, at
                times of its own.
        """
        if self.gave_up or self.armed:
            return False
        if not trouble:
            self._examined_trouble = False
        elif not self._examined_trouble and not self._found:
            # The first time, what it costs does not matter.
            self._examined_trouble = True
            return True
        if has_tuner:
            return False
        if self.wants_zeros:
            # Nor here: a run that does not learn is lost. It is once in a run.
            self._examined_zeros = True
            return True
        return self.within_budget

    @property
    def wants_zeros(self) -> bool:
        """Whether gradients of zero are reason for a diagnosis.

        One since they are zero compares them with float32: that suffices.
        """
        begun = [steps[0] for steps in self._zeros.lasting().values()]
        new = any(step > self._examined_at for step in begun)
        return new and not self._examined_zeros

    def wants_comparison(self, dtypes: dict) -> bool:
        """Whether to diagnose a run that is over and was never diagnosed.

        Args:
            dtypes: Dict from layer path to compute dtype.
        """
        never = self.schedule.cost is None and not self.gave_up
        narrow = not {*SIXTEEN_BITS}.isdisjoint(dtypes.values())
        return never and narrow and self._budget.allows_comparison

    @contextlib.contextmanager
    def diagnosing(self, step: int, is_overhead: bool, who: str = ""):
        """Context of `examine` and of what follows from what that returns.

        Whatever fails in it ends diagnoses, not training.

        Args:
            step: Int.
            is_overhead: Boolean. Whether it counts as overhead.
            who: String. The callback that asks, if it is another one.
        """
        with self._asked_by(who or self._who), self.errors_reported(step):
            started = time.perf_counter()
            self._last_kinds = set()
            try:
                yield
            finally:
                cost = self.schedule.cost = time.perf_counter() - started
                self._budget.add(DIAGNOSES, cost, is_overhead)
                if not self._last_kinds.isdisjoint(_LASTING):
                    self.pause.begin(step, cost)

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
            batch = rows(batch) if rows else batch
            found = examine_in_training(
                model, batch, step, self.schedule, raised
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
        return found, batch

    def exact_loss(
        self, model, batch, step: int, is_overhead: bool = False
    ) -> float:
        """Returns the loss of a batch in float32, NaN if there is none.

        Args:
            model: As for `examine`.
            batch: As for `examine`, or `None`.
            step: Int.
            is_overhead: Boolean. Whether it counts as overhead. Defaults to
                `False`, as a part of a repair.
        """
        loss, started = np.nan, time.perf_counter()
        with self.errors_reported(step):
            if batch is not None:
                from keras_mixprec.diagnosis.batch import loss_in_float32

                loss = loss_in_float32(model, batch)
        self._budget.add(DIAGNOSES, time.perf_counter() - started, is_overhead)
        return loss

    def on_next_batch(self, model, step: int, work):
        """Calls `work(batch)` before the model trains on its next batch.

        Args:
            model: The `keras.Model`. Its train function may be rebuilt.
            step: Int. How many steps were taken.
            work: Function. If it fails, this examiner gives up. The batch is
                `None` if only other workers have one.
        """
        self._works.append(work)
        if self.armed:
            return
        taken = None

        def examine(batch):
            nonlocal taken
            taken, works = batch, self._works
            self.disarm()
            for work in works:
                with self.errors_reported(step):
                    work(batch)

        def raised(error):
            known = self.on_error is not None and taken is not None
            return known and self.on_error(error, taken)

        tapped = active.batches().tapped(
            model, lambda *args: model.train_function(*args), examine, raised
        )
        self._deferred_call.arm(model, tapped)

    def disarm(self):
        """Diagnoses no batch after all: there may be none before `fit` ends."""
        self._works = []
        self._deferred_call.disarm()

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
        warn_disabled("diagnose this model", reason, self._who)

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
        before, self._who = self._who, who
        try:
            yield
        finally:
            self._who = before

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
            warn_disabled(what, error, self._who)

    def _report(self, verdicts, step):
        new = [*filter(self._is_new, verdicts)]
        new = [self._with_start(verdict) for verdict in new]
        self.verdicts.extend(new)
        for verdict in new:
            kind = verdict.kind
            self._found |= kind != "scale_collapsed"
            event = verdict.to_dict() | {"kind": "verdict", "verdict": kind}
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
