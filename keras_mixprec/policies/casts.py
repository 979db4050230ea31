"""Layers whose casts fail or cost more than 16 bits save.

`a @ b` of float16 and float32 raises on TensorFlow and torch.
"""

import math
import traceback

import keras
from keras import ops, tree

from keras_mixprec.backend import active
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.keras_internals import (
    flat_layers,
    functional_of,
    inbound_nodes,
    set_policy_object,
    sublayers,
)
from keras_mixprec.policies.graph import neighbours
from keras_mixprec.policies.layers import LayerEntry, is_of_keras, walk
from keras_mixprec.policies.multiply_adds import multiply_adds
from keras_mixprec.policies.names import is_fixed, set_policy

# Multiply-adds that a layer has to do for each element that is cast at its
# borders. An A100 does 312e12 floating point operations a second in float16 and
# 156e12 in TF32. So a multiply-add saves 6.4e-15 s, and 1.9e-14 s with the
# backward pass. A cast reads 4 bytes and writes 2, forward and backward, at
# 1.6e12 bytes a second: 7.5e-12 s, 390 times as much.
WORTH_A_CAST = 400

# Largest share of the model's multiply-adds of an isolated layer. The count
# above is memory traffic, which compilers save by fusing casts. It holds for
# every layer of a small model, and would leave all of them in float32.
SMALL_SHARE = 0.05


def isolated_layers(model) -> list:
    """Returns the 16-bit layers that had better compute in float32.

    Only float32 layers feed such a layer, and it feeds only float32 layers. It
    multiplies too little for the casts on both sides, and does at most 5% of
    the model's work. Normalizations, activations and sums multiply nothing.
    Layers of unknown FLOPs, or with layers inside, are left alone. So are
    subclassed models, which have no graph.

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
        if _computes_low(entry.layer)
        and not sublayers(entry.layer)
        and _is_lone(*around.get(id(entry.layer), ([], [])))
        and work is not None
        and work <= min(small, WORTH_A_CAST * _elements(entry.layer))
    ]


def _computes_low(layer):
    return layer.compute_dtype in SIXTEEN_BITS and not is_fixed(layer)


def _is_lone(feeders, consumers):
    around = {layer.compute_dtype for layer in [*feeders, *consumers]}
    return bool(feeders and consumers) and around == {"float32"}


def _elements(layer):
    """How many elements of one sample go in and out."""
    call = inbound_nodes(layer)[0]
    return _size_of([*call.input_tensors, *call.output_tensors])


def _size_of(tensors):
    # A length that varies counts as one position.
    return sum(
        math.prod(size or 1 for size in tensor.shape[1:]) for tensor in tensors
    )


_REASON = "its code mixes dtypes where a rule widens a part of it"


def without_mixes(model, entries: list[LayerEntry], default: str) -> dict:
    """Changes policies of layers whose calls raise because of them.

    Such a layer gets float32 with all that is inside it. If no layer is at
    fault but the code of the model itself, all layers get the default policy.

    Args:
        model: A `keras.Model`, with the policies that rules decided on.
        entries: List of its `LayerEntry`s.
        default: String. The policy of layers that no rule matches.

    Returns:
        Dict from the paths of the layers that were changed to the reason.
    """
    inputs = _inputs(model)
    layers = [entry.layer for entry in entries]
    written = [x for x in [*layers, model] if not is_of_keras(x)]
    if inputs is None or not any(map(_is_partial, written)):
        return {}
    paths = {id(entry.layer): entry.path for entry in entries}
    reasons = {}
    while error := _error(model, inputs):
        layer = _widened(model, inputs, error, paths)
        if layer is None:
            runs = _changed(layers, default, lambda: not _error(model, inputs))
            return {} if runs else reasons
        reasons[paths[id(layer)]] = _REASON
    return reasons


def _widened(model, inputs, error, paths):
    """The innermost layer on the stack that no longer raises in float32."""

    def raises_elsewhere():
        after = _error(model, inputs)
        return after is None or _stack(after)[:1] != _stack(error)[:1]

    for layer in _stack(error):
        inside = flat_layers(layer)
        low = any(_computes_low(x) for x in inside)
        known = id(layer) in paths
        if known and low and _changed(inside, "float32", raises_elsewhere):
            return layer
    return None


def _changed(layers, policy, helps):
    """Sets a policy if it helps, and returns whether it does."""
    layers = [layer for layer in layers if not is_fixed(layer)]
    before = [layer.dtype_policy for layer in layers]
    for layer in layers:
        set_policy(layer, policy)
    if helps():
        return True
    for layer, own in zip(layers, before, strict=True):
        set_policy_object(layer, own)
    return False


def _inputs(model):
    """Zeros for a call of a built model, `None` if none are known for it."""
    functional = functional_of(model)
    if functional is not None:
        return tree.map_structure(_zeros, functional.input)
    shape = (model.get_build_config() or {}).get("input_shape")
    if not model.built or not _is_shape(shape):
        return None
    return _zeros(keras.KerasTensor(shape))


def _is_shape(shape):
    """Returns whether it is a shape, not a structure of several shapes."""
    return isinstance(shape, tuple) and all(
        size is None or isinstance(size, int) for size in shape
    )


def _zeros(tensor):
    shape = [2 if size is None else size for size in tensor.shape]
    return ops.zeros(shape, tensor.dtype)


def _error(model, inputs):
    """The error of calling the model, `None` if there is none."""
    try:
        # A symbolic call would not check dtypes on torch.
        with keras.StatelessScope():
            model(inputs, training=False)
    except active.replay().REFUSALS as error:
        return error
    return None


def _stack(error):
    """The layers in whose `call` an exception was raised, innermost first."""
    frames = [f for f, _ in traceback.walk_tb(error.__traceback__)]
    layers = [
        frame.f_locals.get("self")
        for frame in reversed(frames)
        if frame.f_code.co_name in ("call", "tf__call")
    ]
    return [x for x in layers if isinstance(x, keras.layers.Layer)]


def _is_partial(layer):
    dtypes = {x.compute_dtype for x in flat_layers(layer)}
    return len(dtypes) > 1 and not dtypes.isdisjoint(SIXTEEN_BITS)
