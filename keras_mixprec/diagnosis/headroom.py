"""How far layers' numbers are from overflowing, in a step in float32."""

import math

from keras_mixprec.diagnosis.compare import largest
from keras_mixprec.formats import get_format
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.layer_replay import LayerReplay


def headroom(calls) -> dict:
    """Returns how far a layer's numbers are from overflowing, in bits.

    What it is given counts as what it returns, unless it is not cast.

    Args:
        calls: List of `LayerCall` of a step in float32, of layers that compute
            in 16 bits otherwise.

    Returns:
        Dict from path to bits, as by the largest number of all its calls.
    """
    found = {}
    for call in calls:
        tensors = [*call.float_outputs]
        if call.layer.autocast:
            tensors += LayerReplay(call).inputs
        size = largest([*map(to_array, tensors)])
        if size:
            limits = get_format(call.layer.compute_dtype)
            bits = math.log2(limits.maximum) - math.log2(size)
            found[call.path] = min(bits, found.get(call.path, bits))
    return found
