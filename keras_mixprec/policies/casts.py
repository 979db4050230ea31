"""Finds layers whose casts fail, or cost more time than 16 bits save.

Casts can fail because TensorFlow and torch refuse to multiply float16 by
float32.
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

# The number of multiply-adds for each cast element above which 16 bits save
# time. An A100 does 312e12 floating-point operations a second in float16, and
# 156e12 in TF32. So float16 saves 6.4e-15 s for each multiply-add, or 1.9e-14 s
# with the backward pass. A cast reads 4 bytes and writes 2, forward and
# backward, at 1.6e12 bytes a second. It takes 7.5e-12 s, which is the time that
# 390 multiply-adds save.
WORTH_A_CAST = 400

# A layer between float32 layers stays in float32 only if its share of the
# model's multiply-adds is at most `SMALL_SHARE`. Without a limit, all layers of
# a small model would stay in float32. That would be too cautious, because
# compilers fuse many casts.
SMALL_SHARE = 0.05


def isolated_layers(model) -> list:
    """Returns the 16-bit layers that would be faster in float32.

    Such a layer stands between float32 layers. It does too few multiply-adds to
    pay for the casts on both sides, and at most 5% of the model's.
    Normalizations and activations do none. The result leaves out layers with
    unknown FLOPs, layers with sublayers, and all layers of subclassed models,
    which have no graph.

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
    """Returns how many elements a layer takes and returns per sample."""
    call = inbound_nodes(layer)[0]
    tensors = [*call.input_tensors, *call.output_tensors]
    # A dimension of variable length counts as one position.
    return sum(math.prod(size or 1 for size in t.shape[1:]) for t in tensors)


_SIZES = {int, type(None)}
_REASON = "its code mixes dtypes if a rule keeps a part of it in float32"


def without_mixes(model, entries: list[LayerEntry], default: str) -> dict:
    """Sets layers to float32 if their code cannot mix dtypes.

    All sublayers of such a layer get float32 too. If the model's own code
    cannot mix dtypes, all layers get the default policy.

    Args:
        model: A `keras.Model`, with the policies that rules chose.
        entries: List of the model's `LayerEntry`s.
        default: String. The policy of layers that no rule matches.

    Returns:
        Dict from the path of each changed layer to the reason.
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
    """Sets the innermost layer that raised to float32, and returns it."""

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
    """Returns zeros as the model's inputs, or `None` if shapes are unknown."""
    functional = functional_of(model)
    if functional is not None:
        return tree.map_structure(_zeros, functional.input)
    shape = (model.get_build_config() or {}).get("input_shape")
    # A model with several inputs has nested shapes, which count as unknown.
    is_one = isinstance(shape, tuple) and {*map(type, shape)} <= _SIZES
    return _zeros(keras.KerasTensor(shape)) if is_one and model.built else None


def _zeros(tensor):
    shape = [2 if size is None else size for size in tensor.shape]
    return ops.zeros(shape, tensor.dtype)


def _error(model, inputs):
    """Calls the model, and returns the error that it raises, or `None`."""
    try:
        # On torch, dtypes are checked only in a call on real arrays.
        with keras.StatelessScope():
            model(inputs, training=False)
    except active.replay().REFUSALS as error:
        return error
    return None


def _stack(error):
    """Returns the layers whose `call` raised the error, innermost first."""
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
