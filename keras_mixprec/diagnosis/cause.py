"""Finds the fault of a layer, or of the code that follows it.

Weights that the dtype cannot hold have their own kinds of verdict. An overflow
is a number beyond the format's maximum, and an underflow is a number that
becomes 0. Any other error is a loss of precision. A number that becomes 0 may
make a result non-finite, as in `1 / x` or `log(x)`. This fault is an underflow,
unless the 0 comes from an infinity. `numerics/layer_replay.py` finds the
operation at fault.
"""

import math

import keras
import numpy as np
from keras import tree

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.criterion import largest, nonfinite, relative_error
from keras_mixprec.diagnosis.culprit import (
    Culprit,
    low_layers,
    rounded_integers,
)
from keras_mixprec.diagnosis.scales import ScaleWindow
from keras_mixprec.formats import get_format
from keras_mixprec.keras_internals import (
    AutocastScope,
    own_non_trainable,
    own_trainable,
    set_value,
)
from keras_mixprec.numerics.arrays import (
    is_float,
    largest_magnitude,
    restoring,
    to_array,
    to_arrays,
)
from keras_mixprec.numerics.calls import LayerCall
from keras_mixprec.numerics.dry_step import step_held_at
from keras_mixprec.numerics.layer_hooks import (
    WHOLE,
    computing_in,
    in_float32,
    with_sublayers,
)
from keras_mixprec.numerics.layer_replay import (
    Cause,
    LayerReplay,
    cause_of_nonfinite,
    nonfinite_places,
)

_ROWS_NAMED = 8


def check_forward(call: LayerCall, compiled: bool) -> Culprit | None:
    """Compares the outputs of a layer with the same layer in float32.

    Args:
        call: `LayerCall` of a layer that computes in 16 bits.
        compiled: Boolean, whether XLA compiles the model's step.

    Returns:
        The `Culprit` if the relative error is too large. `None` if the error
        is small, or if the inputs are not finite.
    """
    replay = LayerReplay(call, compiled)
    given = to_arrays(replay.inputs)
    if nonfinite(given):
        return None
    exact = replay.forward("float32")
    low = replay.forward() if compiled else to_arrays(call.float_outputs)
    error = relative_error(low, exact)
    if error <= thresholds.FORWARD_ERROR:
        return None
    numbers = {
        "error": error,
        "largest_input": largest(given),
        "largest_output_in_float32": largest(exact),
        "nonfinite_outputs": nonfinite(low),
    }
    if rows := _rows(given, low, exact):
        numbers["batch_rows"] = rows[:_ROWS_NAMED]
        if len(rows) > _ROWS_NAMED:
            numbers["batch_rows_in_all"] = len(rows)
    kind = _kind_of_outputs(replay, low, exact, numbers)
    layers = with_sublayers(call.layer)
    return Culprit(call.path, layers, kind, "forward", numbers)


def _rows(inputs, low, exact):
    """Returns rows that only 16 bits make non-finite, unless all rows are."""
    if len({len(x) if x.ndim else 0 for x in [*inputs, *low]}) != 1:
        return []
    bad = [
        (np.isfinite(b) & ~np.isfinite(a)).reshape(len(a), -1).any(axis=1)
        for a, b in zip(low, exact, strict=True)
    ]
    found = np.flatnonzero(np.any(bad, axis=0)).tolist()
    return found if len(found) < len(low[0]) else []


def _kind_of_outputs(replay, low, exact, numbers):
    """Returns the kind of fault, and adds the evidence to the numbers."""
    dtype = replay.call.layer.compute_dtype
    limit = get_format(dtype).maximum
    if largest(replay.cast_inputs) > limit:
        return "cast_overflow"
    if rounded := rounded_integers(replay.cast_inputs, dtype):
        numbers |= rounded
        return "precision_loss"
    if spoilt := _weight_fault(replay, exact, numbers):
        return spoilt
    cause = replay.cause_of_nonfinite() if nonfinite(low) else None
    largest_inside = replay.largest_intermediate()
    kind = "forward_overflow"
    if cause is not None:
        numbers |= cause.evidence
    if cause and cause.kind == "underflow":
        kind = "underflow"
    elif largest_inside <= limit:
        kind = _kind_where_all_fits(replay, low, exact)
    if kind == "underflow":
        _add_smallest(numbers, replay)
    else:
        numbers["largest_inside_in_float32"] = largest_inside
    return kind


