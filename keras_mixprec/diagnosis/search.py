"""Finds the layers whose precision makes a run wrong.

A run is a train step, or calls without a loss. The culprits are the smallest
set of layers that makes the run right by computing in float32. At the end, the
search checks each culprit in a run with the other culprits in float32.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import keras

from keras_mixprec.backend import active
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.cause import (
    check_forward,
    is_cast_before,
    kind_of_range,
)
from keras_mixprec.diagnosis.criterion import (
    RESULT,
    Criterion,
    nonfinite,
    relative_error,
)
from keras_mixprec.diagnosis.culprit import (
    Culprit,
    computes_low,
    rounded_integers,
)
from keras_mixprec.numerics.arrays import to_arrays
from keras_mixprec.numerics.calls import LayerCall
from keras_mixprec.numerics.layer_hooks import computing_in, with_sublayers
from keras_mixprec.numerics.layer_replay import Cause, LayerReplay
from keras_mixprec.policies.layers import MODEL_PATH


class Run:
    """Repeats a run of a model on one batch, with layers in various dtypes.

    Args:
        model: A built `keras.Model`.
        exact: The run in float32, with its calls.
        compiled: Boolean, whether XLA compiles the run.
        criterion: `Criterion` to compare the run with `exact`.

    Attributes:
        model: As given.
        demoted: List of the layers that are known to need float32.
        exact_calls: Dict from names to the `LayerCall`s of `exact`.
        bits: Float. The loss scale as a power of two.
        errors: Dict from parts to relative errors, from the last comparison.
    """

    def __init__(self, model, exact, compiled: bool, criterion: Criterion):
        self.model = model
        self.demoted: list = []
        self.exact_calls = {call.name: call for call in exact.calls}
        self.bits = 0.0
        self.errors = {RESULT: 0.0}
        self._exact = exact
        self._compiled = compiled
        self._criterion = criterion

    def take(self, *, records: bool = False):
        """Returns the results of the run with the current dtypes of layers.

        Args:
            records: Boolean, whether to record the calls to layers.
        """
        raise NotImplementedError

    def compiled(self):
        """Returns the results of the run as XLA computes it."""
        raise NotImplementedError

    def numbers(self) -> dict:
        """Returns the error of the whole run, as evidence."""
        raise NotImplementedError

    def cause(self, layers: list) -> Cause | None:
        """Returns why the run is finite only with some layers in float32.

        Args:
            layers: List of the layers whose float32 makes the run finite.
        """
        raise NotImplementedError

    def located(self, culprit: Culprit, call) -> Culprit:
        """Returns the culprit. For a loop, adds the number of the call."""
        return culprit

    def own_faults(self, low) -> Iterator[Callable]:
        """Yields checks: functions of a call that return a `Culprit` or `None`.

        Args:
            low: The result of `record`, with all other culprits in float32.
        """
        self.compare(low)
        yield lambda call: check_forward(call, self._compiled)

    def low(self, calls: list) -> list:
        """Returns the calls that compute in 16 bits and are not demoted."""
        demoted = set(map(id, self.demoted))
        return [
            call
            for call in calls
            if id(call.layer) not in demoted and computes_low(call.layer)
        ]

    def compare(self, run):
        """Compares a run in 16 bits with the one in float32."""
        self.errors = self._criterion.errors(run)

    def wrong(self, run) -> bool:
        """Returns whether a run is wrong, also under XLA if XLA compiles it.

        Args:
            run: The results of the run in 16 bits.
        """
        if self._criterion.fits(run):
            return False
        self.compare(run)
        return not self._compiled or self.wrong_in_xla()

    def wrong_in_xla(self) -> bool:
        """Returns whether the run is wrong as XLA computes it."""
        with computing_in("float32", self.demoted):
            return not self._criterion.fits(self.compiled())

    def right(self, layers: list) -> bool:
        """Returns whether a run with the layers in float32 is right.

        Args:
            layers: List of layers, in addition to `demoted`.
        """
        try:
            with computing_in("float32", [*self.demoted, *layers]):
                return self._is_right(self.take())
        # TensorFlow and torch raise an error if some dtypes are mixed. A
        # run that raises such an error counts as failed.
        except active.replay().REFUSALS:
            return False

    def _is_right(self, run):
        return self._criterion.fits(run)

    def record(self, layers: list):
        """Runs with the layers in float32, and records the calls.

        Args:
            layers: As for `right`.
        """
        with computing_in("float32", [*self.demoted, *layers]):
            return self.take(records=True)

    def own_error(self, call) -> float:
        """Returns a layer's own error, as a multiple of its limit."""
        exact = self.exact_calls.get(call.name)
        if exact is None:
            return 0.0
        with computing_in("float32", self.demoted):
            return instability(exact, 2.0**self.bits)

    def fault(self, path, layers: list, call=None) -> Culprit:
        """Returns the fault of code outside layers.

        Args:
            path: String. The `path` of the `Culprit`.
            layers: List of the layers whose float32 repairs the fault.
            call: `LayerCall` of the layer before the code. Defaults to `None`.
        """
        kind, direction, evidence = self._fault(layers, call)
        numbers = self.numbers() | evidence
        return Culprit(path, layers, kind, direction, numbers)

    def _fault(self, layers, call):
        cause = self.cause([call.layer] if call else layers) if layers else None
        known = self.exact_calls.get(call.name) if call else None
        result = self.errors[RESULT]
        is_cast = call is not None and is_cast_before(call, known)
        if call and math.isinf(result) and (cause is None or is_cast):
            replay = LayerReplay(call, self._compiled)
            return kind_of_range(replay, known), "forward", {}
        if cause is not None and cause.kind == "forward_overflow":
            return cause.kind, "forward", cause.evidence
        if known is not None:
            given = LayerReplay(known).cast_inputs
            rounded = rounded_integers(given, known.layer.compute_dtype)
            # The cast rounds integers in the layer's input, such as ids.
            if rounded:
                return "precision_loss", "forward", rounded
        if cause is not None:
            return cause.kind, "forward", cause.evidence
        # Calls without gradients have no other errors.
        forward = result > thresholds.LOSS_ERROR or [*self.errors] == [RESULT]
        direction = "forward" if forward else "backward"
        overflows = math.inf in self.errors.values()
        kind = f"{direction}_overflow" if overflows else "precision_loss"
        return kind, direction, {}


