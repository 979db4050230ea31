"""Diagnoses batches of a run and reports verdicts."""

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
from keras_mixprec.diagnosis.bad_samples import bad_data_behind
from keras_mixprec.diagnosis.verdict import (
    FOUND_BY,
    Verdict,
    without_repeats,
)
from keras_mixprec.metrics import AUDITED
from keras_mixprec.monitoring.audit_schedule import audit_schedule
from keras_mixprec.monitoring.kept_states import KeptStates
from keras_mixprec.monitoring.metric_values import validated
from keras_mixprec.monitoring.speed import DIAGNOSES
from keras_mixprec.numerics.arrays import count_nonfinite, to_array
from keras_mixprec.numerics.dry_step import NotBuiltError
from keras_mixprec.policies.layers import has_own_step, walk_with_model
from keras_mixprec.reporting.schema import ERRORS
from keras_mixprec.verdict_kinds import KINDS, LOST

_DIAGNOSE, _FAILED = "diagnose this model", "diagnosis_failed"

# The suffix of the column names in `AUDITED`. The start of each name is the
# direction of the pass.
_ERROR = "_error_against_float32"

# If not even float32 repairs a fault, the next steps would show the same fault
# again. Diagnoses therefore pause for this many steps.
_PAUSE = 128

# A message announces a diagnosis that is expected to take more than 2 seconds.
# The first diagnosis is expected to take more than 2 seconds if the model has
# more than 30 layers.
_PATIENCE, _MANY = 2.0, 30


