"""Finding the layers whose precision is at fault in one batch.

The search demotes what it finds and runs again, so that it finds the layers
that would cast a repaired result straight back as well.
"""

import functools
import math

from keras_mixprec.backend import active
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.backward import (
    check_backward,
    classify_window,
    error_in_step,
    gradients_of_layers,
    output_gradients_overflow,
    own_gradients,
)
from keras_mixprec.diagnosis.compare import relative_error
from keras_mixprec.diagnosis.culprit import layers_of
from keras_mixprec.diagnosis.loss_search import LossSearch
from keras_mixprec.diagnosis.needed import NeededInStep
from keras_mixprec.diagnosis.scales import (
    best_scale_bits,
    lost,
    scale_in_use,
    scale_window,
)
from keras_mixprec.diagnosis.state_check import StateCheck
from keras_mixprec.diagnosis.whole_step import WholeSearch, WholeStep
from keras_mixprec.numerics.calls import tick
from keras_mixprec.numerics.dry_step import exact_step
from keras_mixprec.numerics.layer_hooks import computing_in
from keras_mixprec.numerics.rounding import jittered
from keras_mixprec.policies.summary import costs

# By how many powers of two a lower loss scale is tried before a layer is
# blamed: a normalization meets 1 to 4 more inside than in its gradients.
_BITS_LOWER = 4


