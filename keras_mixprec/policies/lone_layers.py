"""16-bit layers whose casts cost more than their dtype saves."""

import math

from keras_mixprec.formats import SIXTEEN_BITS
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

# Largest share of the model's multiply-adds that a lone layer may have. The
# count above is of memory traffic, which compilers save by fusing casts; in a
# small model it holds for every layer, and all of it would end in float32.
SMALL_SHARE = 0.05


def lone_layers(model) -> list:
    """Returns the 16-bit layers that had better compute in float32.

    Those which only float32 layers feed and which feed only such, which
    multiply too little for the casts on both sides, and which do at most 5% of
    the model's work; normalizations, activations and sums multiply nothing. A
    layer whose work cannot be told, or that has layers inside, is left alone,
    and so are all in a subclassed model, which has no graph.

    Args:
        model: A built `keras.Model`.
    """
    around = neighbours(model)
    entries = list(walk(model))
    works = [multiply_adds(entry) for entry in entries]
    small = SMALL_SHARE * sum(work or 0 for work in works)
    return [
        entry.layer
        for entry, work in zip(entries, works, strict=True)
        if _is_low(entry.layer)
        and _is_lone(*around.get(id(entry.layer), ([], [])))
        and work is not None
        and work <= min(small, WORTH_A_CAST * _elements(entry.layer))
    ]


def _is_low(layer):
    low = layer.compute_dtype in SIXTEEN_BITS
    return low and not is_fixed(layer) and not layer._layers


def _is_lone(feeders, consumers):
    around = {layer.compute_dtype for layer in [*feeders, *consumers]}
    return bool(feeders and consumers) and around == {"float32"}


def _elements(layer):
    """How many elements of one sample go in and out."""
    call = layer._inbound_nodes[0]
    # Of a length that varies, one position.
    return sum(
        math.prod(size or 1 for size in tensor.shape[1:])
        for tensor in [*call.input_tensors, *call.output_tensors]
    )
