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
from keras_mixprec.diagnosis.forward import is_cast_before, low_outputs
from keras_mixprec.diagnosis.loss_fault import fault_behind
from keras_mixprec.diagnosis.magnified import lost_shares
from keras_mixprec.diagnosis.search_state import SearchState
from keras_mixprec.numerics.arrays import jittered, to_array
from keras_mixprec.numerics.dry_step import exact_step
from keras_mixprec.numerics.layer_hooks import with_sublayers
from keras_mixprec.numerics.layer_replay import LayerReplay


class LossSearch(SearchState):
    """The search for what no layer by itself is seen to do wrong."""

    def _end_to_end(self, step):
        """Demotes the layers that a wrong loss is right without."""
        demoted, known = list(self._demoted), len(self.culprits)
        check = LossCheck(
            self._model,
            lambda demoted: self._dry_step(demoted).loss,
            lambda: exact_step(self._model, self._data).loss,
        )
        off = self._loss_error(step.loss) > thresholds.LOSS_ERROR
        if not off or self._is_chance(step) or not check.wrong(demoted):
            return step
        if self._right_in_xla():
            return step
        repaired = self._greedily(step)
        if len(self.culprits) == known or check.right(self._demoted):
            return repaired
        # They only drew another loss.
        del self.culprits[known:]
        self._demoted = demoted
        return step

    def _is_chance(self, step):
        """Whether float32 may only have drawn other random numbers.

        Of generators that are not Keras', JAX' draw others in each dtype.
        """
        gradients = [to_array(g) for g in step.gradients.values()]
        return (
            math.isfinite(step.loss)
            and not nonfinite(gradients)
            and any(
                LayerReplay(c).draws_by_itself() for c in self._low(self._exact)
            )
        )

    def _right_in_xla(self):
        """Whether only the single operations of a dry step are wrong."""
        with self._as_demoted():
            return self._compiled and right_in_xla(self._model, self._data)

    def _greedily(self, step):
        while self._loss_error(step.loss) > thresholds.LOSS_ERROR:
            best, best_step = None, step
            for call, layers, trial in self._trials(step):
                if self._loss_error(trial.loss) < self._loss_error(
                    best_step.loss
                ):
                    best, best_step = (call, layers), trial
            if best is None:
                break
            call, layers = best
            numbers = {"loss": step.loss, "loss_in_float32": self._exact.loss}
            fault = ("precision_loss", "forward")
            if not math.isfinite(step.loss):
                replay = LayerReplay(call, self._compiled)
                known = self._exact_calls.get(call.name)
                with self._as_demoted():
                    fault = fault_behind(
                        replay, known, self._model, self._data, layers
                    )
            self._demote(Culprit(call.path, layers, *fault, numbers))
            step = best_step
        return step

    def _trials(self, step):
        """Yields each candidate, its layers, and the step without them."""
        for call in self._candidates(step):
            layers = with_sublayers(call.layer)
            try:
                trial = self._dry_step([*self._demoted, *layers])
            # It may not run in float32 without what is around it.
            except active.replay().REFUSALS:
                continue
            yield call, layers, trial

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

    def _candidates(self, step):
        ranks, calls = {}, {}
        for call in self._low(step):
            if call.layer is self._model:
                continue  # With all inside it, which is no candidate.
            replay = LayerReplay(call, self._compiled)
            with self._as_demoted():
                low = low_outputs(replay, self._compiled)
                error = relative_error(low, replay.forward("float32"))
            if is_cast_before(call, self._exact_calls.get(call.name)):
                error = math.inf
            rank = (bool(call.losses), error)
            if (error or call.losses) and rank > ranks.get(call.path, ()):
                ranks[call.path], calls[call.path] = rank, call
        ranked = sorted(ranks, key=ranks.get, reverse=True)
        return [calls[path] for path in ranked[: thresholds.LOSS_CANDIDATES]]

    def _loss_error(self, loss):
        return loss_error(loss, self._exact.loss)
