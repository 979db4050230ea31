"""16-bit layers whose casts cost more than their dtype saves."""

import math

from keras_mixprec.policies.graph import neighbours
from keras_mixprec.policies.layers import walk
from keras_mixprec.policies.names import is_fixed
from keras_mixprec.policies.work import multiply_adds

# Multiply-adds that a layer has to do for each element that is cast at its
# borders. An A100 does 312e12 floating point operations a second in float16
# and 156e12 in TF32, so a multiply-add saves 6.4e-15 s, three of them with the
# backward pass 1.9e-14; a cast reads 4 bytes and writes 2, forward and
# backward, at 1.6e12 bytes a second: 7.5e-12 s, 390 times as much.
WORTH_A_CAST = 400


def lone_layers(model) -> list:
    """Returns the 16-bit layers that had better compute in float32.

    Those which only float32 layers feed and which feed only such, and which
    multiply too little for the casts on both sides; normalizations,
    activations and sums multiply nothing. A layer whose work cannot be told,
    or that has layers inside, is left alone, and so are all in a subclassed
    model, which has no graph.

    Args:
        model: A built `keras.Model`.
    """
    around = neighbours(model)
    return [
        entry.layer
        for entry in walk(model)
        if _is_low(entry.layer)
        and _is_lone(*around.get(id(entry.layer), ([], [])))
        and _saves_less_than_casts(entry)
    ]


def _is_low(layer):
    low = layer.compute_dtype in ("float16", "bfloat16")
    return low and not is_fixed(layer) and not layer._layers


def _is_lone(feeders, consumers):
    around = {layer.compute_dtype for layer in [*feeders, *consumers]}
    return bool(feeders and consumers) and around == {"float32"}


def _saves_less_than_casts(entry):
    work = multiply_adds(entry)
    if work is None:
        return False
    call = entry.layer._inbound_nodes[0]
    elements = sum(map(_elements, [*call.input_tensors, *call.output_tensors]))
    return work < WORTH_A_CAST * elements


def _elements(tensor):
    # For one sample; of a length that varies, one position.
    return math.prod(size or 1 for size in tensor.shape[1:])
