"""How badly a layer bears 16 bits, by itself."""

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import nonfinite, relative_error
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.calls import LayerCall
from keras_mixprec.numerics.twin import Twin


def suspicion(call: LayerCall, scale: float) -> float:
    """Returns a layer's error as a multiple of the threshold for it.

    It runs again on the inputs it had, once in what it computes in now and
    once in float32, forward and backward; the larger of both counts.

    Args:
        call: `LayerCall` of a step in float32, at loss scale 1.
        scale: Float. The loss scale.
    """
    twin = Twin(call)
    if nonfinite([to_array(x) for x in twin.inputs]):
        return 0.0
    forward = relative_error(twin.forward(), twin.forward("float32"))
    cotangents = _cotangents(call, scale)
    if not any(c.any() for c in cotangents):
        return forward / thresholds.FORWARD_ERROR
    backward = relative_error(
        twin.gradients(cotangents), twin.gradients(cotangents, "float32")
    )
    return max(
        forward / thresholds.FORWARD_ERROR, backward / thresholds.BACKWARD_ERROR
    )


def _cotangents(call, scale):
    pairs = zip(call.float_outputs, call.float_cotangents, strict=True)
    return [
        to_array(output) * 0.0 if found is None else to_array(found) * scale
        for output, found in pairs
    ]
