"""Checks whether a run learns, and whether its task can be learned."""

import math

import keras
import numpy as np

from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.keras_internals import arrays_in_fit
from keras_mixprec.policies.layers import has_own_step
from keras_mixprec.reporting.flat_loss import flat_loss, last_change
from keras_mixprec.reporting.headline import STUCK

# A run of fewer than 30 steps is too short to show whether the model learns.
# After 500 steps, a loss that has not fallen is examined during training.
_LEAST_STEPS, _MANY_STEPS = 30, 500

# A loss that fell by less than 2% counts as not falling.
_FALL = 0.02


class Progress:
    """Checks the task before the first step, and then whether training learns.

    Training is checked whenever the step count has grown by a factor of 8, and
    at the end. If the loss does not fall, or gradients are exactly zero, one
    step is examined.

    Args:
        watch: The `Watch`.

    Attributes:
        due_at: The step of the next check.
    """

    def __init__(self, watch):
        self.due_at = watch.first_step + 2 * _LEAST_STEPS
        self._watch = watch

    def begin(self):
        """Checks the first batch, or all data if `fit` was given arrays."""
        watch = self._watch
        look = watch.examiner.look_at_task

        def begin(batch):
            if batch is not None:
                watch.attempt("check the task", look, self._all(batch))

        watch.on_next_batch(begin)

    def look(self):
        """Checks training between two steps."""
        watch, taken = self._watch, self._watch.taken
        self.due_at = watch.first_step + 8 * taken
        lasting = watch.ranges.zeros.lasting()
        if lasting or taken >= _MANY_STEPS and not self._has_fallen():
            watch.synchronized_model()
            self._look_into_step(at_the_end=False)

    def finish(self):
        """Checks training at the end."""
        watch = self._watch
        losses = [loss for _, loss in self._points()]
        lost = losses and not math.isfinite(losses[-1])
        if lost or watch.counter_log.seen.in_a_row >= STUCK:
            self._look_at_inputs()
        elif self._has_diverged():
            return
        elif self._has_zeros() or not self._has_fallen():
            self._look_into_step()

    def _has_diverged(self):
        """Returns whether training diverged to a loss above its first value."""
        watch, points = self._watch, self._points()
        examiner, start = watch.examiner, watch.examiner.schedule.start
        if examiner.has_reported("divergence"):
            return True
        # A custom `train_step` may not report the loss that it minimizes, so
        # ignore the reported loss.
        own = has_own_step(watch.model)
        if own or not (start and points and points[-1][1] >= start.loss):
            return False
        return examiner.find_divergence()

    def flat_loss(self) -> str:
        """Returns the report's sentence about a flat loss, or `""`."""
        watch = self._watch
        used = watch.counters.used().values()
        skipped = max((x.since_start().skipped for x in used), default=0)
        if has_own_step(watch.model) or 2 * skipped >= self._watch.taken:
            return ""
        points = watch.counter_log.loss.points
        course = {"steps": [step for step, _ in points]}
        course["values"] = [loss for _, loss in points]
        dtypes = watch.layers.dtypes.values()
        layers = [{"compute_dtype": dtype} for dtype in dtypes]
        compared = bool(watch.examiner.schedule.errors)
        return flat_loss(course, watch.log.story, layers, compared)

    def wants_comparison(self) -> bool:
        """Returns whether 16 bits may keep the loss from falling."""
        watch = self._watch
        wide = {*SIXTEEN_BITS}.isdisjoint(watch.layers.dtypes.values())
        known = wide or watch.tuning or watch.examiner.schedule.errors
        return not known and bool(self.flat_loss())

    def _look_into_step(self, at_the_end=True):
        # Import the diagnosis lazily, because a run that learns does not need
        # the diagnosis.
        from keras_mixprec.diagnosis.causes import learning_rate
        from keras_mixprec.diagnosis.standstill import why_it_stands_still

        watch, batch = self._watch, self._watch.ranges.batch
        told = watch.examiner.has_reported("not_learning")
        own = has_own_step(watch.model)
        if told or own or batch is None or watch.taken < _LEAST_STEPS:
            return
        # During training, a learning rate of 0 is not a fault, because a warmup
        # may start at 0.
        if not (at_the_end or learning_rate(watch.model)):
            return
        has_fallen = self._has_fallen()
        fault = why_it_stands_still(watch.model, batch, has_fallen)
        if fault is None:
            return
        points, numbers = self._points(), {}
        if points and not has_fallen:
            (since, first), last = points[0], points[-1][1]
            numbers = {"loss_since": since, "loss_then": first, "loss": last}
        fault = fault._replace(numbers=fault.numbers | numbers)
        watch.examiner.report([fault.verdict(watch.step)])
        self._look_at_inputs()

    def _look_at_inputs(self):
        from keras_mixprec.diagnosis import task

        watch, batch = self._watch, self._watch.ranges.batch
        if batch is not None:
            given = keras.utils.unpack_x_y_sample_weight(self._all(batch))
            scale = task.inputs_not_normalized(watch.model, given[0])
            for fault in filter(None, [scale, task.negative_weights(given[2])]):
                watch.examiner.report([fault.verdict(watch.step)])

    def _all(self, batch):
        arrays = arrays_in_fit(self._watch.model)
        return batch if arrays is None else arrays

    def _points(self):
        """Returns the loss curve since dtypes last changed."""
        since = last_change(self._watch.log.story)
        points = self._watch.counter_log.loss.points
        return [point for point in points if point[0] > since]

    def _has_fallen(self):
        losses = [loss for _, loss in self._points() if math.isfinite(loss)]
        if len(losses) < 3:
            return True
        fifth = max(len(losses) // 5, 1)
        first, last = np.mean(losses[:fifth]), np.mean(losses[-fifth:])
        noise = np.std(np.diff(losses)) / math.sqrt(fifth)
        return bool(first - last > max(noise, _FALL * abs(first)))

    def _has_zeros(self):
        last = self._watch.ranges.last
        found = [r.parts for r in last.readings] if last else []
        named = "weight_gradient", "activation"
        return any(p[n].zero == 1 for p in found for n in named if n in p)
