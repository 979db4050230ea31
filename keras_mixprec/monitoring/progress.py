"""Whether a run learns, and whether its task can be learnt."""

import math
from collections.abc import Collection

import keras
import numpy as np

from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.keras_internals import arrays_in_fit
from keras_mixprec.policies.layers import has_own_step
from keras_mixprec.reporting.flat_loss import flat_loss, last_change
from keras_mixprec.reporting.headline import STUCK

# Steps before which nothing is said, and after which a loss that has not fallen
# is looked into before the end.
_LEAST_STEPS, _MANY_STEPS = 30, 500

# A loss that has fallen by less than this share of itself may have a reason.
_FALL = 0.02


class Progress:
    """Looks at a task before the first step, and then at whether it is learnt.

    At the end, and whenever eight times as many steps were taken. A step is
    looked into if the loss does not fall, or gradients are exactly zero.

    Args:
        session: The `Session`.

    Attributes:
        due_at: The step from which on there is something to look at.
    """

    def __init__(self, session):
        self.due_at: float = math.inf
        self._session = session

    def begin(self):
        """Looks at the first batch, or at all that `fit` was given."""
        session = self._session
        self.due_at = session.first_step + 2 * _LEAST_STEPS
        look, model = session.examiner.look_at_task, session.model

        def begin(batch):
            if batch is not None:
                given = model, self._all(batch), session.step
                session.attempt("look at the task", look, *given)

        session.examiner.on_next_batch(model, session.step, begin)

    def look(self):
        """Looks in between, at what cannot be right later."""
        session, taken = self._session, self._taken
        self.due_at = session.first_step + 8 * taken
        lasting = session.range_log.zeros.lasting()
        if lasting or taken >= _MANY_STEPS and not self._has_fallen():
            session.synchronized_model()
            self._look_into_step(at_the_end=False)

    def finish(self):
        """Looks at the end."""
        session = self._session
        losses = [loss for _, loss in self._points()]
        lost = losses and not math.isfinite(losses[-1])
        if lost or session.counter_log.seen.in_a_row >= STUCK:
            self._look_at_inputs()
        elif self._has_diverged():
            return
        elif self._has_zeros() or not self._has_fallen():
            self._look_into_step()

    def _has_diverged(self):
        """Whether the loss is no less than at first since it grew meanwhile."""
        session, points = self._session, self._points()
        examiner, start = session.examiner, session.examiner.schedule.start
        if examiner.has_reported("divergence"):
            return True
        own = has_own_step(session.model)  # It may report another loss.
        if own or not (start and points and points[-1][1] >= start.loss):
            return False
        return examiner.find_divergence(session.model, session.step)

    def flat_loss(self, dtypes: Collection) -> str:
        """Returns that the loss did not fall, as `flat_loss` of a log does.

        Args:
            dtypes: What layers compute in.
        """
        session = self._session
        used = session.counters.used().values()
        skipped = max((x.since_start().skipped for x in used), default=0)
        if has_own_step(session.model) or 2 * skipped >= self._taken:
            return ""
        points = session.counter_log.loss.points
        course = {"steps": [step for step, _ in points]}
        course["values"] = [loss for _, loss in points]
        layers = [{"compute_dtype": dtype} for dtype in dtypes]
        compared = bool(session.examiner.schedule.errors)
        return flat_loss(course, session.log.story, layers, compared)

    def wants_comparison(self, dtypes: Collection) -> bool:
        """Whether 16 bits may be why the loss does not fall.

        Args:
            dtypes: What layers compute in.
        """
        session, narrow = self._session, {*SIXTEEN_BITS}.intersection(dtypes)
        known = session.has_tuner or session.examiner.schedule.errors
        return bool(narrow and not known and self.flat_loss(narrow))

    def _look_into_step(self, at_the_end=True):
        # With the diagnosis, which a run that learns has no use for.
        from keras_mixprec.diagnosis.in_training import learning_rate
        from keras_mixprec.diagnosis.standstill import why_it_stands_still

        session, batch = self._session, self._session.ranges.batch
        told = session.examiner.has_reported("not_learning")
        own = has_own_step(session.model)
        if told or own or batch is None or self._taken < _LEAST_STEPS:
            return
        # A schedule may begin later.
        if not (at_the_end or learning_rate(session.model)):
            return
        has_fallen = self._has_fallen()
        fault = why_it_stands_still(session.model, batch, has_fallen)
        if fault is None:
            return
        points, numbers = self._points(), {}
        if points and not has_fallen:
            (since, first), last = points[0], points[-1][1]
            numbers = {"loss_since": since, "loss_then": first, "loss": last}
        fault = fault._replace(numbers=fault.numbers | numbers)
        session.examiner.report(fault.verdict(session.step), session.step)
        self._look_at_inputs()

    def _look_at_inputs(self):
        from keras_mixprec.diagnosis import task

        session, batch = self._session, self._session.ranges.batch
        if batch is not None:
            given = keras.utils.unpack_x_y_sample_weight(self._all(batch))
            scale = task.inputs_not_normalized(session.model, given[0])
            for fault in filter(None, [scale, task.negative_weights(given[2])]):
                verdict = fault.verdict(session.step)
                session.examiner.report(verdict, session.step)

    def _all(self, batch):
        arrays = arrays_in_fit(self._session.model)
        return batch if arrays is None else arrays

    @property
    def _taken(self):
        return self._session.step - self._session.first_step

    def _points(self):
        """The course of the loss since dtypes last changed."""
        since = last_change(self._session.log.story)
        points = self._session.counter_log.loss.points
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
        last = self._session.range_log.last
        found = [r.parts for r in last.readings] if last else []
        named = "weight_gradient", "activation"
        return any(p[n].zero == 1 for p in found for n in named if n in p)
