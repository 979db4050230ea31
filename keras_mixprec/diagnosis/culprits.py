"""Finding the layers whose precision is at fault in one batch.

The search demotes what it finds and looks again, so that it finds the layers
that would cast a repaired result straight back as well.
"""

import math
from collections import defaultdict

import keras

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.backward_judgement import (
    error_in_step,
    judge_backward,
    own_gradients,
)
from keras_mixprec.diagnosis.compare import relative_error
from keras_mixprec.diagnosis.culprit import Culprit
from keras_mixprec.diagnosis.cure import without_needless
from keras_mixprec.diagnosis.forward_judgement import (
    judge_forward,
    low_outputs,
    range_fault,
)
from keras_mixprec.diagnosis.loss_check import LossCheck, loss_error
from keras_mixprec.diagnosis.needed import Needed
from keras_mixprec.diagnosis.scale_in_use import scale_in_use
from keras_mixprec.diagnosis.windows import best_scale_bits, scale_window
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.numerics.dry_step import (
    DryStep,
    compiled_loss,
    dry_step,
    exact_step,
)
from keras_mixprec.numerics.dtypes import computing_in, with_sublayers
from keras_mixprec.numerics.ticks import tick
from keras_mixprec.numerics.twin import Twin
from keras_mixprec.policies.layers import MODEL_PATH, walk_with_model
from keras_mixprec.policies.names import is_fixed
from keras_mixprec.policies.shares import costs

_CONTAINERS = tuple(
    cls.call for cls in (keras.Sequential, keras.src.models.Functional)
)


