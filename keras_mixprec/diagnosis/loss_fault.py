"""Finds the fault behind a layer whose float32 outputs repair a step."""

import math

import keras
from keras import tree

from keras_mixprec.diagnosis.compare import largest, nonfinite
from keras_mixprec.diagnosis.culprit import Fault
from keras_mixprec.diagnosis.forward import is_cast_before, range_fault
from keras_mixprec.formats import get_format
from keras_mixprec.numerics.arrays import is_float, to_array
from keras_mixprec.numerics.calls import LayerCall
from keras_mixprec.numerics.dry_step import step_held_at
from keras_mixprec.numerics.layer_hooks import computing_in, in_float32
from keras_mixprec.numerics.layer_replay import (
    LayerReplay,
    cause_of_nonfinite,
    nonfinite_places,
)
from keras_mixprec.policies.layers import has_own_step

# A layer that enlarges its largest number by more than this is at fault.
_GROWTH = 1e6


def fault_behind(
    replay: LayerReplay,
    reference: LayerCall | None,
    model: keras.Model,
    data,
    layers,
) -> Fault:
    """Returns what is not finite behind a layer.

    It is in the code that computes with the outputs, or else in the layer.

    Args:
        replay: `LayerReplay` of the layer.
        reference: As for `range_fault`.
        model: As for `step_fault`.
        data: As for `step_fault`.
        layers: As for `step_fault`.
    """
    fault = step_fault(model, data, layers)
    if fault is None or is_cast_before(replay.call, reference):
        return range_fault(replay, reference)
    if fault.kind == "forward_overflow" and has_own_step(model):
        # The loss may contain gradients, which are operations like others.
        own = range_fault(replay, reference)
        return own if own.direction == "backward" else fault
    return fault


def step_fault(model: keras.Model, data, layers) -> Fault | None:
    """Returns what makes numbers of a step non-finite.

    A `compute_loss` or `train_step` of the user's own, or a loss that casts,
    computes in the dtype of the outputs: `exp(20)` overflows there, and
    `log(1 - p)` becomes `log(0)`. The operations of the step run once as they
    are and once without the fault. The loss scale is tiny, so that the backward
    pass cannot overflow.

    Args:
        model: A compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        layers: List of the layers that repair the step in float32.

    Returns:
        `None` if what is not finite is so in the repaired step, too.
    """
    with step_held_at(model, data) as run:
        with computing_in("float32", layers):
            harmless = nonfinite_places(run, [])
        cause = cause_of_nonfinite(run, [], harmless, of_loss=True)
    if cause is None:
        return None
    kind = cause.kind
    # JAX casts each sum that it takes in float32 to the dtype of its terms.
    if kind == "cast_overflow" and _fits(data):
        kind = "forward_overflow"
    return Fault(kind, "forward", cause.evidence)


def origin_of_nonfinite(model: keras.Model, data, exact=None) -> dict:
    """Returns what makes a step in float32 non-finite, as evidence.

    Args:
        model: As for `step_fault`.
        data: As for `step_fault`.
        exact: `DryStep` of it in float32. Defaults to `None`, of a step that
            raises.

    Returns:
        Dict with `"operation"` and `"code"`, as in `Cause`, and `"in_layer"`,
        the path of the layer, as far as they are known. If numbers have grown
        too large in the forward pass, `"in_layer"` is the layer that they grow
        the most in, from `"largest_input"` to `"largest_output"`.
    """
    with in_float32(model), step_held_at(model, data, 1.0) as run:
        cause = cause_of_nonfinite(run, [], of_loss=True)
    found = {} if cause is None else cause.evidence
    if exact is None:
        return found
    path = _first_layer(exact)
    if cause is not None and cause.operation is None:
        found |= _growth(exact)
    return found if path is None else {"in_layer": path} | found


def _growth(exact):
    """Returns the layer in which numbers grow the most before one overflows."""
    found, most = {}, _GROWTH
    for call in exact.calls:
        given = _largest_of((call.args, call.kwargs))
        returned = _largest_of(call.outputs)
        if given and not call.nested and returned / given > most:
            most = returned / given
            found = {
                "in_layer": call.path,
                "largest_input": given,
                "largest_output": returned,
            }
        if _is_bad(call.outputs):
            break
    return found


def _largest_of(structure):
    floats = filter(is_float, tree.flatten(structure))
    return largest([to_array(x) for x in floats])


def _first_layer(exact):
    """The path of the layer that makes the first number that is not finite.

    Forward, or else in the backward pass.
    """
    calls = exact.calls
    for call in calls:
        if _is_bad([call.outputs, call.losses]):
            return None if _is_bad((call.args, call.kwargs)) else call.path
    if not math.isfinite(exact.loss):
        return None
    for call in reversed(calls):
        own = [
            exact.gradients.get(id(v)) for v in call.layer.trainable_variables
        ]
        if _is_bad([call.input_cotangents, own]) and not call.nested:
            return None if _is_bad(call.cotangents) else call.path
    return None


def _is_bad(structure):
    floats = filter(is_float, tree.flatten(structure))
    return bool(nonfinite([to_array(x) for x in floats]))


def _fits(data):
    arrays = [to_array(x) for x in tree.flatten(data) if is_float(x)]
    return largest(arrays) <= get_format("float16").maximum
