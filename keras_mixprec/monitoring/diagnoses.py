"""Decides when to diagnose a run without a tuner."""

import math
from collections.abc import Callable

from keras_mixprec.backend.common import optimizers_of
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.monitoring.recorded_steps import TRIGGER_STEPS
from keras_mixprec.monitoring.task import Task
from keras_mixprec.numerics.held_optimizer import is_scaling

# A diagnosis is assumed to cost as much as this many steps. A run without any
# sign of a fault is first diagnosed once this cost, as a share of the training
# time, is below `max_overhead`.
_COST = 20


class Diagnoses:
    """Diagnoses the next batch when there is a reason.

    One reason is several skipped steps in a row. A loss that has grown and
    gradients that stay exactly zero are reasons too, each once per run. Some
    faults skip no step, so a batch is also diagnosed after a number of steps
    and whenever the step count has doubled.

    Args:
        watch: The `Watch`.
    """

    def __init__(self, watch):
        share = watch.settings.max_overhead
        self._first = _COST / share if share else math.inf
        self._watch = watch
        self._examiner = watch.examiner
        self._asked: set[str] = set()
        self._asked_at = None
        # The diagnosis that waits for the next batch, or `None`.
        self._visit: Callable | None = None
        self._has_waited = False

    def tasks(self) -> list[Task]:
        """Returns the tasks of a `fit`."""
        return [
            Task(
                "diagnose",
                self._look,
                lambda: 0 if self._has_news() else math.inf,
            ),
            Task(
                "diagnose",
                self._examine_scale_use,
                lambda: 0 if self._is_scale_use_unknown() else math.inf,
            ),
        ]

    def finish(self):
        """Diagnoses an earlier batch if a reason came after the last batch."""
        watch = self._watch
        batch, kept = watch.ranges.batch, self._examiner.states.held
        if batch is None and kept:
            batch = kept[-1].batch
        is_lost = self._examiner.has_lost_weights()
        if batch is not None and (
            self._visit
            or self._has_new_reason()
            or is_lost
            or watch.progress.wants_comparison()
        ):
            self._examine(batch)
        if is_lost:
            self._examiner.report_lost_weights()

    def _has_news(self):
        return self._watch.counter_log.step != self._asked_at or (
            # If the loss has grown, diagnose the next batch, because only a new
            # batch shows whether the data have changed.
            self._examiner.states.has_grown
            and not self._examiner.gave_up
            and "growth" not in self._asked
        )

    def _look(self):
        watch = self._watch
        self._asked_at = watch.counter_log.step
        is_known = self._asked_at != watch.step
        if is_known and not self._examiner.states.has_grown:
            return
        if self._has_new_reason():
            self._visit = watch.on_next_batch(self._examine)

    def _has_new_reason(self):
        """Returns whether there is a new reason for a diagnosis."""
        examiner = self._examiner
        if examiner.gave_up:
            examiner.report_rest()
        if examiner.gave_up or self._watch.waits_for(self._visit):
            return False
        reasons, known = self._reasons(), self._asked
        if "skipped steps" in reasons & known:
            examiner.report_rest()
        # Skipped steps are a new reason for a diagnosis once an earlier streak
        # of skipped steps has ended.
        self._asked = reasons | (known - {"skipped steps"})
        if reasons - known:
            return True
        if is_due := self._is_comparison_due():
            examiner.schedule.compare(self._watch.taken)
        return is_due

    def _reasons(self):
        watch, examiner = self._watch, self._examiner
        log = watch.counter_log
        is_stuck = log.seen.in_a_row >= TRIGGER_STEPS or log.seen.mean_is_lost
        # A tuner makes its own diagnoses, except for the last steps in a run.
        if watch.tuning:
            found = {"skipped steps": is_stuck and not examiner.has_found}
        else:
            found = {
                "skipped steps": log.trouble and not examiner.has_found,
                "growth": examiner.states.has_grown,
                "zeros": examiner.has_new_zeros,
            }
        return {reason for reason, holds in found.items() if holds}

    def _is_comparison_due(self):
        watch, schedule = self._watch, self._examiner.schedule
        dtypes = watch.layers.dtypes.values()
        if watch.tuning or {*SIXTEEN_BITS}.isdisjoint(dtypes):
            return False
        return schedule.is_comparison_due(watch.taken, self._first)

    def _examine(self, batch):
        self._visit = None
        if batch is None:
            return
        watch, examiner = self._watch, self._examiner
        known = len(watch.verdicts)
        # The first diagnosis happens once, so its time does not count as
        # overhead.
        is_overhead = examiner.schedule.cost is not None
        examiner.diagnose(batch, watch.repair, is_overhead)
        failing = watch.counter_log.trouble and watch.counters.used()
        is_sound = len(watch.verdicts) == known and not examiner.gave_up
        # The diagnosed batch may have been sound, so wait for a batch that
        # fails. A tuner waits for failing batches itself.
        if failing and is_sound and not (self._has_waited or watch.tuning):
            self._has_waited = True
            watch.held.wait("diagnose", lambda held: self._examine(held.batch))

    def _is_scale_use_unknown(self):
        watch, schedule = self._watch, self._examiner.schedule
        known = watch.several_workers or schedule.scale_use_known
        return watch.model.built and not known

    def _examine_scale_use(self):
        """Checks the use of the loss scale on the first batch.

        A train step that uses the scale wrongly may make the weights NaN in its
        first run.
        """
        examiner, model = self._examiner, self._watch.model
        examiner.schedule.examine_scale_use()
        if any(map(is_scaling, optimizers_of(model).values())):
            self._watch.on_next_batch(examiner.examine_scale_use)