class Search:
    """The search for culprits in one batch.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        exact: `DryStep` of the whole model in float32, at loss scale 1.
        compiled: Boolean. Whether XLA compiles the model's step.

    Attributes:
        culprits: List of the `Culprit`s found.
        windows: Dict path -> `Window` of the layers that are left in float16.
        scale_bits: Float. The loss scale that was found or given, as a power
            of two.
        errors: As in `Examination`, as the model is built.
    """

    def __init__(self, model, data, exact: DryStep, compiled: bool):
        self._model = model
        self._data = data
        self._exact = exact
        self._exact_calls = {call.name: call for call in exact.calls}
        self._compiled = compiled
        self._demoted = []
        self._scale = 1.0
        self.culprits = []
        self.windows = {}
        self.scale_bits = None
        self.errors = defaultdict(dict)

    def run(self, scale_bits: float | None, moves):
        """Finds the culprits.

        Args:
            scale_bits: Float. The loss scale as a power of two, if it does
                not adapt itself; `None` if it does.
            moves: Function from a variable and its float32 gradient to
                whether the optimizer would move the variable by it.
        """
        windows = self._find_windows(moves)
        self._scale = 2.0 ** self._bits(windows, scale_bits)
        step = self._forward()
        step = self._end_to_end(step)
        known = len(self.culprits)
        self.scale_bits = self._judge_windows(step, windows, scale_bits)
        self._backward(step, self.scale_bits, moves)
        self._take_what_is_around(step, known)
        self._keep_what_is_needed(moves)

    # Forward.

    def _forward(self):
        step = self._dry_step(self._demoted)
        while culprit := self._first_culprit(step):
            step = self._demote_what_runs(culprit, step)
        return step

    def _first_culprit(self, step):
        # Where no weight comes before, whether the loss depends on an
        # infinity is known only by the loss.
        tries = [False] if math.isfinite(step.loss) else [False, True]
        for masks_matter in tries:
            for call in self._low(step):
                with self._as_demoted():
                    error, culprit = judge_forward(
                        call,
                        self._exact_calls.get(call.name),
                        self._compiled,
                        masks_matter,
                    )
                tick()
                self._note(call, "forward", error)
                if culprit is not None:
                    return culprit
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
            except Exception:
                path = _around(path)
                if path not in calls:
                    raise
            self.culprits.pop()
            del self._demoted[-len(culprit.layers) :]
            twin = Twin(calls[path], self._compiled)
            with self._as_demoted():
                layers = without_needless(twin, twin.forward("float32"))
            culprit = culprit._replace(layers=layers)

    def _take_what_is_around(self, step, first):
        """Lets the culprits from `first` on take along what they are in.

        If the step does not run without, as above.
        """
        if len(self.culprits) == first or self._runs(self._demoted):
            return
        calls = {call.path: call for call in step.calls}
        demoted = [x for c in self.culprits[:first] for x in c.layers]
        for index, culprit in enumerate(self.culprits[first:], first):
            path, layers = culprit.path, culprit.layers
            while not self._runs([*demoted, *layers]):
                path = _around(path)
                if path not in calls:
                    break
                layers = with_sublayers(calls[path].layer)
            self.culprits[index] = culprit._replace(layers=layers)
            self._demoted += layers

    def _keep_what_is_needed(self, moves):
        """Drops what the real step, with its own cotangents, does not need."""
        if not self.culprits:
            return
        needed = Needed(
            self._model, self._real_step, self._exact, self._exact_step, moves
        )
        self.culprits = needed.among(self.culprits)
        self._demoted = [x for c in self.culprits for x in c.layers]

    def _real_step(self, demoted):
        scale, draws = 2.0**self.scale_bits, self._exact.draws
        with computing_in("float32", demoted):
            return dry_step(self._model, self._data, scale, draws=draws)

    def _runs(self, demoted):
        try:
            self._dry_step(demoted)
        except Exception:
            return False
        return True

    def _end_to_end(self, step):
        """Demotes the layers that a wrong loss is right without."""
        demoted, known = list(self._demoted), len(self.culprits)
        check = LossCheck(
            self._model,
            lambda demoted: self._dry_step(demoted).loss,
            lambda: self._exact_step().loss,
        )
        off = self._loss_error(step.loss) > thresholds.LOSS_ERROR
        if not off or not check.wrong(demoted) or self._right_when_compiled():
            return step
        cured = self._greedily(step)
        if len(self.culprits) == known or check.right(self._demoted):
            return cured
        # They only drew another loss.
        del self.culprits[known:]
        self._demoted = demoted
        return step

    def _right_when_compiled(self):
        """Whether only the single operations of a dry step are wrong."""
        if not self._compiled:
            return False
        with self._as_demoted():
            low = compiled_loss(self._model, self._data, self._exact.draws)
        # It may draw other random numbers than single operations do.
        with computing_in("float32", with_sublayers(self._model)):
            exact = compiled_loss(self._model, self._data, self._exact.draws)
        return loss_error(low, exact) <= thresholds.LOSS_ERROR

    def _greedily(self, step):
        while self._loss_error(step.loss) > thresholds.LOSS_ERROR:
            best, best_step = None, step
            for call in self._candidates(step):
                layers = with_sublayers(call.layer)
                try:
                    trial = self._dry_step([*self._demoted, *layers])
                # It may not run in float32 without what is around it.
                except Exception:
                    continue
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
                fault = range_fault(Twin(call, self._compiled))
            self._demote(Culprit(call.path, layers, *fault, numbers))
            step = best_step
        return step

    def _candidates(self, step):
        ranks, calls = {}, {}
        for call in self._low(step):
            if call.layer is self._model:
                continue  # With all inside it, which is no candidate.
            twin = Twin(call, self._compiled)
            with self._as_demoted():
                low = low_outputs(twin, self._compiled)
                error = relative_error(low, twin.forward("float32"))
            rank = (twin.adds_loss, error)
            if (error or twin.adds_loss) and rank > ranks.get(call.path, ()):
                ranks[call.path], calls[call.path] = rank, call
        ranked = sorted(ranks, key=ranks.get, reverse=True)
        return [calls[path] for path in ranked[: thresholds.LOSS_CANDIDATES]]

    def _loss_error(self, loss):
        return loss_error(loss, self._exact.loss)

    # Backward.

    def predict_scale_bits(self, moves) -> int:
        """Returns the loss scale that suits most of the model as it is.

        Args:
            moves: As for `run`.
        """
        return self._bits(self._find_windows(moves))

    def _bits(self, windows, scale_bits=None):
        if scale_bits is not None:
            return scale_bits
        possible = scale_in_use(self._model).possible
        return best_scale_bits(windows, costs(self._model), possible)

    def _find_windows(self, moves):
        """The `Window` of each float16 layer's gradients in float32."""
        gradients = {}
        for call in self._low(self._exact):
            if not call.nested and call.layer.compute_dtype == "float16":
                own = own_gradients(call, self._exact, moves)
                gradients.setdefault(call.path, []).extend(own)
        return {path: scale_window(own) for path, own in gradients.items()}

    def _judge_windows(self, step, windows, scale_bits):
        """Demotes the layers whose gradients fit no common loss scale."""
        calls = {c.path: c for c in self._low(step) if not c.nested}
        windows = {p: w for p, w in windows.items() if p in calls}
        bits = self._bits(windows, scale_bits)
        self.windows = {p: w for p, w in windows.items() if w.holds(bits)}
        for path, window in windows.items():
            if not window.holds(bits):
                kind = "underflow" if bits < window.low else "backward_overflow"
                numbers = {
                    "loss_scale_bits": bits,
                    "lowest_bits": window.low,
                    "highest_bits": window.high,
                }
                layers = with_sublayers(calls[path].layer)
                self._demote(Culprit(path, layers, kind, "backward", numbers))
        return bits

    def _backward(self, step, bits, moves):
        known = {c.path for c in self.culprits}
        low = {id(call) for call in self._low(step)}
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
                if own_gradients(exact, self._exact, moves):
                    error, culprit = self._judge_backward(
                        call, exact, step, bits, fed_by_weights
                    )
                    self._note(call, "backward", error)
                if culprit is not None:
                    known.add(call.path)
                    self._demote(culprit)
            fed_by_weights |= bool(call.layer.trainable_variables)

    def _judge_backward(self, call, exact, step, bits, fed_by_weights):
        if step.scale == 2.0**bits:
            error = error_in_step(
                call, exact, step, self._exact, fed_by_weights
            )
            if error <= thresholds.BACKWARD_ERROR * thresholds.UNSUSPICIOUS:
                return error, None
        with self._as_demoted():
            return judge_backward(
                call, exact, self._compiled, bits, fed_by_weights
            )

    # Both.

    def _note(self, call, direction, error):
        # As the model is built: once a layer is demoted, others see better.
        if error is not None:
            self.errors[call.name].setdefault(direction, error)

    def _as_demoted(self):
        """Context in which a layer contains what it will, not what it did."""
        return computing_in("float32", self._demoted)

    def _dry_step(self, demoted):
        with computing_in("float32", demoted):
            return dry_step(
                self._model,
                self._data,
                self._scale,
                self._exact_calls,
                self._exact.draws,
            )

    def _exact_step(self):
        return exact_step(self._model, self._data, self._exact.draws)

    def _low(self, step):
        """The recorded calls that compute in 16 bits, not demoted yet."""
        demoted = {id(layer) for layer in self._demoted}
        return [
            call
            for call in step.calls
            if id(call.layer) not in demoted and computes_low(call.layer)
        ]

    def _demote(self, culprit):
        self.culprits.append(culprit)
        self._demoted += culprit.layers


def _around(path):
    """The path of what a layer is inside of, at last the model's."""
    if path == MODEL_PATH:
        return None
    return path.rpartition("/")[0] or MODEL_PATH


def computes_low(layer) -> bool:
    """Whether a layer itself computes something in a 16-bit float."""
    return (
        layer.compute_dtype in SIXTEEN_BITS
        and not is_fixed(layer)
        and type(layer).call not in _CONTAINERS
    )


def low_layers(model) -> list:
    """Returns the entries of a model that compute in 16 bits."""
    return [e for e in walk_with_model(model) if computes_low(e.layer)]
