"""Powers of two moved from the weights of one layer into those of the next.

What one product returns `2**-k` times as large, the next can take back: its
kernel is `2**k` times as large. Between the two may be whatever hands a factor
on, such as ReLU, sums of what all has the same factor, or pooling. The model
consists of Keras' own layers as before.

It is exact. A power of two changes the exponent of a number and none of its
digits: the product of two numbers, the sum of numbers that all have the same
factor, and a square root of `4**-k * v` round as they did without it, `2**-k`
times as large. A normalization divides by `sqrt(variance + epsilon)`, so that
it takes back any factor of its inputs, if its epsilon has the square of it: an
epsilon that stays as it was would count `4**k` times as much. What it returns
can have a factor of its own, which its gain and its offset take. The one
exception are numbers below the smallest normal number; outputs that are not
the same in float32, bit for bit, undo it all.
"""

import math
from typing import Any

import keras
import numpy as np
from keras import layers

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.formats import get_format
from keras_mixprec.inference.graph_values import each_value, outputs_of
from keras_mixprec.keras_internals import calls_in, functional_of
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.policies.layers import walk

_PRODUCTS = (
    layers.Dense,
    layers.EinsumDense,
    layers.Conv1D,
    layers.Conv2D,
    layers.Conv3D,
    layers.Conv1DTranspose,
    layers.Conv2DTranspose,
    layers.Conv3DTranspose,
    layers.DepthwiseConv1D,
    layers.DepthwiseConv2D,
)

_NORMALIZATIONS = (
    layers.BatchNormalization,
    layers.GroupNormalization,
    layers.LayerNormalization,
    layers.RMSNormalization,
)

# Of degree 1 in all of their inputs together, in inference.
_HANDING_ON = (
    layers.Add,
    layers.Average,
    layers.AveragePooling1D,
    layers.AveragePooling2D,
    layers.AveragePooling3D,
    layers.Concatenate,
    layers.Cropping1D,
    layers.Cropping2D,
    layers.Cropping3D,
    layers.Dropout,
    layers.Flatten,
    layers.GlobalAveragePooling1D,
    layers.GlobalAveragePooling2D,
    layers.GlobalAveragePooling3D,
    layers.GlobalMaxPooling1D,
    layers.GlobalMaxPooling2D,
    layers.GlobalMaxPooling3D,
    layers.Identity,
    layers.LeakyReLU,
    layers.MaxPooling1D,
    layers.MaxPooling2D,
    layers.MaxPooling3D,
    layers.Maximum,
    layers.Minimum,
    layers.Permute,
    layers.RepeatVector,
    layers.Reshape,
    layers.SpatialDropout1D,
    layers.SpatialDropout2D,
    layers.SpatialDropout3D,
    layers.Subtract,
    layers.UpSampling1D,
    layers.ZeroPadding1D,
    layers.ZeroPadding2D,
    layers.ZeroPadding3D,
)

_HOMOGENEOUS = (
    keras.activations.linear,
    keras.activations.relu,
    keras.activations.leaky_relu,
)


def rescale_weights(
    model: keras.Model, batches: list[Any], dtype: str = "float16"
) -> dict[str, int]:
    """Makes activations fit a format, by powers of two in a model's weights.

    In place; in float32 the model computes the same as before, bit for bit.
    Activations that fit already are left as they are, and so are all that
    something other than products, normalizations and what hands a factor on
    takes or returns: those of inputs and outputs, attention, other
    activations, layers that are called more than once, and a nested model. A
    normalization without a gain returns what it returned.

    Args:
        model: A built functional or `Sequential` `keras.Model`.
        batches: List of batches of inputs, on which activations are measured.
        dtype: String. The format that they shall fit, with two bits to spare.
            Defaults to `"float16"`.

    Returns:
        Dict from the path of a layer to the power of two by which its outputs
        are smaller now; empty if there is nothing to do, or if the outputs in
        float32 would not be the same: then the model is as it was.

    Raises:
        TypeError: If the model is neither functional nor `Sequential`.
    """
    functional = functional_of(model)
    if functional is None:
        raise TypeError(
            "`model` must be functional or a built `keras.Sequential`: of "
            "another one it is not known which layer follows which. "
            f"Received: model={model!r} of type {type(model).__name__}"
        )
    graph = _Graph(functional)
    bits = graph.bits(batches, get_format(dtype).maximum)
    if not any(bits.values()):
        return {}
    before = [np.array(v) for v in model.weights]
    epsilons = [(n, n.epsilon) for n in graph.normalizations]
    known = [outputs_of(functional, x) for x in batches]
    graph.rescale(bits)
    for x, exact in zip(batches, known, strict=True):
        found = outputs_of(functional, x)
        if not all(map(np.array_equal, found, exact)):
            model.set_weights(before)
            for layer, epsilon in epsilons:
                layer.epsilon = epsilon
            return {}
    return graph.by_path(bits, model)