class Examiner:
    """Diagnoses batches of a model in `fit`, and reports each fault once.

    Args:
        watch: The `Watch`.

    Attributes:
        schedule: `AuditSchedule` of the model.
        states: `KeptStates` of the model.
        first_loss_due: The step at which to record the loss of the first step,
            infinity once the loss is recorded.
        paused_until: Int. No diagnosis is made before this step, because
            the last fault has nothing to do with precision.
        has_found: Boolean, whether any fault except a collapsed loss scale has
            been reported since the last repair.
    """

    def __init__(self, watch):
        self._watch = watch
        self.schedule = audit_schedule(watch.synchronized_model())
        self.states = KeptStates()
        self.first_loss_due: float = watch.first_step + 1
        self.paused_until = 0
        self.has_found = False
        self._examined_at = self._last_errors = -1
        self._last_kinds: set[str] = set()
        self._reported: set = set()
        self._collapse: Verdict | None = None
        self._validation: Any = None
        self._shared = 0

    def start_schedule(self):
        """Starts a new audit schedule."""
        self.schedule = audit_schedule(self._watch.model, new=True)

    def begin(self, model):
        """Records the state before training, to detect divergence later.

        Args:
            model: The `keras.Model`, with variables that are synchronized.
        """
        watch = self._watch
        if not watch.several_workers:
            self.states.begin(model, watch.first_step)
        with (
            contextlib.suppress(NotImplementedError),
            active.processes().single_process(model),
        ):
            self.schedule.begin(model)

    def note_first_loss(self):
        """Records the loss of the first step."""
        self.first_loss_due = math.inf
        # A custom `train_step` may not report the loss that it minimizes, so
        # ignore the reported loss.
        if not has_own_step(self._watch.model):
            sums = self._watch.counter_log.read_loss()
            self.states.note(sums)
            self.schedule.note_first_loss(sums)

    def keep_state(self):
        """Keeps the state before the next step if training is healthy."""
        watch, states = self._watch, self.states
        states.wait(watch.step)
        states.note(watch.counter_log.read_loss())
        if states.is_good and not watch.counter_log.seen.in_a_row:
            keep = partial(states.keep, watch.model, watch.step)
            watch.on_next_batch(keep)

    @property
    def has_new_zeros(self) -> bool:
        """Returns whether gradients became zero after the last diagnosis."""
        zeros = self._watch.ranges.zeros.lasting()
        return any(steps[0] > self._examined_at for steps in zeros.values())

    def diagnose(
        self,
        batch,
        follow_up: Callable,
        is_overhead: bool,
        rows: Callable | None = None,
        who: str = "",
        verbose: int = 0,
    ) -> Any:
        """Diagnoses a batch and passes the findings on.

        An error in a diagnosis ends all diagnoses, but not training.

        Args:
            batch: As for `examine`.
            follow_up: Function of an `Examination`, the examined rows and the
                step.
            is_overhead: Boolean, whether the time counts as overhead.
            rows: As for `examine`.
            who: String. The callback to name in messages. Defaults to the
                watch's.
            verbose: `0` or `1`, whether to show progress even if the settings
                do not.

        Returns:
            The result of `follow_up`, `None` if anything fails.
        """
        watch, started = self._watch, _clock.now()
        step, who = watch.step, who or watch.who
        speaker = who if verbose or watch.settings.verbose else ""
        self._last_kinds = set()
        with self.examining(who, is_overhead):
            try:
                found = self.examine(batch, speaker, rows)
                return follow_up(*found, step)
            finally:
                self.schedule.took(_clock.now() - started)
                if not self._last_kinds.isdisjoint(LOST):
                    self.paused_until = step + _PAUSE
        return None

    @contextlib.contextmanager
    def examining(self, who: str = "", is_overhead: bool | None = False):
        """Context in which an error ends diagnoses, but not training.

        Args:
            who: String. As for `diagnose`.
            is_overhead: Boolean, whether the time counts as overhead, or `None`
                if the caller counts it. Defaults to `False`.
        """
        watch, started = self._watch, _clock.now()
        try:
            yield
        except NotBuiltError as error:
            # Later diagnoses may succeed, because the first step builds the
            # model.
            if NotBuiltError not in self._reported:
                self._reported.add(NotBuiltError)
                what = "diagnose this model before its first step"
                watch.disable(what, error, who, _FAILED)
        except Exception as error:
            self.give_up(error, who)
        finally:
            if is_overhead is not None:
                seconds = _clock.now() - started
                watch.budget.add(DIAGNOSES, seconds, is_overhead)

    def examine(self, batch, who: str, rows=None, raised=False) -> tuple:
        """Diagnoses a batch now and reports its faults.

        Args:
            batch: As `train_step` takes it.
            who: String. The callback that shows progress, or `""` for none.
            rows: Function of the batch that returns the rows to examine.
                Defaults to `None`, which examines all rows.
            raised: Boolean, whether the step has raised an error. Defaults to
                `False`.

        Returns:
            The `Examination`, and the examined rows.
        """
        # Import the diagnosis lazily, because most runs do not need its 20
        # files.
        from keras_mixprec.diagnosis.in_training import examine_in_training

        watch = self._watch
        model, step, first = watch.model, watch.step, watch.first_batch
        when = f"after step {step}" if step else "before the first step"
        conclude = _announce(model, who, when, self.schedule.cost)

        def examined(few):
            return examine_in_training(
                model, few, step, self.schedule, first, raised, self.states
            )

        few = rows(batch) if rows else batch
        try:
            found = examined(few)
        except active.replay().REFUSALS:
            if few is batch:
                raise
            # The model may accept only one batch size, so diagnose the whole
            # batch.
            few = batch
            found = examined(few)
        at = step + 1 if raised or watch.is_before_step else None
        if lost := bad_data_behind(model, found):
            found = found._replace(findings=[lost, *found.findings])
        found = found._replace(
            findings=[self._located(f, at) for f in found.findings]
        )
        verdicts = [finding.verdict for finding in found.findings]
        self._last_kinds = {verdict.kind for verdict in verdicts}
        if "divergence" in self._last_kinds:
            self.look_at_task(few)
        if self.states.has_grown and self._last_kinds.isdisjoint(LOST):
            self.states.accept()
        # Skipped steps are normal while the loss scale settles, so do not
        # report them as a fault.
        faults = [v for v in verdicts if v.kind != "scale_search"]
        conclude(faults)
        self.report(faults)
        self.log_errors(found.errors)
        self._examined_at = step
        return found, few

    def _located(self, finding, at):
        verdict = finding.verdict
        if verdict.kind != "bad_data":
            return finding
        located = self._watch.bad_data.located(self._watch, verdict, at)
        return finding._replace(verdict=located)

    def look_at_validation(self, logs: dict | None):
        """Reports the faults of a validation and lets the tuner repair them.

        Args:
            logs: Dict, as Keras passes it to `on_epoch_end`.
        """
        if not (values := validated(logs)):
            return
        # Import the diagnosis lazily, because a run without validation does not
        # need the diagnosis.
        from keras_mixprec.diagnosis.examination import Examination
        from keras_mixprec.diagnosis.in_training import divergence_by_now
        from keras_mixprec.monitoring.validation import ValidationWatch

        watch = self._watch
        step, model = watch.step, watch.synchronized_model()
        if self._validation is None:
            self._validation = ValidationWatch()
        with self.examining(is_overhead=None):
            findings, events, batch = self._validation.read(
                model,
                step,
                values,
                lambda: divergence_by_now(
                    model, step, self.schedule, watch.first_batch
                ),
            )
            for event in events:
                watch.log.event(step, event)
            self.report([f.verdict for f in findings])
            if any(f.layers for f in findings):
                watch.repair(Examination(findings), batch, step)

    def examine_scale_use(self, batch):
        """Reports whether the update depends on the loss scale.

        Args:
            batch: As for `examine`.
        """
        # Do not report an error in this check: the step or the first diagnosis
        # will raise the same error.
        with self.examining(), contextlib.suppress(Exception):
            from keras_mixprec.diagnosis.examination import examine_scale_use

            watch = self._watch
            self.report(examine_scale_use(watch.model, batch, watch.step))

    def find_divergence(self) -> bool:
        """Reports a divergence if repeating earlier steps shows the cause."""
        from keras_mixprec.diagnosis.in_training import divergence_since

        step = self._watch.step
        if self.gave_up:
            return False
        with self.examining():
            kept = [*self.states.held]
            verdict = divergence_since(self._watch.model, kept, step)
            self.report([verdict] if verdict else [])
            return bool(verdict)
        return False

    def look_at_task(self, batch):
        """Reports outputs that cannot reach the targets or do not fit the loss.

        Args:
            batch: As for `examine`, or all samples of the `fit` if they are
                available.
        """
        from keras_mixprec.diagnosis.task import task_faults

        parts = keras.utils.unpack_x_y_sample_weight(batch)
        faults = task_faults(self._watch.model, *parts)
        self.report([fault.verdict(self._watch.step) for fault in faults])

    def exact_loss(self, batch) -> float:
        """Returns the loss of a batch in float32, or NaN without a loss.

        Args:
            batch: As for `examine`, or `None`.
        """
        with self.examining():
            if batch is not None:
                from keras_mixprec.diagnosis.batch import loss_in_float32

                return loss_in_float32(self._watch.model, batch)
        return np.nan

    def forget_divergence(self):
        """Forgets a divergence after the model returned to an earlier state."""
        self.forget_trouble()
        self.paused_until = 0
        self._reported -= {(kind, None, None) for kind in LOST}

    def forget_trouble(self):
        """Treats later skipped steps as a new fault."""
        self.has_found = False
        self._collapse = None

    def note_collapse(self, reading):
        """Records whether steps are skipped even at the lowest loss scale.

        `report_rest` reports the collapse, unless a diagnosis finds the cause.

        Args:
            reading: `Reading` of a collapsed loss scale, or `None`.
        """
        kind, self._collapse = "scale_collapsed", None
        if reading:
            scale, in_a_row = reading.loss_scale, reading.in_a_row
            numbers = {"loss_scale": scale, "skipped_in_a_row": in_a_row}
            self._collapse = Verdict(
                kind,
                step=self._watch.step,
                numbers=numbers,
                advice=advice(kind),
            )

    def report_rest(self):
        """Reports a collapse that no diagnosis has explained."""
        if self._collapse and not self.has_found:
            self.report([self._collapse])

    def report(self, verdicts: list[Verdict]):
        """Prints and logs verdicts, once for each fault.

        Args:
            verdicts: List of `Verdict`s.
        """
        watch, step = self._watch, self._watch.step
        new = [self._with_start(v) for v in verdicts if self._is_new(v)]
        watch.verdicts.extend(new)
        for verdict in new:
            self.has_found |= verdict.kind != "scale_collapsed"
            event = verdict.event()
            if verdict.step != step:
                event["at_step"] = verdict.step
            watch.log.event(step, event)
        for text in without_repeats(new) if watch.settings.verbose else []:
            print_message(text)

    def has_lost_weights(self) -> bool:
        """Returns whether there are non-finite weights without a verdict."""
        model = self._watch.model
        with (
            contextlib.suppress(NotImplementedError),
            active.processes().single_process(model),
        ):
            return not any(map(self.has_reported, LOST)) and any(
                count_nonfinite(to_array(v.value))
                for v in model.weights
                if "float" in v.dtype
            )
        return False

    def report_lost_weights(self):
        """Reports non-finite weights that no diagnosis has found."""
        if not self.has_lost_weights():
            return
        from keras_mixprec.diagnosis.cause import lost_weights

        kind, model = "weights_lost", self._watch.model
        with active.processes().single_process(model):
            numbers = lost_weights(model)
        text = advice(kind, **numbers)
        step = self._watch.step
        self.report([Verdict(kind, step=step, numbers=numbers, advice=text)])

    def _is_new(self, verdict):
        fault = (verdict.kind, verdict.layer, verdict.direction)
        known = fault in self._reported
        self._reported.add(fault)
        return not known

    def _with_start(self, verdict):
        """Adds the first failing step to a verdict, if earlier steps failed."""
        harms = verdict.kind == "divergence" or (
            verdict.layer and KINDS[verdict.kind].level == "bad"
        )
        in_a_row = self._watch.counter_log.seen.in_a_row
        if not harms or not verdict.step or in_a_row < 2:
            return verdict
        since = max(verdict.step - in_a_row + 1, 1)
        return dataclasses.replace(verdict, failing_since=since)

    def has_reported(self, kind: str) -> bool:
        """Returns whether a fault without a layer has been reported."""
        return (kind, None, None) in self._reported

    @property
    def has_news(self) -> bool:
        """Returns whether other workers do not know all verdicts yet."""
        return len(self._watch.verdicts) > self._shared

    def unshared(self) -> list[Verdict]:
        """Returns the verdicts to send to other workers, each one once."""
        new = self._watch.verdicts[self._shared :]
        self._shared = len(self._watch.verdicts)
        return [v for v in new if FOUND_BY not in v.numbers]

    def log_errors(self, errors: dict):
        """Logs the errors that a diagnosis measured, at most once per step."""
        step = self._watch.step
        if errors and step > self._last_errors:
            self._last_errors = step
            table = [
                [own.get(n.removesuffix(_ERROR), np.nan) for n in AUDITED]
                for own in errors.values()
            ]
            self._watch.log.heat(step, table, list(errors), AUDITED, ERRORS)

    @property
    def gave_up(self) -> bool:
        """Returns whether an error has ended all diagnoses."""
        return self._watch.is_disabled(_DIAGNOSE)

    def give_up(self, reason: Exception, who: str = ""):
        """Ends all diagnoses with a warning; training continues.

        Args:
            reason: The exception.
            who: String. As for `diagnose`.
        """
        if not self.gave_up:
            self._watch.disable(_DIAGNOSE, reason, who, _FAILED)


def _announce(model, who: str, when: str, seconds: float | None) -> Callable:
    """Prints a message before a diagnosis that is expected to take long.

    Returns a function of the verdicts that prints the result. An empty `who`
    suppresses both messages.
    """
    layers = len(walk_with_model(model)) - 1  # Do not count the model.
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
