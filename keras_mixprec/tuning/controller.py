"""Decides when to diagnose, demote, undo and return to 16 bits."""

import math
from collections import deque
from functools import partial

from keras_mixprec.backend.common import any_worker
from keras_mixprec.diagnosis.batch import head, rows_to_examine
from keras_mixprec.monitoring.attach import watch_spikes
from keras_mixprec.monitoring.task import Task
from keras_mixprec.tuning.history import BY_HAND, TunerHistory
from keras_mixprec.tuning.promotion import Probation, layers_that_may_return
from keras_mixprec.tuning.proposal import WorkerProposal, propose, rungs_here
from keras_mixprec.tuning.recovery import Recovery
from keras_mixprec.tuning.trigger import Trigger
from keras_mixprec.tuning.validation import Validation

# Early in training, the counters are read each time the step count has grown by
# 1/8.
_READINGS_GROW = 8

# Layers return to 16 bits only if they work on this many of the last failing
# batches.
_EVIDENCE = 4


class Tuning:
    """Decides when to diagnose a batch, and makes the repairs.

    Several workers agree on each decision, so they make the same change at the
    same step. Each worker diagnoses its own batches, and all findings count.

    Args:
        tuner: The `PrecisionTuner`, for its arguments and its history.
        repairs: `Repairs` of the model.
        before: List of arguments for `TunerHistory.report`, for changes made
            before training.
        held_back: `HeldBack`, or `None`.
        watch: The `Watch`.

    Attributes:
        keeps_scale: Boolean, whether to restore a loss scale that only bad data
            lowered.
        records: `TunerHistory`.
    """

    def __init__(self, tuner, repairs, before, held_back, watch):
        self.keeps_scale = not (watch.several_workers or tuner.dry_run)
        self.records = records = TunerHistory(tuner, watch, repairs)
        self._repairs = repairs
        self._tuner = tuner
        self._watch = watch
        self._before = before
        self._rungs = rungs_here(tuner.rungs, tuner.bfloat16)
        self._validation = Validation(tuner, watch, repairs, records, held_back)
        self._trigger = Trigger(watch)
        self._recovers = tuner.recover and not tuner.dry_run
        self._recovery = Recovery(watch, repairs, tuner.max_returns)
        if self._recovers:
            watch_spikes(watch.synchronized_model())
        self._has_begun = self._has_given_up = False
        # The next step at which the tuner reads the counters.
        self._due: float = 0
        # True if non-finite steps were the reason for the last diagnosis.
        self._triggered = False
        self._changed_at: int | None = None
        self._evidence: deque = deque(maxlen=_EVIDENCE)
        # The batch whose loss is compared after a demotion, to detect
        # divergence.
        self._sample = None
        self._probation: Probation | None = None
        # With several workers, an error must end training, because the other
        # workers would wait for the failed worker. A task with an empty purpose
        # ends training if it fails.
        self._purpose = "" if watch.several_workers else "tune this model"

    def tasks(self) -> list[Task]:
        """Returns the tasks of a `fit`, in the order in which they run."""
        who = "PrecisionTuner"
        return [
            Task(
                "", self._begin, lambda: math.inf if self._has_begun else 0, who
            ),
            Task(
                self._purpose,
                self.records.rebuild,
                lambda: 0 if self._repairs.is_rebuilt else math.inf,
                who,
            ),
            Task(
                self._purpose,
                self._compare,
                lambda: self._probation.due if self._probation else math.inf,
                who,
            ),
            Task(
                self._purpose,
                self._look,
                lambda: math.inf if self._has_given_up else self._due,
                who,
            ),
        ]

    def end(self):
        """Signs off the plan at the end of `fit`."""
        step = self._watch.step
        self._recovery.end()
        self._validation.sign_off(step, not self._has_given_up)
        self._repairs.end(step)
        self.records.rebuild()

    def _begin(self):
        self._has_begun = True
        watch, step = self._watch, self._watch.step
        # Validate the arguments first, so that a mistake in them ends `fit`
        # before anything is reported.
        self._validation.begin(step)
        for kind, message, fields in self._before:
            self.records.report(kind, step, message, **fields)
        self._trigger.read(step)
        self._repairs.begin(step)
        self._due = step + 1
        examiner = watch.examiner
        # All workers must audit at the same steps. If one worker starts a new
        # schedule of audits, all workers start one.
        (new,) = any_worker(watch.model, [examiner.schedule.is_new])
        if new:
            examiner.start_schedule()
        if examiner.schedule.steps_left(0) <= 0:
            self._audit(step)
        elif step == 0:
            examiner.log_errors(examiner.schedule.errors)

    def _look(self):
        """Reads the counters, and starts a diagnosis if one is due."""
        watch, step = self._watch, self._watch.step
        schedule = watch.examiner.schedule
        # Read the counters often early on, because most faults show in the
        # first steps.
        gap = min(watch.taken // _READINGS_GROW, self._tuner.update_freq)
        self._due = step + max(gap, 1)
        left = schedule.steps_left(watch.taken)
        if left > 0:
            self._due = min(self._due, step + left)
        triggered = self._trigger.read(step)
        if self._recovers and self._looks_at_spikes(step):
            return
        if self._is_cooling(step):
            return
        is_due = left <= 0 or watch.examiner.states.has_grown
        if not (triggered or is_due) or not self._may_examine(step):
            self._return_if_quiet(step)
        elif triggered:
            self._trigger.examined()
            self._wait(step)
        else:
            self._audit(step)

    def _wait(self, step):
        """Waits for a batch that fails, because the next batch may be sound."""
        trigger, held = self._trigger, self._watch.held
        before = trigger.count()

        def has_failed():
            return trigger.count() > before

        if held.wait(self._purpose, self._captured, has_failed, trigger.span):
            self._due = math.inf
        else:
            self._examine_next(step, triggered=True)

    def _captured(self, held):
        step = self._watch.step
        self._due = step + 1
        if held is None:
            self._trigger.false_alarm()
        else:
            self._examine_together(held.batch, step, triggered=True)

    def _audit(self, step):
        schedule = self._watch.examiner.schedule
        is_overhead = schedule.is_overhead
        schedule.audit(self._watch.taken)
        self._examine_next(step, triggered=False, is_overhead=is_overhead)

    def _may_examine(self, step):
        """Returns whether all workers may make a diagnosis now."""
        examiner = self._watch.examiner
        not_here = examiner.gave_up or step < examiner.paused_until
        (not_yet,) = any_worker(self._watch.model, [not_here])
        return not not_yet

    def _is_cooling(self, step):
        changed = self._changed_at
        # A demotion before the first step needs no cooldown, because the first
        # batch may not show all faults.
        if changed in (None, self._watch.first_step):
            return False
        return step < changed + self._tuner.cooldown

    def _examine_next(self, step, **how):
        work = partial(self._examine_together, step=step, **how)
        self._watch.on_next_batch(work)

    def _examine_together(self, batch, step, triggered, is_overhead=False):
        """Diagnoses one batch on every worker at the same step.

        Args:
            batch: As `train_step` takes it, or `None` if only other workers
                have a batch.
            step: Int.
            triggered: Boolean, whether non-finite steps are the reason. If so,
                the whole batch is examined.
            is_overhead: Boolean, whether the time counts as overhead. If so,
                only the first rows are examined.
        """
        self._triggered = triggered
        if self._sample is None or not triggered:
            self._sample = batch
        watch, rows, own = self._watch, None, None
        if not triggered:
            examined = head if is_overhead else rows_to_examine
            rows = partial(examined, watch.model)
        if batch is not None:
            own = watch.examiner.diagnose(
                batch,
                self.repair,
                is_overhead,
                rows,
                who="PrecisionTuner",
                verbose=self._tuner.verbose,
            )
        if watch.several_workers:
            watch.share_verdicts()
            self._decide(own or WorkerProposal({}), step)

    def repair(
        self, examination, batch, step, raised=False
    ) -> WorkerProposal | None:
        """Repairs the faults of a diagnosis.

        With several workers, the method only proposes a repair.

        Args:
            examination: `Examination`.
            batch: The examined batch, as `train_step` takes it.
            step: Int.
            raised: Boolean, whether the step has raised an error. Such a repair
                does not wait for the cooldown.

        Returns:
            The proposal, or `None` if no change is allowed now.
        """
        if raised:
            self._changed_at = None
        # Several workers must audit at the same steps, so no worker moves its
        # next audit forward.
        if not self._watch.several_workers:
            sooner = self._watch.examiner.schedule.hurry()
            if sooner is not None:
                self._due = min(self._due, step + sooner)
            self._trigger.explain(examination.bits_to_fall())
        may_return = self._recovers and not self._has_given_up
        if may_return and self._recovery.helps(examination):
            self._returned(step, *self._recovery.run(examination))
            return None
        if self._changes_nothing(step):
            return None
        model = self._watch.model
        proposal = propose(examination, model, batch, step, self._rungs)
        if proposal:
            self._evidence.append(batch)
        collapsed = self._watch.counters.collapsed()
        own = WorkerProposal.of(proposal, examination, collapsed)
        if not self._watch.several_workers:
            self._decide(own, step)
        return own

    def _changes_nothing(self, step):
        return self._has_given_up or self._is_cooling(step)

    def _decide(self, own, step):
        if self._changes_nothing(step):
            return
        agreed = own.agreed(self._watch.model, step)
        if agreed.too_low:
            self._set_scale(agreed.scale_bits, step, adapts=True)
        elif agreed.advised_bits is not None:
            self._set_scale(agreed.advised_bits, step, adapts=False)
        if not agreed.layers:
            self._nothing_to_demote(agreed, step)
            return
        wanted = self._repairs.wanted(agreed.layers, step)
        if not self._repairs.harmful.isdisjoint(wanted):
            self._trigger.false_alarm()
        elif self._tuner.dry_run:
            self._advise(wanted, step)
        elif obstacle := self._repairs.obstacle(self._tuner, wanted):
            self._give_up(step, obstacle)
        else:
            self._demote(step, wanted | self._repairs.left_alone(wanted, step))
            # If a loss scale was advised, the optimizer already uses it, so do
            # not raise the scale.
            if agreed.scale_bits is not None and agreed.advised_bits is None:
                self._watch.counters.raise_scales(agreed.scale_bits, step)

    def _advise(self, wanted, step):
        """Reports the demotions of a dry run, each one once."""
        known = self.records.advised()
        new = {p: d for p, d in wanted.items() if p not in known}
        if new:
            new |= self._repairs.left_alone(wanted, step)
            changes = {p: (d.before, d.policy) for p, d in new.items()}
            self.records.change("demote", step, changes, new)
        elif self._triggered:
            # A dry run has already reported the fault, so further diagnoses can
            # wait.
            self._trigger.false_alarm()

    def _set_scale(self, bits, step, adapts):
        """Sets a loss scale at which gradients neither vanish nor overflow."""
        counters, repairs = self._watch.counters, self._repairs
        before, dry = counters.scale_bits(), self._tuner.dry_run
        done = dry
        if not dry and adapts:
            done = counters.raise_scales(bits, step, beyond_first=True)
        elif not dry:
            rebuilds_left = self._tuner.max_rebuilds - repairs.rebuilds
            done, lowered = counters.set_scales(bits, step, rebuilds_left > 0)
            if lowered:
                repairs.recompile()
        if not done:
            self.records.scale(step, "advise", before, bits)
            return
        self._watch.examiner.schedule.repair(not dry)
        now = bits if dry else counters.scale_bits()
        verb = "lower" if now < before else "raise"
        self.records.scale(step, verb, before, now)

    def _nothing_to_demote(self, agreed, step):
        if agreed.collapsed and not agreed.explained:
            why = "no loss scale helps and no layer is to blame"
            self._give_up(step, why)
        elif self._triggered:
            self._trigger.false_alarm()

    def _demote(self, step, wanted):
        self._put_on_probation(step, wanted)
        changes = self._repairs.demote(wanted)
        self._watch.examiner.schedule.repair(True)
        self._changed(step)
        self.records.change("demote", step, changes, wanted)

    def _changed(self, step):
        self._changed_at = self._due = step
        self._watch.held.stop(self._captured)
        self._trigger.start_over()
        self._watch.examiner.forget_trouble()
        self._watch.log_layers()

    def _give_up(self, step, reason):
        self._has_given_up = True
        on_limit = self._tuner.on_limit
        message = f"gives up: {reason}. {BY_HAND}"
        self.records.report("give_up", step, message, on_limit=on_limit)
        if on_limit == "stop":
            self._watch.end_training()
        elif on_limit == "raise":
            self._watch.fail(f"PrecisionTuner at step {step} {message}.")
        elif on_limit == "float32":
            wanted = self._repairs.all_in_float32(step, reason, "give_up")
            self._demote(step, wanted)

    def _put_on_probation(self, step, paths):
        if self._probation is None:
            gap, watch = self._tuner.cooldown, self._watch
            try:
                self._probation = Probation(watch, step, gap, self._sample)
            except NotImplementedError:
                return
        self._probation.paths.update(paths)

    def _compare(self):
        """Undoes a demotion if weights or the loss have grown too far."""
        probation, step = self._probation, self._watch.step
        growth = probation.divergence()
        (diverged,) = any_worker(self._watch.model, [growth is not None])
        if diverged or probation.is_over:
            self._probation = None
        if diverged:
            self._undo(probation, growth, step)

    def _undo(self, probation, growth, step):
        probation.restore()
        self._watch.counters.raise_scales(probation.scale_bits, step)
        changes = self._repairs.restore(probation.paths)
        self._repairs.harmful.update(changes)
        self._changed(step)
        self._trigger.false_alarm()
        self.records.undo(step, changes, growth, probation.step)

    def _looks_at_spikes(self, step):
        """Reports new spikes; returns whether the weights may cause them."""
        count, times, stuck = self._recovery.read_spikes()
        if count:
            self.records.spikes(step, count, times)
        if stuck:
            self._watch.on_next_batch(partial(self._leave_spikes, step=step))
        return stuck

    def _leave_spikes(self, batch, step):
        if returned := self._recovery.from_spikes():
            self._returned(step, *returned)

    def _returned(self, step, since, done):
        self._probation = None
        self._watch.counters.raise_scales(math.inf, step)
        self._changed(step)
        self._trigger.false_alarm()
        if done:
            self._watch.examiner.forget_divergence()
        else:
            self._has_given_up = True
        self.records.returned(step, since, done)

    def _return_if_quiet(self, step):
        times = self._trigger.last_nonfinite_step, self._changed_at
        trouble = max((t for t in times if t is not None), default=-math.inf)
        after = self._tuner.promote_after
        kind, paths = self._repairs.next_trial(step, trouble, after)
        rebuilds_left = self._tuner.max_rebuilds - self._repairs.rebuilds
        if paths and rebuilds_left and not self._tuner.dry_run:
            work = partial(self._restore, step=step, kind=kind, paths=paths)
            self._watch.on_next_batch(work)

    def _restore(self, batch, step, kind, paths):
        batches = [b for b in (*self._evidence, batch) if b is not None]
        may_return = layers_that_may_return(
            self._watch, self._repairs, paths, batches, step
        )
        may_return, numbers = self._validation.returning(may_return, step)
        if not may_return:
            return
        changes = self._repairs.restore(may_return)
        self._changed(step)
        self.records.change(kind, step, changes, {}, **numbers)