def culprits_of(run: Run, low: list) -> list[Culprit]:
    """Returns the culprits of a wrong run.

    The list is empty if only the sum of all layers' rounding errors is to
    blame.

    Args:
        run: `Run`.
        low: List of the run's `LayerCall`s in 16 bits, innermost first.
    """
    # The model's own code may compute something outside any layer, so the model
    # itself is a possible culprit.
    layers = {call.path: with_sublayers(call.layer) for call in low}
    layers[MODEL_PATH] = [run.model]

    def fits(paths):
        return run.right([x for path in paths for x in layers[path]])

    ranked = _ranked(run, low)
    found = smallest_set(ranked, fits)
    if found is None:
        in_model = dict.fromkeys([MODEL_PATH, *ranked])
        found = smallest_set([*in_model], fits)
    if found is None:
        overflows = math.inf in run.errors.values()
        return [run.fault(None, [])] if overflows else []
    parts = {path: layers[path] for path in layers if path in found}
    for path in parts:
        parts = parts | {path: _fewest(run, parts[path], _others(parts, path))}
    return [_culprit(run, path, parts) for path in parts]


def _others(parts, path):
    return [x for other in parts if other != path for x in parts[other]]


def _fewest(run, layers, others):
    """Returns the parts of a layer that must compute in float32."""
    outer, *inside = layers
    if not inside:
        return layers
    kept = [outer]
    if isinstance(outer, _RUN_OTHERS) and run.right([*others, *inside]):
        kept = []

    def fits(places):
        return run.right([*others, *kept, *(inside[n] for n in places)])

    found = smallest_set(range(len(inside)), fits)
    if found is None:
        return layers
    return [*kept, *(inside[n] for n in sorted(found))]


