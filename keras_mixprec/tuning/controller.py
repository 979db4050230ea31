"""Decides when to diagnose, demote, undo and return to 16 bits."""

from collections import deque
from functools import partial

from keras_mixprec.backend import active
from keras_mixprec.backend.common import any_worker
from keras_mixprec.diagnosis.batch import head, rows_to_examine
from keras_mixprec.guards.train_function import BatchCapture
from keras_mixprec.tuning.demotions import find_obstacle
from keras_mixprec.tuning.history import BY_HAND, TunerHistory
from keras_mixprec.tuning.promotion import Probation, layers_that_may_return
from keras_mixprec.tuning.proposal import Proposal, WorkerProposal, propose
from keras_mixprec.tuning.state import Phase, TuningState
from keras_mixprec.tuning.trigger import NonfiniteStepCount, Trigger
from keras_mixprec.tuning.validation import Validation

# At first counters are read whenever there are an eighth more steps.
_READINGS_GROW = 8

# Failing batches on which a return to 16 bits is tried, the last ones.
_EVIDENCE = 4


class Tuning:
    """Decides when to diagnose, and changes what has to be changed.

    Where several workers train the model together all do so at the same
    steps, since what they go by is agreed: each diagnoses its own batches,
    and what any of them finds counts.

    Args:
        settings: `TunerSettings`.
        session: The `Session`.
        repairs: `Repairs` of the model.
        history: List of dicts, of the earlier calls of `fit`.

    Attributes:
        records: `TunerHistory`, what was done.
        repairs: `Repairs` of the model.
    """

    def __init__(self, settings, session, repairs, history):
        self.records = TunerHistory(settings, session, repairs, history)
        self._settings = settings
        self._session = session
        self.repairs = repairs
        self._validation = Validation(settings, session, repairs, self.records)
        self._several_workers = active.processes().workers(session.model) > 1
        keeps_scale = not (self._several_workers or settings.dry_run)
        session.bad_data.keeps_scale = keeps_scale
        self._trigger = Trigger()
        self._evidence = deque(maxlen=_EVIDENCE)
        self._sample = None
        self._held = BatchCapture()
        self._bad = NonfiniteStepCount(session)
        self._state = TuningState()

    # Reading and diagnosing.

    def before_batch(self):
        """Reads the counters and diagnoses, if it is time to."""
        step = self._session.step
        if step < self._state.idle_until or not self._session.started:
            return
        self.records.rebuild(step)
        state = self._state
        if state.ended:
            return
        if state.phase is Phase.STARTING:
            self._begin(step)
        elif self._several_workers:  # The others would wait for this one.
            self._go_on(step)
        else:
            who, task = "PrecisionTuner", "tune this model"
            self._session.attempt(task, self._go_on, step, who=who)

    def _go_on(self, step):
        state = self._state
        if state.captures:
            self._examine_if_bad(step)
        if step >= state.next_reading and not state.ended:
            self._read_counters(step)
        if state.captures:
            self._hold(step)
        else:
            state.idle_until = state.next_reading

    def end_epoch(self):
        """An epoch of unknown length ends with a call without a batch."""
        self._held.end_epoch()

    def end(self):
        """Captures no batch any more, and validates the plan."""
        step = self._session.step
        self._held.disarm()
        self._validation.sign_off(step, not self._state.ended)
        self.repairs.end(step)
        # The callback outlives `fit`: no copy of the model or of a batch may.
        self._state.probation = self._sample = None
        self._evidence.clear()

    def _begin(self, step):
        # Refuses a mistake before anything else is reported.
        self._validation.begin(step)
        self.records.begin(step)
        self._trigger.add(step, 0)
        self.repairs.begin(step)
        self._state.enter(Phase.WATCHING)
        self._state.next_reading = step + 1
        examiner, model = self._session.examiner, self._session.model
        # Of a model that one worker does not know yet, nobody knows more.
        (new,) = any_worker(model, [examiner.schedule.is_new])
        if new:
            examiner.follow_schedule_of(model, new=True)
        if examiner.schedule.due(0):
            self._audit(step)
        elif step == 0:
            examiner.log_errors(examiner.schedule.errors, step)

    def _read_counters(self, step):
        self._undo_if_diverged(step)
        # The first steps show most.
        session = self._session
        taken = step - session.first_step
        gap = min(taken // _READINGS_GROW, self._settings.update_freq)
        self._state.next_reading = step + max(gap, 1)
        if (left := session.examiner.schedule.steps_left(taken)) > 0:
            self._state.read_by(step + left)
        self._bad.count()
        stuck = self._bad.newly_stuck()
        due = self._trigger.add(step, self._bad.total, stuck)
        if self._cooling(step) or self._state.captures:
            return
        audit = session.examiner.schedule.due(taken)
        may_examine = (due or audit) and self._may_examine(step)
        if due and may_examine:
            self._bad.examined()
            self._state.enter(Phase.CAPTURING, step + self._trigger.span)
        elif audit and may_examine:
            self._audit(step)
        else:
            self._return_if_quiet(step)

    def _audit(self, step):
        schedule = self._session.examiner.schedule
        is_overhead = schedule.is_overhead
        schedule.audit(step - self._session.first_step)
        self._examine_next(step, triggered=False, is_overhead=is_overhead)

    def _hurry(self, step):
        """Brings the next audit forward if a layer overflows before it."""
        if self._several_workers:  # All workers audit at the same steps.
            return
        steps = self._session.examiner.schedule.hurry()
        if steps is not None:
            self._state.read_by(step + steps)

    def _may_examine(self, step):
        """Whether a diagnosis may be made now, on all workers."""
        examiner, model = self._session.examiner, self._session.model
        not_here = examiner.gave_up or step < examiner.paused_until
        (not_yet,) = any_worker(model, [not_here])
        return not not_yet

    def _hold(self, step):
        try:
            self._held.hold(self._session.model)
        except NotImplementedError:
            # The next batch has to do, whether it fails or not.
            self._state.enter(Phase.WATCHING)
            self._examine_next(step, triggered=True)

    def _examine_if_bad(self, step):
        batch, _ = self._held.take() or (None, None)
        if self._bad.count():
            self._state.enter(Phase.WATCHING)
            self._session.synchronized_model()
            self._examine_together(batch, step, triggered=True)
        elif step >= self._state.capture_until:
            self._state.enter(Phase.WATCHING)
            self._trigger.false_alarm()

    def _cooling(self, step):
        changed = self._state.changed_at
        # What one batch shows before the first step need not be all.
        if changed in (None, self._session.first_step):
            return False
        return step < changed + self._settings.cooldown

    def _examine_next(self, step, triggered, is_overhead=False):
        how = {"triggered": triggered, "is_overhead": is_overhead}
        work = partial(self._examine_together, step=step, **how)
        self._on_next_batch(step, work)

    def _on_next_batch(self, step, work):
        session = self._session
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
        self._state.triggered = triggered
        if self._sample is None or not triggered:
            self._sample = batch
        name = "PrecisionTuner"
        who = name * self._settings.verbose
        model, rows, own = self._session.model, None, None
        if not triggered:
            rows = partial(head if is_overhead else rows_to_examine, model)
        examiner = self._session.examiner
        if batch is not None:
            with examiner.diagnosing(step, is_overhead, name):
                found = examiner.examine(model, batch, step, who, rows)
                own = self.repair(*found, step)
        if self._several_workers:
            self._session.share_verdicts()
            self._decide(own or WorkerProposal(Proposal()), step)

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
            self._state.changed_at = None
        self._hurry(step)
        # All workers are triggered alike, and each examines its own batch.
        if not self._several_workers:
            self._trigger.explain(examination.bits_to_fall())
        if self._state.ended or self._cooling(step):
            return None
        model, rungs = self._session.model, self._settings.rungs
        proposal = propose(examination, model, batch, step, rungs)
        if proposal:
            self._evidence.append(batch)
        collapsed = self._session.counters.collapsed()
        own = WorkerProposal.of(proposal, examination, collapsed)
        if not self._several_workers:
            self._decide(own, step)
        return own

    def _decide(self, own, step):
        if self._state.ended or self._cooling(step):
            return
        agreed = own.agreed(self._session.model, step)
        if agreed.too_low:
            self._set_scale(agreed.scale_bits, step, adapts=True)
        elif agreed.advised_bits is not None:
            self._set_scale(agreed.advised_bits, step, adapts=False)
        if not agreed.proposal:
            self._nothing_to_demote(agreed, step)
            return
        self._state.enter(Phase.WATCHING)
        wanted = self.repairs.wanted(agreed.proposal, step)
        if not self.repairs.harmful.isdisjoint(wanted):
            self._trigger.false_alarm()
            return
        wanted = self._state.not_advised_before(wanted)
        if wanted:
            wanted |= self.repairs.left_alone(agreed.proposal, step)
        obstacle = find_obstacle(
            self._settings, self.repairs, agreed.proposal, wanted
        )
        if self._settings.dry_run:
            self._advise(wanted, step)
        elif obstacle:
            self._give_up(step, obstacle)
        else:
            self._demote(step, wanted)
            # An advised one has been set.
            if agreed.scale_bits is not None and agreed.advised_bits is None:
                self._session.counters.raise_scale(agreed.scale_bits, step)

    def _advise(self, wanted, step):
        """Reports demotions that a dry run leaves to the user."""
        if wanted:
            self._state.advised |= set(wanted)
            changes = {p: (d.before, d.policy) for p, d in wanted.items()}
            self.records.change("demote", step, changes, wanted)
        elif self._state.triggered:
            # A fault that goes on is known: not every step is diagnosed.
            self._trigger.false_alarm()

    def _set_scale(self, bits, step, adapts):
        """Lets gradients survive that do not at the loss scale in use."""
        counters = self._session.counters
        before, dry = counters.scale_bits(), self._settings.dry_run
        if not dry and not (
            counters.raise_scale(bits, step, beyond_first=True)
            if adapts
            else counters.set_fixed_scale(bits, step)
            or self._lower_floor(bits, step)
        ):
            self.records.advise_scale(step, before, bits)
            return
        self._session.examiner.schedule.all_repaired = not dry
        now = bits if dry else counters.scale_bits()
        self.records.scale(step, before, now)

    def _lower_floor(self, bits, step):
        if self.repairs.rebuilds >= self._settings.max_rebuilds:
            return False
        if not self._session.counters.lower_floor(bits, step):
            return False
        self.repairs.recompile()
        return True

    def _nothing_to_demote(self, agreed, step):
        if agreed.collapsed and not agreed.explained:
            self._give_up(
                step,
                "no loss scale helps and no layer is to blame",
            )
        elif self._state.triggered:
            self._trigger.false_alarm()

    def _demote(self, step, wanted):
        self._put_on_probation(step, wanted)
        changes = self.repairs.demote(wanted)
        self._session.examiner.schedule.all_repaired = True
        self._changed(step)
        self.records.change("demote", step, changes, wanted)

    def _changed(self, step):
        self._state.changed_at = self._state.idle_until = step
        self._state.enter(Phase.WATCHING)
        self._trigger.start_over()
        self._session.examiner.forget_trouble()
        self._session.log_layers()
        self._settings.save_plan(self.repairs)

    def _give_up(self, step, reason):
        self._state.enter(Phase.ENDED)
        on_limit = self._settings.on_limit
        message = f"gives up: {reason}. {BY_HAND}"
        self.records.report("give_up", step, message, on_limit=on_limit)
        if on_limit == "stop":
            self._session.model.stop_training = True
        elif on_limit == "raise":
            self._session.early_stop.fail(
                f"PrecisionTuner at step {step} {message}."
            )
        elif on_limit == "float32":
            wanted = self.repairs.all_in_float32(step, reason, "give_up")
            self._demote(step, wanted)

    def _put_on_probation(self, step, paths):
        if self._state.probation is None:
            gap, session = self._settings.cooldown, self._session
            try:
                found = Probation(session, step, gap, self._sample)
            except NotImplementedError:
                return
            self._state.probation = found
        self._state.probation.paths |= set(paths)

    def _undo_if_diverged(self, step):
        """Undoes a demotion after which weights or the loss grow too far."""
        probation = self._state.probation
        if probation is None or not probation.due(step):
            return
        growth = probation.divergence(step)
        (diverged,) = any_worker(self._session.model, [growth is not None])
        if diverged:
            self._undo(probation, growth, step)
        elif probation.over():
            self._state.probation = None

    def _undo(self, probation, growth, step):
        self._state.probation = None
        probation.restore()
        self._session.counters.raise_scale(probation.scale_bits, step)
        demoted = self.repairs.demotions.keys()
        changes = self.repairs.restore(probation.paths & demoted)
        self.repairs.harmful |= changes.keys()
        self._changed(step)
        self._trigger.false_alarm()
        self.records.undo(step, changes, growth, probation.step)

    # Returning to 16 bits.

    def _return_if_quiet(self, step):
        bad = self._trigger.last_nonfinite_step
        times = bad, self._state.changed_at, self.repairs.quiet_since
        since = max(time for time in times if time is not None)
        self.repairs.quiet_since = since
        kind, paths = self.repairs.next_trial(
            step, step - since, self._settings.promote_after
        )
        rebuilds_left = self._settings.max_rebuilds - self.repairs.rebuilds
        if paths and rebuilds_left and not self._settings.dry_run:
            self._on_next_batch(
                step, lambda batch: self._restore(kind, paths, batch, step)
            )

    def _restore(self, kind, paths, batch, step):
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