class Search(LossSearch):
    """The search for culprits in one batch; see `SearchState`."""

    def run(self, scale_bits: float | None, effective):
        """Finds the culprits.

        Args:
            scale_bits: Float. The loss scale as a power of two, if it does
                not adapt itself; `None` if it does.
            effective: Function from a variable and its float32 gradient to
                whether the optimizer would move the variable by it.
        """
        windows = self._find_windows(effective)
        bits = self._bits(windows, scale_bits, effective)
        if not all(window.holds(bits) for window in windows.values()):
            windows = self._without_noise(windows)
            bits = self._bits(windows, scale_bits, effective)
        self._scale = 2.0**bits
        step = self._forward()
        step = self._end_to_end(step)
        step = self._magnified(step)
        known, as_run = len(self.culprits), list(self._demoted)
        bits = self.scale_bits = self._classify_windows(
            step, windows, scale_bits, effective
        )
        self._backward(step, effective, adapts=scale_bits is None)
        bits = self.scale_bits
        self._widen_to_enclosing(step, known)
        self._keep_what_is_needed(effective)
        if as_run != self._demoted or step.scale != 2.0**bits:
            step = None
        self._whole_step(step, adapts=scale_bits is None)

    def _keep_what_is_needed(self, effective):
        """Drops what the real step, with its own cotangents, does not need."""
        scale = 2.0**self.scale_bits
        needed = NeededInStep(
            self._model, self._data, self._exact, scale, effective
        )
        self.culprits = needed.among(self.culprits)
        if self._compiled:
            self._spare_what_xla_ignores()
        self._demoted = layers_of(self.culprits)

    def _spare_what_xla_ignores(self):
        """Drops those whose non-finite gradients a compiled step ignores.

        As that of a ReLU does, which op by op multiplies them by 0.
        """
        for culprit in [*self.culprits]:
            others = [c for c in self.culprits if c is not culprit]
            demoted = layers_of(others)
            if culprit.numbers.get("nonfinite_gradients") and not (
                self._whole.wrong_when_compiled(demoted, self.scale_bits)
            ):
                self.culprits = others

    # Backward.

    def predict_scale_bits(self, effective) -> int:
        """Returns the loss scale that suits most of the model as it is.

        Args:
            effective: As for `run`.
        """
        return self._best_bits(self._find_windows(effective))

    def _bits(self, windows, scale_bits, effective):
        """The given scale, or the best one; below 1 for large gradients only.

        Where the weights' gradients are not large, the layers whose outputs'
        gradients overflow are at fault, and left out; not if one scale suits
        all and either all other layers need one below 1 as well, as with
        sample weights of 2e5, or the gradients of those at fault are but
        rounding errors, as at the far end of a deep network.
        """
        if scale_bits is not None:
            return scale_bits
        bits = self._best_bits(windows)
        if bits >= 0:
            return bits
        steep = output_gradients_overflow(self._low(self._exact), self._exact)
        others = {p: w for p, w in windows.items() if p not in steep}
        of_others = self._best_bits(others)
        at_fault = [w for w in windows.values() if not w.holds(of_others)]
        is_general = of_others < 0 or all(w.low == -math.inf for w in at_fault)
        suits_all = all(window.holds(bits) for window in windows.values())
        return bits if suits_all and is_general else of_others

    def _best_bits(self, windows):
        possible = scale_in_use(self._model).possible
        return best_scale_bits(windows, costs(self._model), possible)

    def vanishing(self, bits: float, effective) -> list:
        """Returns the layers whose gradients a loss scale of `2**bits` loses.

        Paths, of those that are left in float16.

        Args:
            bits: Float.
            effective: As for `run`.
        """
        low = {path for path, own in self.windows.items() if bits < own.low}
        gradients = self._own_gradients(effective) if low else {}
        return [p for p in gradients if p in low and lost(gradients[p], bits)]

    def _find_windows(self, effective):
        """The `ScaleWindow` of each float16 layer's gradients in float32."""
        gradients = self._own_gradients(effective)
        return {path: scale_window(own) for path, own in gradients.items()}

    def _without_noise(self, windows):
        """Windows without a lower end where gradients are but rounding errors.

        As those are that reach attention through a normalization of a single
        channel, where they cancel: weights off by half an ulp make others of
        them, and no training misses them.
        """
        with jittered(self._model, 0):
            other = exact_step(self._model, self._data)
        others, resolved = {call.name: call for call in other.calls}, set()
        for call in self._low(self._exact):
            own = [
                own_gradients(call, step, lambda *_: True)
                for call, step in (
                    (others.get(call.name, call), other),
                    (call, self._exact),
                )
            ]
            same = len(own[0]) == len(own[1])
            if not same or relative_error(*own) <= thresholds.NOISE:
                resolved.add(call.path)
        return {
            path: window if path in resolved else window._replace(low=-math.inf)
            for path, window in windows.items()
        }

    def _own_gradients(self, effective):
        low = [call for call in self._low(self._exact) if not call.nested]
        return gradients_of_layers(low, self._exact, effective)

    def _classify_windows(self, step, windows, scale_bits, effective):
        """Demotes the layers whose gradients fit no common loss scale."""
        calls = {c.path: c for c in self._low(step) if not c.nested}
        windows = {p: w for p, w in windows.items() if p in calls}
        bits = self._bits(windows, scale_bits, effective)
        self.windows = {p: w for p, w in windows.items() if w.holds(bits)}
        for path, window in windows.items():
            if not window.holds(bits):
                self._demote(classify_window(window, bits, calls[path]))
        return bits

    def _backward(self, step, effective, adapts):
        """Demotes the layers whose gradients are wrong.

        Args:
            step: `DryStep` with the layers in 16 bits that are left in it.
            effective: As for `run`.
            adapts: Boolean. Whether the loss scale adapts itself.
        """
        known = {c.path for c in self.culprits}
        low = {id(call) for call in self._low(step)}
        overflows: dict = {}
        fed_by_weights = False
        for call in step.calls:
            tick()
            exact = self._exact_calls.get(call.name)
            if (
                id(call) in low
                and not call.nested
                and call.path not in known
                and exact is not None
            ):
                culprit = None
                if own_gradients(exact, self._exact, effective):
                    error, culprit = self._classify_backward(
                        call, exact, step, fed_by_weights
                    )
                    self._note(call, "backward", error)
                if culprit is not None:
                    known.add(call.path)
                    self._demote(culprit)
                    if culprit.kind == "backward_overflow":
                        overflows[call.path] = call, exact, fed_by_weights
            fed_by_weights |= bool(call.layer.trainable_variables)
        if adapts and overflows:
            self._lower_scale(overflows)

    def _lower_scale(self, overflows):
        """Takes a lower loss scale that is right without demotions, if any is.

        A number inside of a layer may overflow where its gradients still fit,
        and the loss scale then falls to where it does not.

        Args:
            overflows: Dict from the path of a culprit to its call, the same
                call in float32, and `fed_by_weights` of `check_backward`.
        """
        others = [c for c in self.culprits if c.path not in overflows]
        demoted = layers_of(others)

        def right(bits):
            with computing_in("float32", demoted):
                return not any(
                    check_backward(call, exact, self._compiled, bits, fed)[1]
                    for call, exact, fed in overflows.values()
                )

        possible = scale_in_use(self._model).possible[0]
        lowest = max([possible, *(w.low for w in self.windows.values())])
        for lower in range(1, _BITS_LOWER + 1):
            bits = self.scale_bits - lower
            if bits < lowest:
                return
            if right(bits):
                self.scale_bits = bits
                self.culprits, self._demoted = others, demoted
                return

    def _classify_backward(self, call, exact, step, fed_by_weights):
        bits = self.scale_bits
        for known in self._backward_passes(step, 2.0**bits):
            own = next((c for c in known.calls if c.name == call.name), None)
            if own is not None:
                error = error_in_step(
                    own, exact, known, self._exact, fed_by_weights
                )
                if error <= thresholds.BACKWARD_ERROR * thresholds.NEGLIGIBLE:
                    return error, None
        with self._as_demoted():
            return check_backward(
                call, exact, self._compiled, bits, fed_by_weights
            )

    def _backward_passes(self, step, scale):
        """Yields the step, then one without the errors of the layers after."""
        if step.scale == scale:
            yield step
        if self._own_errors is None:
            self._scale = scale
            self._own_errors = self._dry_step(self._demoted, self._exact_calls)
        yield self._own_errors

    # The whole step.

    @functools.cached_property
    def _whole(self):
        args = self._model, self._data, self._exact, self._compiled
        return WholeStep(*args)

    def _whole_step(self, step, adapts):
        """Demotes the layers that the step is right without.

        Args:
            step: `DryStep`, `None` if it is not known as the model is now.
            adapts: Boolean. Whether the loss scale adapts itself.
        """
        whole = self._whole
        try:
            step = step or whole.step(self._demoted, self.scale_bits)
        # As above, it may not run however it is tried.
        except active.replay().REFUSALS:
            return
        state = StateCheck(self._model, self._data, self._exact, self._demoted)
        found = state.culprits(step)
        self.still = state.stored(step)
        wrong = whole.wrong(step, self._demoted, self.scale_bits)
        if wrong and not self._is_chance(step):
            found += self._behind(whole, adapts)
        if found:
            known, step = len(self.culprits), self._dry_step(self._demoted)
            for culprit in found:
                self._demote(culprit)
            self._widen_to_enclosing(step, known)

    def _behind(self, whole, adapts):
        """What is to blame, if the step is right at no other loss scale."""
        bits = self.scale_bits
        other = whole.other_scale(self._demoted, bits) if adapts else None
        if other is not None:
            self.scale_bits = other
            return []
        known = self._exact_calls, self._compiled
        demoted = self._demoted
        search = WholeSearch(whole, bits, demoted, self._dry_step, *known)
        low = self._low(self._dry_step(demoted))
        return search.culprits(self._model, low)
