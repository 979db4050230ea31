"""Finding the layers that make a whole step's forward pass wrong."""

import math

from keras_mixprec.backend import active
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import nonfinite, relative_error
from keras_mixprec.diagnosis.culprit import Culprit
from keras_mixprec.diagnosis.end_to_end import (
    LossCheck,
    loss_error,
    right_in_xla,
)
from keras_mixprec.diagnosis.forward import low_outputs
from keras_mixprec.diagnosis.loss_fault import fault_behind, step_fault
from keras_mixprec.diagnosis.magnified import lost_shares
from keras_mixprec.diagnosis.run_search import RunSearch
from keras_mixprec.diagnosis.step_errors import without_what_raises
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.dry_step import (
    compiled_step,
    exact_step,
    interrupted,
)
from keras_mixprec.numerics.layer_replay import LayerReplay
from keras_mixprec.numerics.rounding import jittered


class LossSearch(RunSearch):
    """The search for what no layer by itself is seen to do wrong."""

    def _demote_what_runs(self, culprit, step):
        try:
            return super()._demote_what_runs(culprit, step)
        # The code outside of layers may mix what the culprit returns then with
        # what others do, as the sum of a loss and those that layers add.
        except active.replay().REFUSALS:
            with self._as_demoted():
                step, mixed = without_what_raises(
                    lambda: self._dry_step(self._demoted),
                    self._model,
                    lambda: interrupted(self._model, self._data),
                    self._exact.calls,
                    self._compile_step if self._compiled else None,
                )
            for other in mixed:
                self._demote(other)
            return step

    def _compile_step(self):
        compiled_step(self._model, self._data, 1.0)

    def _error(self, step):
        return self._loss_error(step.loss)

    def _wrong(self, demoted):
        return self._loss_check().wrong(demoted)

    def _right(self, demoted):
        return self._loss_check().right(demoted)

    def _loss_check(self):
        return LossCheck(
            self._model,
            lambda demoted: self._dry_step(demoted).loss,
            lambda: exact_step(self._model, self._data).loss,
        )

    def _masks_may_matter(self, step):
        return not math.isfinite(step.loss)

    def _fault_behind(self, call, layers):
        replay = LayerReplay(call, self._compiled)
        known = self._exact_calls.get(call.name)
        return fault_behind(replay, known, self._model, self._data, layers)

    def _fault_in(self, layers):
        # What is divided by an infinity is 0, and finite.
        found = step_fault(self._model, self._data, layers)
        return found or super()._fault_in(layers)

    def _numbers_of(self, step):
        return {"loss": step.loss, "loss_in_float32": self._exact.loss}

    def _is_finite(self, step):
        gradients = [to_array(g) for g in step.gradients.values()]
        return math.isfinite(step.loss) and not nonfinite(gradients)

    def _is_cause(self, step, repaired):
        return True

    def _right_in_xla(self):
        """Whether only the single operations of a dry step are wrong."""
        with self._as_demoted():
            return self._compiled and right_in_xla(self._model, self._data)

    def _magnified(self, step):
        """Demotes the layers whose roundings a later layer magnifies."""
        while True:
            shares = lost_shares(step, self._exact)
            name = max(shares, key=shares.get, default=None)
            found = name and self._behind_loss_in(step, name, shares[name])
            if not found:
                return step
            culprit, step = found
            self._demote(culprit)

    def _behind_loss_in(self, step, name, share):
        """The one layer that most of what a call loses comes from, if any.

        With a step without it.
        """
        least = share * thresholds.ONE_CAUSE
        if (
            share <= thresholds.LOSS_ERROR
            or self._is_chance(step)
            or not self._settles(name, least)
        ):
            return None
        for call, layers, trial in self._trials(step):
            left = lost_shares(trial, self._exact).get(name, math.inf)
            if left <= least and self._only_rounds(call):
                numbers = {"lost_share": share, "lost_in": name}
                fault = "precision_loss", "forward"
                return Culprit(call.path, layers, *fault, numbers), trial
        return None

    def _settles(self, name, least):
        """Whether a call returns the same however the weights are rounded."""
        for seed in range(thresholds.LOSS_JITTERS):
            with jittered(self._model, seed):
                other = exact_step(self._model, self._data)
            if lost_shares(other, self._exact).get(name, 0.0) > least:
                return False
        return True

    def _only_rounds(self, call):
        """Whether a layer is off by a rounding, in XLA as well.

        By more it would have been found by itself, or a tie falls on its other
        side; and the single operations of a dry step may round alone.
        """
        replay = LayerReplay(call, self._compiled)
        with self._as_demoted():
            exact = replay.forward("float32")
            error = relative_error(low_outputs(replay, self._compiled), exact)
        outputs = [to_array(x) for x in call.float_outputs]
        in_dry_step = relative_error(outputs, exact)
        return thresholds.FORWARD_ERROR >= error >= 0.5 * in_dry_step

    def _loss_error(self, loss):
        return loss_error(loss, self._exact.loss)