# Layers that run other layers, and compute little or nothing themselves.
_RUN_OTHERS = (keras.layers.TimeDistributed, keras.Model)


def _ranked(run, low):
    """Returns the paths of layers, the most likely culprit first.

    Layers that make numbers non-finite come first, and then the layers with the
    largest errors.
    """
    bad = {c.name for c in low if nonfinite(to_arrays(c.float_outputs))}
    around = {x.name for call in low if call.name in bad for x in call.around}
    keys = {}
    for order, call in enumerate(low):
        own = run.own_error(call)
        given = to_arrays(LayerReplay(call).inputs)
        begins = call.name in bad - around and not nonfinite(given)
        doubtful = own >= thresholds.NEGLIGIBLE
        key = (not begins, not doubtful, call.nested, -own, order)
        keys[call.path] = min(key, keys.get(call.path, key))
    return sorted(keys, key=keys.get)


def _culprit(run, path, parts):
    """Returns the fault of a layer while the other culprits are in float32."""
    own, others = parts[path], _others(parts, path)
    low = run.record(others)
    calls = [call for call in low.calls if call.path == path]
    # Also check the enclosing layers, because they compute with the results of
    # the layer.
    around = [outer for call in calls[-1:] for outer in reversed(call.around)]
    around = [outer for outer in around if computes_low(outer.layer)]
    for check in run.own_faults(low):
        with computing_in("float32", [*run.demoted, *others]):
            for call in [*calls, *around]:
                culprit = check(call)
                if culprit is not None:
                    return run.located(culprit._replace(layers=own), call)
    if path == MODEL_PATH or not calls:
        return run.fault(path, own)
    with computing_in("float32", [*run.demoted, *others]):
        return run.located(run.fault(path, own, calls[-1]), calls[-1])


def smallest_set(ranked: Sequence, fits: Callable) -> frozenset | None:
    """Returns a minimal set that fits: each of its members is needed.

    The search doubles the number of leading members until they fit. So most of
    the model stays in 16 bits, and few trials mix dtypes within a block. Then
    the search removes members by halves, the last ranked first.

    Args:
        ranked: The possible members, such as paths of layers, the most likely
            first.
        fits: Function of a set. If a set fits, most larger sets must fit too.

    Returns:
        The set, or `None` if all of `ranked` together does not fit.
    """
    fits = functools.cache(fits)
    kept = _shortest_head(ranked, fits)
    if not kept:
        return kept
    least_first = [one for one in reversed(ranked) if one in kept]
    kept = _without(least_first, kept, fits)
    # A member that the larger set needed may no longer be needed, so try once
    # more to remove each member.
    for one in least_first:
        if one in kept and fits(kept - {one}):
            kept -= {one}
    return kept


def _shortest_head(ranked, fits):
    size = 0
    while not fits(frozenset(ranked[:size])):
        if size >= len(ranked):
            return None
        size = 2 * size or 1
    return frozenset(ranked[:size])


def _without(spared, kept, fits):
    """Removes members from `kept`, all at once or by halves."""
    rest = kept.difference(spared)
    if fits(rest):
        return rest
    if len(spared) == 1:
        return kept
    middle = len(spared) // 2
    kept = _without(spared[:middle], kept, fits)
    return _without(spared[middle:], kept, fits)


def instability(call: LayerCall, scale: float) -> float:
    """Returns a layer's error as a multiple of its limit.

    The layer runs again on its inputs, forward and backward, in its own dtype
    and in float32. The larger of the two errors counts.

    Args:
        call: `LayerCall` of a step in float32, at loss scale 1.
        scale: Float. The loss scale.
    """
    replay = LayerReplay(call)
    if nonfinite(to_arrays(replay.inputs)):
        return 0.0
    forward = relative_error(replay.forward(), replay.forward("float32"))
    cotangents = call.cotangents_at(scale)
    backward = 0.0
    if any(c.any() for c in cotangents):
        backward = relative_error(
            replay.gradients(cotangents),
            replay.gradients(cotangents, "float32"),
        )
    return max(
        forward / thresholds.FORWARD_ERROR, backward / thresholds.BACKWARD_ERROR
    )
