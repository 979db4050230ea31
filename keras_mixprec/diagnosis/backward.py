"""Checks a layer's gradients in 16 bits."""

import math

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import (
    largest,
    nonfinite,
    relative_error,
)
from keras_mixprec.diagnosis.culprit import Culprit
from keras_mixprec.diagnosis.fault_kind import (
    kind_of_gradients,
    kind_of_window,
)
from keras_mixprec.diagnosis.scales import ScaleWindow
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.calls import LayerCall
from keras_mixprec.numerics.dry_step import DryStep
from keras_mixprec.numerics.layer_hooks import with_sublayers
from keras_mixprec.numerics.layer_replay import LayerReplay


def own_gradients(call: LayerCall, exact: DryStep, effective) -> list:
    """Returns the gradients of a call's outputs and weights, as arrays.

    None if the layer has weights and none of them would move.

    Args:
        call: `LayerCall` of `exact`.
        exact: `DryStep` of the model in float32, at loss scale 1.
        effective: Function from a variable and its gradient to whether the
            optimizer would move the variable by it.
    """
    weights = [
        (v, to_array(exact.gradients[id(v)]))
        for v in call.layer.trainable_variables
        if id(v) in exact.gradients
    ]
    moving = [g for v, g in weights if effective(v, g)]
    if weights and not moving:
        return []
    return moving + [to_array(c) for c in call.cotangents if c is not None]


def gradients_of_layers(calls: list, exact: DryStep, effective) -> dict:
    """Returns the `own_gradients` of float16 layers, by path.

    Args:
        calls: List of `LayerCall`s of `exact`.
        exact: As for `own_gradients`.
        effective: As for `own_gradients`.
    """
    found = {}
    for call in calls:
        if call.layer.compute_dtype == "float16":
            own = own_gradients(call, exact, effective)
            found.setdefault(call.path, []).extend(own)
    return found


def classify_window(
    window: ScaleWindow, bits: float, call: LayerCall
) -> Culprit:
    """Returns what is wrong with a layer that a loss scale does not suit.

    Args:
        window: `ScaleWindow` of its gradients, which does not hold the scale.
        bits: Float. The loss scale, as a power of two.
        call: `LayerCall` of the layer.
    """
    kind = kind_of_window(window, bits)
    numbers = {"loss_scale_bits": bits, "highest_bits": window.high}
    # Gradients that are rounding errors need no scale at all.
    if math.isfinite(window.low):
        numbers["lowest_bits"] = window.low
    layers = with_sublayers(call.layer)
    return Culprit(call.path, layers, kind, "backward", numbers)


def check_backward(
    call: LayerCall, reference: LayerCall, compiled: bool, bits: float
) -> Culprit | None:
    """Compares the gradients of a layer with float32's.

    Args:
        call: `LayerCall`, of a layer that computes in 16 bits.
        reference: `LayerCall`, the same one in float32, at loss scale 1.
        compiled: Boolean, whether XLA compiles the model's step.
        bits: Float. The loss scale, as a power of two.

    Returns:
        As `check_forward`; `None` where no gradient comes by, too.
    """
    outputs = zip(
        reference.float_cotangents, reference.float_outputs, strict=True
    )
    cotangents = [
        to_array(c) * 2.0**bits if c is not None else to_array(o) * 0.0
        for c, o in outputs
    ]
    replay = LayerReplay(call, compiled)
    given = [to_array(x) for x in replay.inputs]
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
    layers = with_sublayers(call.layer)
    kind = kind_of_gradients(replay, cotangents, low, numbers)
    return Culprit(call.path, layers, kind, "backward", numbers)
