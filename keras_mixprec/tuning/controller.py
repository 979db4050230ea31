"""Decides when to diagnose, demote, undo and return to 16 bits."""

import enum
import math
from collections import deque
from functools import partial

from keras_mixprec.backend import active
from keras_mixprec.backend.common import any_worker
from keras_mixprec.diagnosis.batch import head, rows_to_examine
from keras_mixprec.tuning.history import BY_HAND
from keras_mixprec.tuning.promotion import Probation, layers_that_may_return
from keras_mixprec.tuning.proposal import WorkerProposal, propose, rungs_here
from keras_mixprec.tuning.recovery import Recovery
from keras_mixprec.tuning.trigger import Trigger
from keras_mixprec.tuning.validation import Validation

# At first counters are read whenever there are an eighth more steps.
_READINGS_GROW = 8

# Failing batches on which a return to 16 bits is tried, the last ones.
_EVIDENCE = 4


class Phase(enum.Enum):
    """What a tuner does before a batch, if it is time to."""

    STARTING = "refuses mistakes, and has the first batch audited"
    WATCHING = "reads the counters; too many non-finite steps are a trigger"
    CAPTURING = "captures each batch until a step fails, which is diagnosed"
    ENDED = "has given up, and changes nothing more"


class Tuning:
    """Decides when to diagnose, and changes what has to be changed.

    Where several workers train the model together all do so at the same
    steps, since what they go by is agreed: each diagnoses its own batches,
    and what any of them finds counts.

    Args:
        tuner: The `PrecisionTuner`, for its arguments and its history.
        session: The `Session`.
        repairs: `Repairs` of the model.
        records: `TunerHistory`, what was done.
        held_back: `HeldBack`, or `None`.
        is_checked: Boolean. Whether this tuner has evaluated it before.

    Attributes:
        records: As given.
        repairs: As given.
        recovers: Boolean. Whether it may return to the last good state.
    """

    def __init__(self, tuner, session, repairs, records, held_back, is_checked):
        self.repairs = repairs
        self.records = records
        self._tuner = tuner
        self._session = session
        self._rungs = rungs_here(tuner.rungs, tuner.bfloat16)
        self._is_checked = is_checked
        self._validation = Validation(
            tuner, session, repairs, records, held_back
        )
        self._several_workers = active.processes().workers(session.model) > 1
        keeps_scale = not (self._several_workers or tuner.dry_run)
        session.bad_data.keeps_scale = keeps_scale
        self._trigger = Trigger(session)
        self._recovery = Recovery(session, repairs, tuner.max_returns)
        self.recovers = tuner.recover and not tuner.dry_run
        self._captured = None
        self._phase = Phase.STARTING
        # Before this step there is nothing to be done.
        self._due: float = 0
        self._capture_until = 0
        # Whether non-finite steps are the reason for the last diagnosis.
        self._triggered = False
        self._changed_at: int | None = None
        # Batches, and a copy of the weights while a demotion is on probation.
        self._evidence = deque(maxlen=_EVIDENCE)
        self._sample = None
        self._probation: Probation | None = None

    # Reading and diagnosing.

    def before_batch(self):
        """Does what the phase says, if it is time to."""
        step = self._session.step
        if step < self._due or not self._session.started:
            return
        self.records.rebuild(step)
        work = _WORK[self._phase]
        if self._phase is Phase.STARTING or self._several_workers:
            work(self, step)  # The others would wait for this one.
        else:
            who, task = "PrecisionTuner", "tune this model"
            self._session.attempt(task, work, self, step, who=who)

    def end(self):
        """Captures no batch any more, and validates the plan."""
        step = self._session.step
        self._recovery.end()
        self._validation.sign_off(step, self._phase is not Phase.ENDED)
        self.repairs.end(step)
        self.forget()

    def forget(self):
        """Drops what must not outlive `fit`: copies of weights, and batches."""
        self._probation = self._sample = self._captured = None
        self._evidence.clear()

    def _begin(self, step):
        # Refuses a mistake before anything else is reported.
        if not self._is_checked:
            self._validation.begin(step)
        self.records.begin(step)
        self._trigger.read(step)
        self.repairs.begin(step)
        self._phase, self._due = Phase.WATCHING, step + 1
        examiner, model = self._session.examiner, self._session.model
        # Of a model that one worker does not know yet, nobody knows more.
        (new,) = any_worker(model, [examiner.schedule.is_new])
        if new:
            examiner.follow_schedule_of(model, new=True)
        if examiner.schedule.steps_left(0) <= 0:
            self._audit(step)
        elif step == 0:
            examiner.log_errors(examiner.schedule.errors, step)

    def _watch(self, step):
        if self._undo_if_diverged(step):
            return
        schedule = self._session.examiner.schedule
        # The first steps show most.
        taken = step - self._session.first_step
        gap = min(taken // _READINGS_GROW, self._tuner.update_freq)
        self._due = step + max(gap, 1)
        left = schedule.steps_left(taken)
        if left > 0:
            self._due = min(self._due, step + left)
        if self._session.examiner.has_grown:
            left = 0
        triggered = self._trigger.read(step)
        if self.recovers and self._spikes(step):
            return
        if self._cooling(step):
            return
        if not (triggered or left <= 0) or not self._may_examine(step):
            self._return_if_quiet(step)
        elif triggered:
            self._trigger.examined()
            self._phase = Phase.CAPTURING
            self._capture_until = step + self._trigger.span
            self._hold(step)
        else:
            self._audit(step)

    def _capture(self, step):
        batch, self._captured = self._captured, None
        if self._undo_if_diverged(step):
            return
        if self._trigger.count():
            self._phase, self._due = Phase.WATCHING, step
            self._session.synchronized_model()
            self._examine_together(batch, step, triggered=True)
        elif step >= self._capture_until:
            self._phase = Phase.WATCHING
            self._trigger.false_alarm()
        else:
            self._hold(step)

    def _hold(self, step):
        self._due = step
        if getattr(self._session.model, "steps_per_execution", 1) > 1:
            # The next batch has to do, whether it fails or not.
            self._phase = Phase.WATCHING
            self._examine_next(step, triggered=True)
        else:
            self._on_next_batch(step, self._capture_batch)

    def _capture_batch(self, batch, step):
        self._captured = batch

    def _rest(self, step):
        self._due = math.inf

    def _audit(self, step):
        schedule = self._session.examiner.schedule
        is_overhead = schedule.is_overhead
        schedule.audit(step - self._session.first_step)
        self._examine_next(step, triggered=False, is_overhead=is_overhead)

    def _may_examine(self, step):
        """Whether a diagnosis may be made now, on all workers."""
        examiner, model = self._session.examiner, self._session.model
        not_here = examiner.gave_up or step < examiner.paused_until
        (not_yet,) = any_worker(model, [not_here])
        return not not_yet

    def _cooling(self, step):
        changed = self._changed_at
        # What one batch shows before the first step need not be all.
        if changed in (None, self._session.first_step):
            return False
        return step < changed + self._tuner.cooldown

    def _examine_next(self, step, **how):
        self._on_next_batch(step, self._examine_together, **how)

    def _on_next_batch(self, step, work, **how):
        session, work = self._session, partial(work, step=step, **how)
        session.examiner.on_next_batch(session.model, step, work)

    def _examine_together(self, batch, step, triggered, is_overhead=False):
        """Diagnoses a batch; each worker does its own at this step.

        Args:
            batch: As `train_step` takes it, `None` if there is none here.
            step: Int.
            triggered: Boolean. Whether it is because of non-finite steps, and
                all of it is examined.
            is_overhead: Boolean. Whether it counts as overhead. If not, it is
                seen first whether there is more in it than in its first rows.
        """
        self._triggered = triggered
        if self._sample is None or not triggered:
            self._sample = batch
        model, rows, own = self._session.model, None, None
        if not triggered:
            rows = partial(head if is_overhead else rows_to_examine, model)
        if batch is not None:
            own = self._session.examiner.diagnose(
                model,
                batch,
                step,
                self.repair,
                is_overhead,
                rows,
                who="PrecisionTuner",
                verbose=self._tuner.verbose,
            )
        if self._several_workers:
            self._session.share_verdicts()
            self._decide(own or WorkerProposal({}), step)

    # Demoting.

    def repair(
        self, examination, batch, step, raised=False
    ) -> WorkerProposal | None:
        """Repairs what a diagnosis has found, unless workers have to agree.

        Args:
            examination: `Examination`.
            batch: What was examined, as `train_step` takes it.
            step: Int.
            raised: Boolean. Whether its step has raised, which cannot wait.

        Returns:
            What is proposed, `None` if nothing may be changed now.
        """
        if raised:
            self._changed_at = None
        # All workers are triggered alike, and audit at the same steps.
        if not self._several_workers:
            sooner = self._session.examiner.schedule.hurry()
            if sooner is not None:
                self._due = min(self._due, step + sooner)
            self._trigger.explain(examination.bits_to_fall())
        may_return = self.recovers and self._phase is not Phase.ENDED
        if may_return and self._recovery.helps(examination):
            self._returned(step, *self._recovery.run(examination))
            return None
        if self._changes_nothing(step):
            return None
        model = self._session.model
        proposal = propose(examination, model, batch, step, self._rungs)
        if proposal:
            self._evidence.append(batch)
        collapsed = self._session.counters.collapsed()
        own = WorkerProposal.of(proposal, examination, collapsed)
        if not self._several_workers:
            self._decide(own, step)
        return own

    def _changes_nothing(self, step):
        return self._phase is Phase.ENDED or self._cooling(step)

    def _decide(self, own, step):
        if self._changes_nothing(step):
            return
        agreed = own.agreed(self._session.model, step)
        if agreed.too_low:
            self._set_scale(agreed.scale_bits, step, adapts=True)
        elif agreed.advised_bits is not None:
            self._set_scale(agreed.advised_bits, step, adapts=False)
        if not agreed.layers:
            self._nothing_to_demote(agreed, step)
            return
        self._phase = Phase.WATCHING
        wanted = self.repairs.wanted(agreed.layers, step)
        if not self.repairs.harmful.isdisjoint(wanted):
            self._trigger.false_alarm()
        elif self._tuner.dry_run:
            self._advise(wanted, step)
        elif obstacle := self.repairs.obstacle(self._tuner, wanted):
            self._give_up(step, obstacle)
        else:
            self._demote(step, wanted | self.repairs.left_alone(wanted, step))
            # An advised one has been set.
            if agreed.scale_bits is not None and agreed.advised_bits is None:
                self._session.counters.raise_scales(agreed.scale_bits, step)

    def _advise(self, wanted, step):
        """Reports demotions that a dry run leaves to the user, once each."""
        known = self.records.advised()
        new = {p: d for p, d in wanted.items() if p not in known}
        if new:
            new |= self.repairs.left_alone(wanted, step)
            changes = {p: (d.before, d.policy) for p, d in new.items()}
            self.records.change("demote", step, changes, new)
        elif self._triggered:
            # A fault that goes on is known: not every step is diagnosed.
            self._trigger.false_alarm()

    def _set_scale(self, bits, step, adapts):
        """Lets gradients survive that do not at the loss scale in use."""
        counters, repairs = self._session.counters, self.repairs
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
        self._session.examiner.schedule.all_repaired = not dry
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
        changes = self.repairs.demote(wanted)
        self._session.examiner.schedule.all_repaired = True
        self._changed(step)
        self.records.change("demote", step, changes, wanted)

    def _changed(self, step):
        self._changed_at = self._due = step
        self._trigger.start_over()
        self._session.examiner.forget_trouble()
        self._session.log_layers()

    def _give_up(self, step, reason):
        self._phase = Phase.ENDED
        on_limit = self._tuner.on_limit
        message = f"gives up: {reason}. {BY_HAND}"
        self.records.report("give_up", step, message, on_limit=on_limit)
        if on_limit == "stop":
            self._session.model.stop_training = True
        elif on_limit == "raise":
            self._session.fail(f"PrecisionTuner at step {step} {message}.")
        elif on_limit == "float32":
            wanted = self.repairs.all_in_float32(step, reason, "give_up")
            self._demote(step, wanted)

    # Undoing.

    def _put_on_probation(self, step, paths):
        if self._probation is None:
            gap, session = self._tuner.cooldown, self._session
            try:
                self._probation = Probation(session, step, gap, self._sample)
            except NotImplementedError:
                return
        self._probation.paths.update(paths)

    def _undo_if_diverged(self, step):
        """Whether weights or the loss grew too far, so that it has undone."""
        probation = self._probation
        if probation is None or not probation.due(step):
            return False
        growth = probation.divergence(step)
        (diverged,) = any_worker(self._session.model, [growth is not None])
        if diverged or probation.over():
            self._probation = None
        if diverged:
            self._undo(probation, growth, step)
        return diverged

    def _undo(self, probation, growth, step):
        self._phase = Phase.WATCHING
        probation.restore()
        self._session.counters.raise_scales(probation.scale_bits, step)
        changes = self.repairs.restore(probation.paths)
        self.repairs.harmful.update(changes)
        self._changed(step)
        self._trigger.false_alarm()
        self.records.undo(step, changes, growth, probation.step)

    # Returning to the last good state.

    def _spikes(self, step):
        """Tells of new spikes; whether they are reason to go back."""
        if spikes := self._recovery.new_spikes():
            self.records.spikes(step, *spikes)
        stuck = self._recovery.is_stuck() and not self._several_workers
        if stuck:
            self._on_next_batch(step, self._leave_spikes)
        return stuck

    def _leave_spikes(self, batch, step):
        if returned := self._recovery.from_spikes(batch):
            self._returned(step, *returned)

    def _returned(self, step, since, done):
        self._probation = None
        self._session.counters.raise_scales(math.inf, step)
        self._changed(step)
        self._trigger.false_alarm()
        if done:
            self._phase = Phase.WATCHING
            self._session.examiner.forget_divergence(step)
        else:
            self._phase = Phase.ENDED
        self.records.returned(step, since, done)

    # Returning to 16 bits.

    def _return_if_quiet(self, step):
        times = self._trigger.last_nonfinite_step, self._changed_at
        trouble = max((t for t in times if t is not None), default=-math.inf)
        after = self._tuner.promote_after
        kind, paths = self.repairs.next_trial(step, trouble, after)
        rebuilds_left = self._tuner.max_rebuilds - self.repairs.rebuilds
        if paths and rebuilds_left and not self._tuner.dry_run:
            self._on_next_batch(step, self._restore, kind=kind, paths=paths)

    def _restore(self, batch, step, kind, paths):
        batches = [b for b in (*self._evidence, batch) if b is not None]
        may_return = layers_that_may_return(
            self._session, self.repairs, paths, batches, step
        )
        may_return, numbers = self._validation.returning(may_return, step)
        if not may_return:
            return
        changes = self.repairs.restore(may_return)
        self._changed(step)
        self.records.change(kind, step, changes, {}, **numbers)


# Trigger, diagnose, demote, write: each phase, and what is done in it.
_WORK = {
    Phase.STARTING: Tuning._begin,  # Then it watches.
    Phase.WATCHING: Tuning._watch,  # Until a trigger: then it captures.
    Phase.CAPTURING: Tuning._capture,  # Until a step fails: then it watches.
    Phase.ENDED: Tuning._rest,
}
