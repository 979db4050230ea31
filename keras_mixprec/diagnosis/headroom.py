"""How far layers' numbers are from overflowing, in a step in float32."""

import math

from keras_mixprec.diagnosis.compare import largest
from keras_mixprec.formats import get_format
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.layer_replay import LayerReplay
from keras_mixprec.policies.rescaled import rescaling_of


def headroom(calls) -> dict:
    """Returns how far a layer's numbers are from overflowing, in bits.

    Inputs count as well as outputs, unless the layer does not cast them. A
    rescaled layer counts with its rescaled numbers.

    Args:
        calls: List of `LayerCall` of a step in float32, of layers that compute
            in 16 bits in training.

    Returns:
        Dict from path to bits, as by the largest number of all its calls.
    """
    found = {}
    for call in calls:
        size = _largest(call)
        if size:
            limits = get_format(call.layer.compute_dtype)
            bits = math.log2(limits.maximum) - math.log2(size)
            found[call.path] = min(bits, found.get(call.path, bits))
    return found


def _largest(call):
    own = rescaling_of(call.layer)
    inputs = LayerReplay(call).inputs if call.layer.autocast else []
    sizes = [largest([*map(to_array, x)]) for x in (inputs, call.float_outputs)]
    if own is not None:
        sizes[0] *= 2.0**own.input_bits
        sizes[1] *= 2.0**-own.output_bits if own.wide_outputs else 1.0
    return max(sizes)