def _kind_where_all_fits(replay, low, exact):
    """Returns the kind of fault if all float32 numbers fit the format."""
    wider = relative_error(replay.forward("mixed_bfloat16"), exact)
    if wider > thresholds.FORWARD_ERROR:
        return "precision_loss"
    # The sum inside a mean may overflow, and no recorded intermediate result
    # shows such an overflow. So look for infinite outputs.
    if any(np.isinf(a).any() for a in low):
        return "forward_overflow"
    vanished = any(
        ((a == 0) & (b != 0)).any() for a, b in zip(low, exact, strict=True)
    )
    return "underflow" if nonfinite(low) or vanished else "precision_loss"


def _add_smallest(numbers, replay, cotangents=None):
    """Replaces the largest numbers, which fit, with the smallest number."""
    for name in ("largest_input", "largest_gradient_in_float32"):
        numbers.pop(name, None)
    smallest, _ = replay.extremes(cotangents)
    numbers["smallest_inside_in_float32"] = smallest


def check_backward(
    call: LayerCall, reference: LayerCall, compiled: bool, bits: float
) -> Culprit | None:
    """Compares the gradients of a layer with the same layer in float32.

    Args:
        call: `LayerCall` of a layer that computes in 16 bits.
        reference: The same `LayerCall` in float32, at loss scale 1.
        compiled: As for `check_forward`.
        bits: Float. The loss scale, as a power of two.

    Returns:
        As `check_forward`, or `None` if no gradient reaches the layer.
    """
    cotangents = reference.cotangents_at(2.0**bits)
    replay = LayerReplay(call, compiled)
    given = to_arrays(replay.inputs)
    if nonfinite(given) or not any(c.any() for c in cotangents):
        return None
    wide = replay.gradients(cotangents, "float32")
    low = replay.gradients(cotangents)
    error = relative_error(low, wide)
    if error <= thresholds.BACKWARD_ERROR:
        return None
    numbers = {
        "error": error,
        "loss_scale_bits": bits,
        "largest_gradient_in_float32": largest(wide) / 2.0**bits,
        "nonfinite_gradients": nonfinite(low),
    }
    kind = "precision_loss"
    if nonfinite(low):
        kind = "backward_overflow"
        cause = replay.cause_of_nonfinite(cotangents)
        if cause is not None:
            numbers |= cause.evidence
        if cause is not None and cause.kind == "underflow":
            kind = "underflow"
            _add_smallest(numbers, replay, cotangents)
    layers = with_sublayers(call.layer)
    return Culprit(call.path, layers, kind, "backward", numbers)


def window_fault(window: ScaleWindow, bits: float, call: LayerCall) -> Culprit:
    """Returns the fault of a layer whose gradients do not fit the loss scale.

    Args:
        window: `ScaleWindow` of its gradients. The loss scale lies outside it.
        bits: Float. The loss scale, as a power of two.
        call: `LayerCall` of the layer.
    """
    kind = "underflow" if bits < window.low else "backward_overflow"
    numbers = {"loss_scale_bits": bits, "highest_bits": window.high}
    # Gradients that are only rounding errors may underflow, so their window has
    # no lower end.
    if math.isfinite(window.low):
        numbers["lowest_bits"] = window.low
    layers = with_sublayers(call.layer)
    return Culprit(call.path, layers, kind, "backward", numbers)


# The functions below find faults in the code after a layer.


def kind_of_range(replay: LayerReplay, reference: LayerCall | None) -> str:
    """Returns the kind of fault if a result is infinite but no layer output is.

    Args:
        replay: `LayerReplay` of a layer whose float32 makes the result finite.
        reference: As for `is_cast_before`.
    """
    if is_cast_before(replay.call, reference):
        return "cast_overflow"
    large = replay.largest_intermediate() > get_format("float16").maximum
    return "forward_overflow" if large else "underflow"


def is_cast_before(call: LayerCall, reference: LayerCall | None) -> bool:
    """Returns whether an input overflows in a cast before the layer's call.

    For example, a `Sequential` without a `keras.Input` casts its inputs.

    Args:
        call: `LayerCall` of a step in 16 bits.
        reference: The same `LayerCall` in float32, or `None` if there is none.
    """
    if reference is None or not nonfinite(to_arrays(LayerReplay(call).inputs)):
        return False
    given = largest(to_arrays(LayerReplay(reference).inputs))
    return given > get_format("float16").maximum


