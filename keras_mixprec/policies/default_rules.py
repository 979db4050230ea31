"""Layers that stay in float32 in a 16-bit model, and why.

For each of these layers, a test shows that it fails in float16 on some backend,
and works in float32. Keras already computes its other normalization layers,
means, global average pooling and losses in float32, so they need no rule.
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

# The number of positions in a pooling window from which float16 is too inexact.
# float16 holds all integers only up to 2**11, so long sums lose digits:
# `AveragePooling2D(32)` returned 3.33 for inputs of 3.0.
_MANY_POSITIONS = 1024


def is_user_written_norm(layer, path) -> bool:
    """Returns whether a user-written layer has "norm" in its class name."""
    return not is_of_keras(layer) and "norm" in type(layer).__name__.lower()


def has_explosive_activation(layer, path) -> bool:
    """Returns whether the activation overflows float16 on ordinary inputs."""
    return getattr(layer, "activation", None) in (
        keras.activations.exponential,
        keras.activations.squareplus,
    )


def reads_raw_features(layer, path) -> bool:
    """Returns whether the layer normalizes or rescales raw features."""
    return isinstance(layer, (layers.Normalization, layers.Rescaling))


def looks_numbers_up(layer, path) -> bool:
    """Returns whether the layer turns raw numbers into bins or categories."""
    return isinstance(layer, (layers.CategoryEncoding, layers.Discretization))


def is_cosine(layer, path) -> bool:
    """Returns whether the layer is a `Dot` that normalizes its inputs."""
    return isinstance(layer, layers.Dot) and layer.normalize


def is_unscaled_attention(layer, path) -> bool:
    """Returns whether attention scores are dot products without a scale."""
    # The subclass `AdditiveAttention` bounds its scores by a tanh.
    return (
        isinstance(layer, layers.Attention)
        and not isinstance(layer, layers.AdditiveAttention)
        and layer.score_mode == "dot"
    )


def has_activity_regularizer(layer, path) -> bool:
    """Returns whether the layer adds a loss that depends on its output."""
    return getattr(layer, "activity_regularizer", None) is not None


def averages_many(layer, path) -> bool:
    """Returns whether the layer averages very large windows."""
    kinds = layers.AveragePooling1D, layers.AveragePooling2D
    return isinstance(layer, (*kinds, layers.AveragePooling3D)) and (
        math.prod(keras.tree.flatten(layer.pool_size)) >= _MANY_POSITIONS
    )


_REASONS = {
    OUTPUT: "output of the model: probabilities below 3e-8 become 0, logits "
    "and targets above 65504 overflow",
    FEEDS_OPERATION: "feeds an operation (exp, log, pow, sum) that overflows "
    "or cancels in float16 and takes its dtype from this layer",
    is_user_written_norm: "user-written normalization: x*x overflows at 256 "
    "and above; an epsilon below 3e-8 becomes 0",
    has_explosive_activation: "exp(12) and squareplus(256) are above 65504",
    reads_raw_features: "raw features and their statistics can lie outside "
    "float16's range",
    looks_numbers_up: "TensorFlow's graphs cast its raw input numbers to "
    "float16: 2049 becomes 2048",
    layers.UnitNormalization: "its epsilon of 1e-12 is zero in float16 and "
    "x*x overflows at 256 and above",
    is_cosine: "Dot(normalize=True) squares its inputs: from 256 on the cosine "
    "is 0",
    is_unscaled_attention: "Attention does not divide by sqrt(dim): scores "
    "above 65504 give NaN",
    has_activity_regularizer: "Keras computes the activity loss in the layer's "
    "compute dtype: above 65504 the loss is infinite",
    averages_many: "average pooling sums its window in float16 on some "
    "backends",
    layers.SpectralNormalization: "it writes the normalized kernel back in its "
    "compute dtype, which rounds the float32 weights to float16",
}


def _rule(match, reason):
    # Keras can load a rule from a file only if its function is registered.
    if not isinstance(match, (str, type)):
        keras.saving.register_keras_serializable("keras_mixprec")(match)
    # The layer that `SpectralNormalization` wraps may stay in 16 bits.
    wraps = match is layers.SpectralNormalization
    return PrecisionRule(match, reason=reason, sublayers=not wraps)


DEFAULT_RULES = PrecisionRules(_rule(*item) for item in _REASONS.items())
