"""Why a conversion is refused: what is off, by how much, and what helps."""

import math
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_mixprec.inference.calibration import to_tensors
from keras_mixprec.inference.graph_values import each_value
from keras_mixprec.inference.least_exact import least_exact
from keras_mixprec.inference.storage import Assignment
from keras_mixprec.inference.variants import Variant
from keras_mixprec.keras_internals import calls_in, functional_of
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.layer_hooks import temporary_policies

KEEP_WIDE = "A plan or a rule can keep layers in float32."
_NO_RULE_HELPS = (
    "Only with all of it in float32 the tolerance is kept: no plan or rule "
    "helps. Allow more with `tolerance`"
)
ALL_WIDE = f"{_NO_RULE_HELPS}, or take the other format of 16 bits."
ALL_WIDE_IN_BOTH = f"{_NO_RULE_HELPS}."


class Refusal(ValueError):
    """A conversion that does not keep the tolerance.

    Args:
        finding: String, sentences on what is off in a format, and by how much.
        advice: String, a sentence.

    Attributes:
        finding, advice: As given.
    """

    def __init__(self, finding: str, advice: str):
        super().__init__(f"{finding} {advice}")
        self.finding = finding
        self.advice = advice


def refusal(
    policy: str,
    drift: float,
    tolerance: float,
    variant: Variant,
    assignment: Assignment,
    batches: list[Any],
    advice: str,
) -> Refusal:
    """Returns the error to raise.

    Args:
        policy: String. What was asked for.
        drift: Float. How far the outputs are off.
        tolerance: Float. How far they may be.
        variant: The `Variant` that was converted.
        assignment: `Assignment`, the dtypes that it has.
        batches: List of batches of inputs.
        advice: String, `KEEP_WIDE` or `ALL_WIDE`.
    """
    far = (
        "are not finite"
        if drift == math.inf
        else f"are off by {drift:.3g} of their norm"
    )
    worst = _operation(variant, assignment, batches[0]) or _layer(
        variant, assignment, batches
    )
    finding = (
        f"Converted to {policy} the outputs {far}, and tolerance={tolerance:g} "
        f"is allowed. {worst}"
    )
    return Refusal(finding.strip(), advice)


def _layer(variant, assignment, batches):
    x = to_tensors(batches[0])
    path, error = least_exact(variant.reference, variant.entries, assignment, x)
    if not path:
        return ""
    off = (
        "its outputs are not finite"
        if error == math.inf
        else f"it is off by {error:.2g} of its own outputs"
    )
    largest = variant.largest(batches).get(path)
    reach = f", which reach {largest:.3g} in float32" if largest else ""
    return f"The layer {path!r} is the worst: {off}{reach}. "


def _operation(variant, assignment, x):
    """On the first operation that overflows, if it is no layer of a graph."""
    functional = functional_of(variant.reference)
    if functional is None:
        return ""
    nodes = [
        (operation, node)
        for operation in functional.operations
        for node in calls_in(functional, operation)
        if node.input_tensors
    ]
    known = {id(t): t for _, n in nodes for t in _floats(n.output_tensors)}
    tensors = list(known.values())
    with temporary_policies(assignment.computing(variant.entries)):
        model = keras.Model(functional.input, tensors)
        low = tree.flatten(model(to_tensors(x), training=False))
        finite = [bool(np.isfinite(to_array(v)).all()) for v in low]
    del low
    exact = each_value(functional, tensors, x)
    lost = {
        key: float(np.abs(wide).max(initial=0.0))
        for key, is_finite, wide in zip(known, finite, exact, strict=True)
        if not is_finite and np.isfinite(wide).all()
    }
    first = next(
        (
            (operation, lost[id(tensor)])
            for operation, node in nodes
            for tensor in node.output_tensors
            if id(tensor) in lost
        ),
        None,
    )
    if first is None or isinstance(first[0], keras.layers.Layer):
        return ""
    operation, largest = first
    return (
        f"The operation {operation.name!r} of the graph, which is no layer, is "
        "the first to return numbers that are not finite, of which those in "
        f"float32 reach {largest:.3g}. It computes in float32 behind a "
        "layer in float32, such as `keras.layers.Identity(dtype='float32')`. "
    )


def _floats(tensors):
    return [tensor for tensor in tensors if "float" in tensor.dtype]
