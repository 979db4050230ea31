"""What stays in float32 although its model computes in 16 bits, and why.

Each was seen to fail in float16 on some backend and to be right in float32.
What Keras widens inside (its normalization layers but for those here, the
mean, global average pooling, losses) is not listed.
"""

import math

import keras
from keras import layers

from keras_mixprec.policies.rules import (
    FEEDS_OPERATION,
    OUTPUT,
    PrecisionRule,
    PrecisionRules,
)

# A float16 sum of n equal terms loses digits from 2**11 terms on, and
# AveragePooling2D(32) of the constant 3.0 was seen to return 3.33.
_MANY_POSITIONS = 1024

# So that the rules can be saved.
_registered = keras.saving.register_keras_serializable("keras_mixprec")


@_registered
def is_user_written_norm(layer, path) -> bool:
    """Whether a layer from outside Keras calls itself a normalization."""
    kind = type(layer)
    own = not kind.__module__.startswith("keras.")
    return own and "norm" in kind.__name__.lower()


@_registered
def has_explosive_activation(layer, path) -> bool:
    """Whether the activation leaves float16's range for everyday inputs."""
    return getattr(layer, "activation", None) in (
        keras.activations.exponential,
        keras.activations.squareplus,
    )


@_registered
def has_activity_regularizer(layer, path) -> bool:
    """Whether the layer adds a loss computed from its output."""
    return getattr(layer, "activity_regularizer", None) is not None


@_registered
def is_cosine(layer, path) -> bool:
    """Whether the layer is a `Dot` that normalizes its inputs."""
    return isinstance(layer, layers.Dot) and layer.normalize


@_registered
def is_unscaled_attention(layer, path) -> bool:
    """Whether the layer takes dot products without dividing them."""
    # `AdditiveAttention` is a subclass that adds, inside a tanh.
    return (
        isinstance(layer, layers.Attention)
        and not isinstance(layer, layers.AdditiveAttention)
        and layer.score_mode == "dot"
    )


@_registered
def averages_many(layer, path) -> bool:
    """Whether the layer averages windows of very many positions."""
    pooling = (
        layers.AveragePooling1D,
        layers.AveragePooling2D,
        layers.AveragePooling3D,
    )
    return (
        isinstance(layer, pooling)
        and math.prod(keras.tree.flatten(layer.pool_size)) >= _MANY_POSITIONS
    )


@_registered
def reads_raw_features(layer, path) -> bool:
    """Whether the layer brings raw features to scale."""
    return isinstance(layer, (layers.Normalization, layers.Rescaling))


@_registered
def looks_numbers_up(layer, path) -> bool:
    """Whether the layer finds the bin or the place of raw numbers."""
    return isinstance(layer, (layers.CategoryEncoding, layers.Discretization))


DEFAULT_RULES = PrecisionRules(
    [
        PrecisionRule(
            OUTPUT,
            reason="output of the model: probabilities below 3e-8 become 0, "
            "logits and targets above 65504 overflow",
        ),
        PrecisionRule(
            FEEDS_OPERATION,
            reason="feeds an operation (exp, log, pow, sum) that overflows or "
            "cancels in float16 and takes its dtype from this layer",
        ),
        PrecisionRule(
            is_user_written_norm,
            reason="user-written normalization: x*x overflows above 255, "
            "an epsilon below 6e-8 is zero",
        ),
        PrecisionRule(
            has_explosive_activation,
            reason="exp(12) and squareplus(256) are above 65504",
        ),
        PrecisionRule(
            reads_raw_features,
            reason="raw features and their statistics can lie outside "
            "float16's range",
        ),
        PrecisionRule(
            looks_numbers_up,
            reason="looks raw numbers up, which in TensorFlow's graphs are "
            "cast before: 2049 becomes 2048",
        ),
        PrecisionRule(
            layers.UnitNormalization,
            reason="its epsilon of 1e-12 is zero in float16 and x*x "
            "overflows above 255",
        ),
        PrecisionRule(
            is_cosine,
            reason="Dot(normalize=True) squares its inputs: above 255 the "
            "cosine is 0",
        ),
        PrecisionRule(
            is_unscaled_attention,
            reason="Attention does not divide by sqrt(dim): scores above "
            "65504 make NaN",
        ),
        PrecisionRule(
            has_activity_regularizer,
            reason="Keras computes the activity loss in the layer's compute "
            "dtype: above 65504 the loss is infinite",
        ),
        PrecisionRule(
            averages_many,
            reason="average pooling sums its window in float16 on some "
            "backends",
        ),
        PrecisionRule(
            layers.SpectralNormalization,
            reason="it writes the normalized kernel back in its compute "
            "dtype, which rounds the float32 weights to float16",
            sublayers=False,
        ),
    ]
)
