"""Ranking layers by how badly they bear 16 bits, each by itself."""

from keras import tree

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import nonfinite, relative_error
from keras_mixprec.numerics.arrays import is_float, to_array
from keras_mixprec.numerics.calls import LayerCall
from keras_mixprec.numerics.dry_step import DryStep
from keras_mixprec.numerics.twin import Twin
from keras_mixprec.policies.layers import LayerEntry
from keras_mixprec.policies.work import multiply_adds


def add_suspicions(found: dict, exact: DryStep, paths: set, scale: float):
    """Raises the suspicions that one step in float32 gives reason for.

    Each layer runs again on the inputs it had, once in what it computes in
    now and once in float32, forward and backward.

    Args:
        found: Dict of path to the largest suspicion so far: the layer's error
            as a multiple of the threshold that the diagnosis has for it.
        exact: The step.
        paths: The paths of the layers to be judged.
        scale: Float. The loss scale.
    """
    for call in exact.calls:
        if call.path in paths:
            before = found.get(call.path, 0.0)
            found[call.path] = max(before, _suspicion(call, scale))


def rank(entries: list[LayerEntry], suspicions: dict) -> list[LayerEntry]:
    """Returns the entries, the one first that float32 is best spent on.

    That is the most suspicious; then what lies in the most suspicious
    composite; then, below the thresholds of the diagnosis, the cheapest.

    Args:
        entries: List of `LayerEntry`.
        suspicions: Dict of path to suspicion.
    """

    def key(entry):
        # Below the threshold errors are just roundings, no ground to choose.
        own, *outer = (
            max(suspicions.get(holder.path, 0.0), 1.0)
            for holder in entry.lineage()
        )
        return -own, -max(outer, default=1.0), multiply_adds(entry) or 0

    return sorted(entries, key=key)


def _suspicion(call: LayerCall, scale):
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
    outputs = tree.flatten(call.outputs)
    return [
        to_array(output) * 0.0 if found is None else to_array(found) * scale
        for output, found in zip(outputs, call.cotangents, strict=True)
        if is_float(output)
    ]