class _Graph:
    """Which tensors of a model have one factor in common.

    Args:
        functional: A functional model.
    """

    def __init__(self, functional):
        self._functional = functional
        self._parents = {}
        self._tensors = {}
        self._fixed = set()
        self._calls = []
        for tensor in (*functional.inputs, *functional.outputs):
            self._fixed.add(self._add(tensor))
        for operation in functional.operations:
            self._add_operation(operation)

    @property
    def normalizations(self) -> list:
        """The layers whose epsilon may be rescaled."""
        found = [operation for operation, *_ in self._calls]
        return [x for x in found if isinstance(x, _NORMALIZATIONS)]

    def bits(self, batches: list, maximum: float) -> dict:
        """Returns by how many powers of two each group has to be smaller.

        Args:
            batches: As for `rescale_weights`.
            maximum: Float. The largest number of the format.
        """
        limit = maximum * 2.0**-thresholds.BITS_ABOVE
        fixed = {self._root(key) for key in self._fixed}
        keys, tensors = zip(*self._tensors.items(), strict=True)
        found = {}
        for x in batches:
            values = each_value(self._functional, list(tensors), x)
            for key, value in zip(keys, values, strict=True):
                root, size = self._root(key), np.abs(value).max(initial=limit)
                if root not in fixed and math.isfinite(size):
                    needed = math.ceil(math.log2(size / limit))
                    found[root] = max(needed, found.get(root, 0))
        return found

    def rescale(self, bits: dict):
        """Gives weights and epsilons their powers of two."""
        for operation, given, returned in self._calls:
            into, out = (self._bits_of(t, bits) for t in (given, returned))
            if isinstance(operation, _NORMALIZATIONS):
                operation.epsilon *= 4.0**-into
                if isinstance(operation, layers.BatchNormalization):
                    _multiply(operation.moving_mean, -into)
                    _multiply(operation.moving_variance, -2 * into)
                for gain in _gains(operation):
                    _multiply(gain, -out)
            elif isinstance(operation, layers.Embedding):
                _multiply(operation.embeddings, -out)
            else:
                _multiply(operation.kernel, into - out)
                if operation.bias is not None:
                    _multiply(operation.bias, -out)

    def by_path(self, bits: dict, model) -> dict:
        """Returns the powers of two by the paths of the layers."""
        paths = {id(entry.layer): entry.path for entry in walk(model)}
        found = {
            paths[id(operation)]: self._bits_of(returned, bits)
            for operation, _, returned in self._calls
        }
        return {path: own for path, own in found.items() if own}

    def _bits_of(self, tensor, bits):
        return 0 if tensor is None else bits.get(self._root(id(tensor)), 0)

    def _add_operation(self, operation):
        nodes = calls_in(self._functional, operation)
        tensors = [
            tensor
            for node in nodes
            for tensor in (*node.input_tensors, *node.output_tensors)
        ]
        keys = [*map(self._add, tensors)]
        is_one = len(nodes) == 1 and isinstance(operation, layers.Layer)
        if is_one and _hands_on(operation):
            for key in keys[1:]:
                self._parents[self._root(key)] = self._root(keys[0])
        elif is_one and _has_weights_to_rescale(operation):
            given, returned = (*nodes[0].input_tensors, *tensors[-1:])[-2:]
            if isinstance(operation, layers.Embedding):
                given = None
            self._calls.append((operation, given, returned))
            if not _returns_factor(operation):
                self._fixed.add(keys[-1])
        else:
            self._fixed.update(keys)

    def _add(self, tensor):
        key = id(tensor)
        if "float" in tensor.dtype:
            self._tensors[key] = tensor
        self._parents.setdefault(key, key)
        return key

    def _root(self, key):
        while self._parents[key] != key:
            key = self._parents[key]
        return key


def _hands_on(layer):
    if isinstance(layer, layers.ReLU):
        return layer.max_value is None and not layer.threshold
    if isinstance(layer, layers.Activation):
        return layer.activation in _HOMOGENEOUS
    return isinstance(layer, _HANDING_ON)


def _has_weights_to_rescale(layer):
    known = (*_PRODUCTS, *_NORMALIZATIONS, layers.Embedding)
    # With LoRA the kernel is computed, and cannot be assigned to.
    computed = getattr(layer, "lora_enabled", False)
    ours = type(layer) in known and not computed
    return ours and layer.quantization_mode is None


def _returns_factor(layer):
    if isinstance(layer, _NORMALIZATIONS):
        return bool(_gains(layer))
    if isinstance(layer, layers.Embedding):
        return True
    return getattr(layer, "activation", None) in _HOMOGENEOUS


def _gains(layer):
    """What a normalization multiplies its results by, and adds to them."""
    if isinstance(layer, layers.RMSNormalization):
        return [layer.scale]
    # An offset alone cannot take a factor.
    found = [layer.gamma] if layer.gamma is not None else []
    return found + [layer.beta] * bool(found and layer.beta is not None)


def _multiply(variable, bits):
    if bits:
        variable.assign(to_array(variable.value) * np.float32(2.0**bits))
