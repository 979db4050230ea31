"""Cases of the rules on the operations inside of layers' own calls.

`lint_cases.py` says what they are.
"""

import keras
import numpy as np
from keras import layers, ops
from lint_cases import between, float16, make, mlp, samples


class Own(layers.Layer):
    """A layer of the user's own, whose `call` is a function."""

    def __init__(self, function, **kwargs):
        super().__init__(name="own", **kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


def own(function, *given, size=8, policy="mixed_float16"):
    """A case of one such layer, with further arguments of `lint`."""
    return lambda: (between(Own(function), (size,), policy), *given)


own_bfloat16 = make(own, policy="mixed_bfloat16")


def on_data(function, scale=1.0):
    return own(function, samples(size=8, scale=scale))


def mean_square(x):
    return ops.mean(ops.square(x), axis=-1, keepdims=True)


def times(x, number):
    return x * ops.cast(number, x.dtype)


def total(x, axis=-1):
    return ops.sum(x, axis=axis, keepdims=True)


def layers_of_keras():
    inputs = keras.Input((8, 8))
    x = layers.LayerNormalization(epsilon=1e-12)(inputs)
    x = layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    x = layers.BatchNormalization(epsilon=1e-12)(x)
    x = layers.Softmax()(layers.Dense(8, "gelu")(x))
    x = layers.Activation("log_softmax")(layers.Dense(8, "silu")(x))
    return float16(keras.Model(inputs, layers.Dense(8, "softplus")(x)))


def masked(x, number):
    hidden = 1.0 - ops.cast(ops.tri(8), x.dtype)
    scores = ops.matmul(x[:, :, None], x[:, None])
    return ops.softmax(scores + times(hidden, number))


def masked_twice(x):
    hidden = 1.0 - ops.cast(ops.tri(8), x.dtype)
    scores = ops.matmul(x[:, :, None], x[:, None])
    padded = ops.cast(x[:, None] > 1, x.dtype)
    return ops.softmax(scores + -65504.0 * hidden + -65504.0 * padded)


def looked_up(dtype):
    """Ids of a large table, joined from two inputs if they are floats."""
    inputs = keras.Input((2,), dtype=dtype)
    ids = inputs if dtype else layers.Concatenate()([inputs, inputs])
    x = layers.Embedding(5000, 8, name="lookup")(ids)
    return float16(keras.Model(inputs, layers.Flatten()(x)))


def softmaxes_without_fault(x):
    shifted = ops.exp(x - ops.max(x, axis=-1, keepdims=True))
    by_hand = shifted / total(shifted) + ops.log(total(shifted))
    kernel = ops.exp(-ops.square(x)) + ops.exp(ops.clip(x, -5, 5))
    return by_hand + ops.logsumexp(x, -1, keepdims=True) + kernel


def raises_in_16_bits_only(error="float32 only"):
    def refuse(x):
        if keras.backend.standardize_dtype(x.dtype) != "float32":
            raise TypeError(error)
        return x

    layer = Own(lambda x: x)
    model = between(layer)
    layer.function = refuse
    return model


def variance_as_a_difference(x):
    x = 30 + ops.tanh(x)
    return ops.mean(x * x, 0) - ops.square(ops.mean(x, 0))


def integers(low, high):
    x = np.random.default_rng(0).integers(low, high, (32, 8))
    return x.astype("float32")


# Products in float32 on a GPU.
FLOAT32, TF32 = {"products": "float32"}, {"products": "tf32"}
own_float32 = make(own, policy="float32")


def covariance_factor(x):
    return ops.cholesky(ops.matmul(ops.transpose(x), x) + ops.eye(8))


FINDS = {
    "vanishing_constant own": [
        own(lambda x: ops.log(ops.relu(x) + 1e-12)),
        own(lambda x: x / (ops.sqrt(mean_square(x)) + 1e-8)),
    ],
    "overflowing_constant own": [
        own(lambda x: masked(x, -1e9)),
        own(lambda x: times(x, 1e5)),
    ],
    "masks_at_limit own": [own(masked_twice)],
    # Positions.
    "integers_in_16_bits own": [
        own(lambda x: times(x, ops.arange(4096)), size=4096)
    ],
    "index_in_16_bits lookup": [make(looked_up, None)],
    "constant_rounded_to_one own": [
        own(lambda x: ops.arccos(ops.tanh(x) * (1 - 1e-6)))
    ],
    "sum_of_squares own": [
        own(lambda x: x / (ops.sqrt(total(x * x)) + 1), size=1024)
    ],
    "exp_without_maximum own": [own(lambda x: ops.exp(x) / total(ops.exp(x)))],
    "log_of_probability own": [own(lambda x: ops.log(ops.softmax(x)))],
    "large_reduction own": [own(lambda x: total(x, 1) / 8, size=70000)],
    "running_product own": [
        own(lambda x: x / ops.cumprod(ops.sigmoid(x), axis=1), size=100)
    ],
    "mixed_dtypes": [raises_in_16_bits_only],
    "hard_coded_float16 own": [
        own_bfloat16(
            lambda x: ops.cast(ops.tanh(ops.cast(x, "float16")), "bfloat16")
        )
    ],
    "kept_in_float32_elsewhere own": [
        own(lambda x: ops.log(1 + ops.power(ops.abs(x), 1.5)))
    ],
    "overflow_on_data own": [on_data(mean_square, 400)],
    "underflow_on_data own": [
        on_data(lambda x: x * ops.rsqrt(ops.sum(x * x)), 1e-4)
    ],
    "cancellation_on_data own": [on_data(variance_as_a_difference)],
    # Days since 1970.
    "rounded_inputs own": [own(lambda x: x / 1e4, integers(19690, 19722))],
    "angles_on_data own": [on_data(lambda x: ops.sin(x * 1024.0), 4)],
    "products_below_float32 own": [own_float32(covariance_factor, TF32)],
    "products_without_tf32": [lambda: (mlp(64, 8, policy="float32"), FLOAT32)],
}
PASSES = {
    "vanishing_constant log_of_probability": [
        own(lambda x: ops.log(ops.relu(x) + 1e-6))
    ],
    "vanishing_constant sum_of_squares exp_without_maximum "
    "log_of_probability kept_in_float32_elsewhere": [layers_of_keras],
    "overflowing_constant masks_at_limit": [own(lambda x: masked(x, -3e4))],
    "integers_in_16_bits": [
        own(lambda x: times(x, ops.arange(2048)), size=2048)
    ],
    "index_in_16_bits": [make(looked_up, "int32")],
    "constant_rounded_to_one": [
        own(lambda x: ops.arccos(ops.tanh(x) * (1 - 1e-2)))
    ],
    "exp_without_maximum log_of_probability": [own(softmaxes_without_fault)],
    "large_reduction": [
        own(lambda x: ops.mean(x, axis=1, keepdims=True), size=70000)
    ],
    "running_product": [own(lambda x: ops.cumprod(x, axis=1), size=4)],
    "mixed_dtypes": [own(lambda x: x + ops.cast(ops.ones((8,)), x.dtype))],
    "hard_coded_float16": [own(lambda x: ops.tanh(ops.cast(x, x.dtype)))],
    "overflow_on_data underflow_on_data cancellation_on_data": [
        on_data(lambda x: ops.log(1 + mean_square(x)))
    ],
    "cancellation_on_data rounded_inputs": [
        on_data(lambda x: ops.exp(x - ops.max(x, -1, keepdims=True)))
    ],
    # Years.
    "rounded_inputs": [own(lambda x: x / 1e4, integers(1990, 2030))],
    "angles_on_data": [on_data(ops.sin)],
    "products_below_float32 products_without_tf32": [
        own_float32(covariance_factor, FLOAT32)
    ],
    "products_without_tf32": [lambda: (mlp(64, 4, wide=["d1"]), FLOAT32)],
}