def step_cause(model: keras.Model, data, layers: list) -> Cause | None:
    """Returns the operation that makes a step non-finite.

    The user's own `compute_loss` or `train_step`, or a loss that casts,
    computes in the dtype of the outputs. There `exp(20)` overflows, and
    `log(1 - p)` becomes `log(0)`. The step runs operation by operation, once in
    16 bits and once repaired. The loss scale is tiny, so that the backward pass
    cannot overflow.

    Args:
        model: A compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        layers: List of the layers that repair the step in float32.

    Returns:
        The `Cause`, or `None` if the repaired step has the same non-finite
        numbers.
    """
    with step_held_at(model, data) as run:
        with computing_in("float32", layers):
            harmless = nonfinite_places(run, [])
        cause = cause_of_nonfinite(run, [], harmless, of_loss=True)
    if cause is None or cause.kind != "cast_overflow":
        return cause
    # JAX sums float16 in float32 and then casts the sum, so an overflow in a
    # sum looks like an overflow in a cast.
    is_sum = _largest_of(data) <= get_format("float16").maximum
    return cause._replace(kind="forward_overflow") if is_sum else cause


def origin_of_nonfinite(model: keras.Model, data, exact=None) -> dict:
    """Returns evidence of the operation that is not finite in float32.

    Args:
        model: As for `step_cause`.
        data: As for `step_cause`.
        exact: `DryStep` of the batch in float32. Defaults to `None`, for a step
            that raises.

    Returns:
        Dict with the entries that are known: `"operation"` and `"code"`, as in
        `Cause`, and `"in_layer"`, the path of the layer. If numbers have grown
        too large in the forward pass, `"in_layer"` is the layer with the
        largest growth, from `"largest_input"` to `"largest_output"`.
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
    """Returns the layer with the largest growth before the first overflow."""
    found, most = {}, 1.0
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


def _first_layer(exact):
    """Returns the path of the layer that makes the first non-finite number."""
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
    return bool(nonfinite(_floats(structure)))


def _largest_of(structure):
    return largest(_floats(structure))


def _floats(structure):
    return to_arrays(filter(is_float, tree.flatten(structure)))


# The functions below find faults in weights.


def lost_weights(model: keras.Model) -> dict:
    """Returns evidence of non-finite weights, or an empty dict if none are.

    Args:
        model: A built `keras.Model`.
    """
    lost = [
        v.path
        for v in model.weights
        if "float" in v.dtype and nonfinite([to_array(v.value)])
    ]
    return {"variables": len(lost), "first": lost[0]} if lost else {}


def weight_overflows(model: keras.Model) -> list[Culprit]:
    """Returns the layers with weights beyond the range of their dtype.

    Such layers are at fault for every input.

    Args:
        model: A built `keras.Model`.
    """
    found = {}
    for entry in low_layers(model):
        if numbers := _overflowing(entry.layer):
            # A cell runs in the loop of a recurrent layer, so blame the whole
            # recurrent layer.
            whole = [e for e in entry.lineage() if isinstance(e.layer, WHOLE)]
            path, layers = entry.path, [entry.layer]
            if whole:
                path, layers = whole[-1].path, with_sublayers(whole[-1].layer)
            fault = "weight_overflow", "forward", numbers
            found[path] = Culprit(path, layers, *fault)
    return [*found.values()]


def _weight_fault(replay, exact, numbers):
    """Returns the kind of fault if a layer's weights do not fit its dtype."""
    layer = replay.call.layer
    if found := _overflowing(layer):
        numbers |= found
        return "weight_overflow"
    for variable, wide, low in _as_cast(layer):
        gone = (low == 0) & (wide != 0)
        if gone.any():
            kept = keras.ops.convert_to_tensor(
                np.where(gone, 0, wide), variable.dtype
            )
            with restoring([variable]):
                set_value(variable, kept)
                without = replay.forward("float32")
            if relative_error(without, exact) > thresholds.FORWARD_ERROR:
                numbers |= _evidence(variable, wide, gone)
                return "weight_underflow"
    return None


def _overflowing(layer):
    """Returns evidence of a weight that the cast makes infinite, if any.

    Weights that stand for minus infinity do not count.
    """
    for variable, wide, low in _as_cast(layer):
        gone = np.isinf(low) & np.isfinite(wide)
        gone &= wide > thresholds.MINUS_INFINITY
        if gone.any():
            return _evidence(variable, wide, gone)
    return {}


def _evidence(variable, wide, gone):
    return {
        "variable": variable.name,
        "largest_weight": largest_magnitude(wide[gone]),
        "weights": int(gone.sum()),
        "of": int(gone.size),
    }


def _as_cast(layer):
    """Yields each weight of a layer, before and after the cast to 16 bits.

    An embedding counts although it casts only the rows that it looks up.
    """
    if not layer.autocast and not isinstance(layer, keras.layers.Embedding):
        return
    for variable in [*own_trainable(layer), *own_non_trainable(layer)]:
        if "float" in variable.dtype:
            wide = to_array(variable.value)
            with AutocastScope(layer.compute_dtype):
                low = to_array(variable.value)
            yield variable, wide, low
