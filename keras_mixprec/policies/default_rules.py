"""Layers that stay in float32 in a 16-bit model, and why.

Each was seen to fail in float16 on some backend and to be right in float32.
Keras itself widens its other normalization layers, the mean, global average
pooling and losses, so they are not listed.
"""

import math

import keras
from keras import layers

from keras_mixprec.policies.layers import is_of_keras
from keras_mixprec.policies.rules import (
    FEEDS_OPERATION,
    OUTPUT,
    PrecisionRule,
    PrecisionRules,
)

# A float16 sum of n equal terms loses digits from 2**11 terms on, and
# AveragePooling2D(32) of the constant 3.0 was seen to return 3.33.
_MANY_POSITIONS = 1024

_found: list[PrecisionRule] = []


def _keep(match, reason, **arguments):
    _found.append(PrecisionRule(match, reason=reason, **arguments))


def _keep_if(reason):
    """Adds a rule for the layers that a function says yes to."""

    def add(predicate):
        # So that the rule can be saved.
        register = keras.saving.register_keras_serializable("keras_mixprec")
        _keep(register(predicate), reason)
        return predicate

    return add


_keep(
    OUTPUT,
    "output of the model: probabilities below 3e-8 become 0, logits and "
    "targets above 65504 overflow",
)
_keep(
    FEEDS_OPERATION,
    "feeds an operation (exp, log, pow, sum) that overflows or cancels in "
    "float16 and takes its dtype from this layer",
)


@_keep_if(
    "user-written normalization: x*x overflows above 255, an epsilon below "
    "3e-8 becomes 0"
)
def is_user_written_norm(layer, path) -> bool:
    """Returns whether a user-written layer calls itself a normalization."""
    return not is_of_keras(layer) and "norm" in type(layer).__name__.lower()


@_keep_if("exp(12) and squareplus(256) are above 65504")
def has_explosive_activation(layer, path) -> bool:
    """Returns whether everyday inputs drive the activation out of range."""
    return getattr(layer, "activation", None) in (
        keras.activations.exponential,
        keras.activations.squareplus,
    )


@_keep_if("raw features and their statistics can lie outside float16's range")
def reads_raw_features(layer, path) -> bool:
    """Returns whether the layer brings raw features to scale."""
    return isinstance(layer, (layers.Normalization, layers.Rescaling))


@_keep_if(
    "looks raw numbers up, which in TensorFlow's graphs are cast before: 2049 "
    "becomes 2048"
)
def looks_numbers_up(layer, path) -> bool:
    """Returns whether the layer finds the bin or the place of raw numbers."""
    return isinstance(layer, (layers.CategoryEncoding, layers.Discretization))


_keep(
    layers.UnitNormalization,
    "its epsilon of 1e-12 is zero in float16 and x*x overflows above 255",
)


@_keep_if("Dot(normalize=True) squares its inputs: above 255 the cosine is 0")
def is_cosine(layer, path) -> bool:
    """Returns whether the layer is a `Dot` that normalizes its inputs."""
    return isinstance(layer, layers.Dot) and layer.normalize


@_keep_if("Attention does not divide by sqrt(dim): scores above 65504 make NaN")
def is_unscaled_attention(layer, path) -> bool:
    """Returns whether the layer takes dot products without dividing them."""
    # `AdditiveAttention` is a subclass that adds, inside a tanh.
    return (
        isinstance(layer, layers.Attention)
        and not isinstance(layer, layers.AdditiveAttention)
        and layer.score_mode == "dot"
    )


@_keep_if(
    "Keras computes the activity loss in the layer's compute dtype: above "
    "65504 the loss is infinite"
)
def has_activity_regularizer(layer, path) -> bool:
    """Returns whether the layer adds a loss computed from its output."""
    return getattr(layer, "activity_regularizer", None) is not None


@_keep_if("average pooling sums its window in float16 on some backends")
def averages_many(layer, path) -> bool:
    """Returns whether the layer averages windows of very many positions."""
    pooling = (
        layers.AveragePooling1D,
        layers.AveragePooling2D,
        layers.AveragePooling3D,
    )
    return (
        isinstance(layer, pooling)
        and math.prod(keras.tree.flatten(layer.pool_size)) >= _MANY_POSITIONS
    )


_keep(
    layers.SpectralNormalization,
    "it writes the normalized kernel back in its compute dtype, which rounds "
    "the float32 weights to float16",
    sublayers=False,
)

DEFAULT_RULES = PrecisionRules(_found)
