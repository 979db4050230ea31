"""Finding the layers that make a run wrong: a train step's loss, or outputs.

Layer by layer first, each on what it was given; then those that the result of
the whole run is right without.
"""

import math

from keras_mixprec.backend import active
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import relative_error
from keras_mixprec.diagnosis.culprit import Culprit
from keras_mixprec.diagnosis.forward import (
    check_forward,
    is_cast_before,
    low_outputs,
    without_needless,
)
from keras_mixprec.diagnosis.search_state import SearchState, enclosing_path
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.calls import tick
from keras_mixprec.numerics.layer_hooks import with_sublayers
from keras_mixprec.numerics.layer_replay import LayerReplay

# Culprits that are found one by one, each in a run of its own, before more are
# sought at once: a model seldom has as many that are no chain.
_CHAIN = 3


class RunSearch(SearchState):
    """The search in one run of a model, again and again with demoted layers.

    What a run is, subclasses say: `_dry_step` runs it, `_error` is how far its
    result is from float32's.
    """

    def _error(self, step) -> float:
        """The share by which the result is off; infinite if it is no number."""
        raise NotImplementedError

    def _wrong(self, demoted) -> bool:
        """Whether it is wrong however the weights are rounded."""
        raise NotImplementedError

    def _right(self, demoted) -> bool:
        """Whether it is right however the weights are rounded."""
        raise NotImplementedError

    def _is_finite(self, step) -> bool:
        """Whether all that is computed with the result is finite."""
        raise NotImplementedError

    def _is_cause(self, step, repaired) -> bool:
        """Whether a run with one layer more in float32 says it is to blame."""
        raise NotImplementedError

    def _right_in_xla(self) -> bool:
        """Whether only the single operations of a dry step are wrong."""
        raise NotImplementedError

    def _masks_may_matter(self, step) -> bool:
        """Whether an infinity may have spoilt the result."""
        raise NotImplementedError

    def _fault_behind(self, call, layers) -> tuple[str, str]:
        """Kind and direction of what is not finite without the layers."""
        raise NotImplementedError

    def _fault_in(self, layers) -> tuple[str, str]:
        """The same of a result that is finite, but wrong without the layers."""
        return "precision_loss", "forward"

    def _numbers_of(self, step) -> dict:
        """The evidence of a wrong result."""
        raise NotImplementedError

    def _located(self, culprit, call):
        """The culprit with which call of the layer it is, if that counts."""
        return culprit

    # Layer by layer.

    def _forward(self):
        step = self._dry_step(self._demoted)
        due = _CHAIN
        while culprit := self._first_culprit(step):
            step = self._demote_what_runs(culprit, step)
            if len(self.culprits) >= due:
                step = self._many_at_once(step)
                due = len(self.culprits) + _CHAIN
        return step

    def _many_at_once(self, step):
        """Demotes those culprits at once that can be foreseen, in one run.

        They are wrong on what float32 gives them. In a run with all of them in
        float32 each is given what it is with those before it repaired, and is
        a culprit only if it is wrong on that, too.
        """
        foreseen = self._foreseen(step)
        before = None
        # Once none is confirmed, one by one takes no longer.
        while foreseen and before != len(self._demoted):
            before = len(self._demoted)
            try:
                step = self._dry_step([*self._demoted, *foreseen.values()])
            except active.replay().REFUSALS:
                break
            if self._confirm(step, foreseen):
                return step
        return self._dry_step(self._demoted)

    def _foreseen(self, step):
        """Layers with nothing inside that err on float32's inputs, by path."""
        found = {}
        for call in self._low(step):
            exact = self._exact_calls.get(call.name)
            alone = len(with_sublayers(call.layer)) == 1
            if alone and exact is not None and not call.draws:
                outputs = [to_array(x) for x in exact.float_outputs]
                low = LayerReplay(exact, self._compiled).forward()
                if relative_error(low, outputs) > thresholds.FORWARD_ERROR:
                    found[call.path] = call.layer
            tick()
        return found

    def _confirm(self, step, foreseen):
        """Demotes the first of them that are culprits; whether all are.

        Args:
            step: The run with all of them in float32.
            foreseen: Dict of path to layer, of which those that are culprits
                are removed, and the first that is none.
        """
        for call in self._low(step):
            if any(call.layer is layer for layer in self._demoted):
                continue  # By an earlier call of it.
            was_wide = call.path in foreseen
            exact = self._exact_calls.get(call.name)
            with self._as_demoted():
                error, culprit = check_forward(
                    call, exact, self._compiled, False, was_wide
                )
            tick()
            if was_wide:
                del foreseen[call.path]
            if was_wide != (culprit is not None):
                return False
            self._note(call, "forward", error)
            if culprit is not None:
                self._demote(self._located(culprit, call))
        return True

    def _first_culprit(self, step):
        # Where no weight comes before, whether the result depends on an
        # infinity is known only by the result.
        tries = [False, True] if self._masks_may_matter(step) else [False]
        for masks_matter in tries:
            for call in self._low(step):
                with self._as_demoted():
                    error, culprit = check_forward(
                        call,
                        self._exact_calls.get(call.name),
                        self._compiled,
                        masks_matter,
                    )
                tick()
                self._note(call, "forward", error)
                if culprit is not None:
                    if masks_matter:
                        self._infinite.add(culprit.path)
                    return self._located(culprit, call)
        return None

    def _demote_what_runs(self, culprit, step):
        """Demotes a culprit, with what is around it if it has to be.

        TensorFlow refuses to add the float32 that it returns then to the
        float16 of the layer that it is inside of.
        """
        calls = {call.path: call for call in step.calls}
        path = culprit.path
        while True:
            self._demote(culprit)
            try:
                return self._dry_step(self._demoted)
            except active.replay().REFUSALS:
                path = enclosing_path(path)
                if path not in calls:
                    raise
            self.culprits.pop()
            del self._demoted[-len(culprit.layers) :]
            replay = LayerReplay(calls[path], self._compiled)
            with self._as_demoted():
                layers = without_needless(replay, replay.forward("float32"))
            culprit = culprit._replace(layers=layers)

    # The run as a whole.

    def _end_to_end(self, step):
        """Demotes the layers that a wrong result is right without."""
        demoted, known = list(self._demoted), len(self.culprits)
        off = self._error(step) > thresholds.LOSS_ERROR
        if not off or self._is_chance(step) or not self._wrong(demoted):
            return step
        if self._right_in_xla():
            return step
        repaired = self._greedily(step)
        if len(self.culprits) == known or self._right(self._demoted):
            return repaired
        # They only drew another result.
        del self.culprits[known:]
        self._demoted = demoted
        return step

    def _greedily(self, step):
        while self._error(step) > thresholds.LOSS_ERROR:
            best, best_step = None, step
            for call, layers, trial in self._trials(step):
                if self._error(trial) < self._error(best_step):
                    best, best_step = (call, layers), trial
            if best is None or not self._is_cause(step, best_step):
                break
            call, layers = best
            with self._as_demoted():
                if math.isfinite(self._error(step)):
                    fault = self._fault_in(layers)
                else:
                    fault = self._fault_behind(call, layers)
            numbers = self._numbers_of(step)
            culprit = Culprit(call.path, layers, *fault, numbers)
            self._demote(self._located(culprit, call))
            step = best_step
        return step

    def _is_chance(self, step):
        """Whether float32 may only have drawn other random numbers.

        Of generators that are not Keras', JAX' draw others in each dtype.
        """
        return self._is_finite(step) and any(
            LayerReplay(c).draws_by_itself() for c in self._low(self._exact)
        )

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
