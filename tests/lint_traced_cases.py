"""Examples for the rules on the operations inside of layers' own calls."""

import keras
import numpy as np
from keras import layers, ops
from lint_cases import between, finds, float16, mlp, passes, samples

import keras_mixprec as kmp


class Own(layers.Layer):
    """A layer of the user's own, whose `call` is a function."""

    def __init__(self, function, **kwargs):
        super().__init__(name="own", **kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


def own(function, shape=(8,), policy="mixed_float16"):
    return between(Own(function), shape, policy)


def on_data(function, size=8, scale=1.0, policy="mixed_float16"):
    return own(function, (size,), policy), samples(size=size, scale=scale)


def mean_square(x):
    return ops.mean(ops.square(x), axis=-1, keepdims=True)


# Constants.


@finds("vanishing_constant", "own")
def log_of_a_relu_and_1e_12():
    return own(lambda x: ops.log(ops.relu(x) + 1e-12))


@finds("vanishing_constant", "own")
def variance_and_1e_12_under_a_root():
    return own(lambda x: x * ops.rsqrt(mean_square(x) + 1e-12))


@finds("vanishing_constant", "own")
def deviation_and_1e_8_divides():
    return own(lambda x: x / (ops.sqrt(mean_square(x)) + 1e-8))


@finds("vanishing_constant", "own", "low")
def epsilon_beside_one():
    return own(lambda x: ops.log(1 + ops.relu(x) + 1e-12))


@passes("vanishing_constant", "log_of_probability")
def log_of_a_relu_and_1e_6():
    return own(lambda x: ops.log(ops.relu(x) + 1e-6))


@passes("vanishing_constant")
def epsilon_of_1e_12_in_bfloat16():
    return own(lambda x: ops.log(ops.relu(x) + 1e-12), policy="mixed_bfloat16")


@passes("vanishing_constant", "sum_of_squares", "exp_without_maximum")
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
    return ops.softmax(scores + hidden * ops.cast(number, x.dtype))


@finds("overflowing_constant", "own")
def mask_of_minus_a_billion():
    return own(lambda x: masked(x, -1e9))


@finds("overflowing_constant", "own")
def times_100_000():
    return own(lambda x: x * ops.cast(1e5, x.dtype))


@finds("overflowing_constant", "own")
def divided_by_100_000():
    return own(lambda x: x / ops.cast(1e5, x.dtype))


@finds("overflowing_constant", "own", "medium")
def selected_minus_a_billion():
    return own(
        lambda x: ops.softmax(ops.where(x > 0, x, ops.cast(-1e9, x.dtype)))
    )


@passes("overflowing_constant", "masks_at_limit")
def mask_of_minus_30_000():
    return own(lambda x: masked(x, -3e4))


@passes("overflowing_constant")
def minus_infinity_on_purpose():
    return own(
        lambda x: ops.softmax(ops.where(x > 0, x, ops.cast(-np.inf, x.dtype)))
    )


@finds("masks_at_limit", "own")
def two_masks_of_the_minimum():
    def attend(x):
        hidden = 1.0 - ops.cast(ops.tri(8), x.dtype)
        scores = ops.matmul(x[:, :, None], x[:, None])
        padded = ops.cast(x[:, None] > 1, x.dtype)
        return ops.softmax(scores + -65504.0 * hidden + -65504.0 * padded)

    return own(attend)


# Integers.


@finds("integers_in_16_bits", "own")
def positions_up_to_4095():
    return own(lambda x: x * ops.cast(ops.arange(4096), x.dtype), shape=(4096,))


@finds("integers_in_16_bits", "own")
def positions_in_bfloat16():
    return own(
        lambda x: x * ops.cast(ops.arange(512), x.dtype),
        shape=(512,),
        policy="mixed_bfloat16",
    )


@passes("integers_in_16_bits")
def positions_up_to_2047():
    return own(lambda x: x * ops.cast(ops.arange(2048), x.dtype), shape=(2048,))


@finds("index_in_16_bits", "lookup")
def float_ids_of_a_large_table():
    inputs = keras.Input((2,))
    x = layers.Concatenate(name="ids")([inputs, inputs])
    x = layers.Embedding(5000, 8, name="lookup")(x)
    return float16(keras.Model(inputs, layers.Flatten()(x)))


@passes("index_in_16_bits")
def integer_ids_of_a_large_table():
    inputs = keras.Input((2,), dtype="int32")
    x = layers.Embedding(5000, 8, name="lookup")(inputs)
    return float16(keras.Model(inputs, layers.Flatten()(x)))


@finds("constant_rounded_to_one", "own")
def arccos_kept_off_one_by_1e_6():
    return own(lambda x: ops.arccos(ops.tanh(x) * (1 - 1e-6)))


@passes("constant_rounded_to_one")
def arccos_kept_off_one_by_1e_2():
    return own(lambda x: ops.arccos(ops.tanh(x) * (1 - 1e-2)))


# Reductions and exponentials.


@finds("sum_of_squares", "own")
def squares_of_1024_numbers():
    return own(
        lambda x: x / (ops.sqrt(ops.sum(x * x, -1, keepdims=True)) + 1),
        shape=(1024,),
    )


@finds("sum_of_squares", "own", "medium")
def squares_of_8_numbers():
    return own(lambda x: ops.sum(ops.square(x), -1, keepdims=True))


@passes("sum_of_squares", "kept_in_float32_elsewhere")
def squares_in_float32():
    def scaled(x):
        wide = ops.cast(x, "float32")
        return ops.cast(wide / (1 + ops.sum(wide * wide)), x.dtype)

    return own(scaled, shape=(1024,))


@finds("exp_without_maximum", "own")
def softmax_by_hand():
    def attend(x):
        weights = ops.exp(x)
        return weights / ops.sum(weights, axis=-1, keepdims=True)

    return own(attend)


@finds("exp_without_maximum", "own")
def logsumexp_by_hand():
    return own(lambda x: ops.log(ops.sum(ops.exp(x), -1, keepdims=True)))


@finds("exp_without_maximum", "own", "medium")
def variance_from_its_log():
    return own(lambda x: x + ops.exp(x))


@passes("exp_without_maximum", "log_of_probability")
def softmaxes_without_fault():
    def attend(x):
        shifted = ops.exp(x - ops.max(x, axis=-1, keepdims=True))
        total = ops.sum(shifted, axis=-1, keepdims=True)
        by_hand = shifted / total + ops.log(total)
        kernel = ops.exp(-ops.square(x)) + ops.exp(ops.clip(x, -5, 5))
        return by_hand + ops.logsumexp(x, -1, keepdims=True) + kernel

    return own(attend)


@finds("log_of_probability", "own")
def log_of_a_softmax():
    return own(lambda x: ops.log(ops.softmax(x)))


@finds("log_of_probability", "own")
def log_of_one_less_a_sigmoid():
    return own(lambda x: ops.log(1 - ops.sigmoid(x)))


@passes("log_of_probability")
def log_softmax():
    return own(ops.log_softmax)


@finds("large_reduction", "own")
def sum_over_70_000():
    return own(lambda x: ops.sum(x, axis=1, keepdims=True) / 8, shape=(70000,))


@passes("large_reduction")
def mean_over_70_000():
    return own(lambda x: ops.mean(x, axis=1, keepdims=True), shape=(70000,))


@finds("running_product", "own")
def divided_by_a_running_product():
    return own(lambda x: x / ops.cumprod(ops.sigmoid(x), axis=1), shape=(100,))


@passes("running_product")
def running_product_of_four():
    return own(lambda x: ops.cumprod(x, axis=1), shape=(4,))


# Dtypes.


@finds("mixed_dtypes")
def raises_in_16_bits_only():
    layer = Own(lambda x: x)
    model = between(layer)
    layer.function = refuses_16_bits
    return model


def refuses_16_bits(x):
    if keras.backend.standardize_dtype(x.dtype) != "float32":
        raise TypeError("This operation has float32 only.")
    return x


@passes("mixed_dtypes")
def casts_what_it_adds():
    return own(lambda x: x + ops.cast(ops.ones((8,)), x.dtype))


@finds("hard_coded_float16", "own")
def float16_whatever_the_policy():
    return own(
        lambda x: ops.cast(ops.tanh(ops.cast(x, "float16")), "bfloat16"),
        policy="mixed_bfloat16",
    )


@passes("hard_coded_float16")
def dtype_of_the_input():
    return own(lambda x: ops.tanh(ops.cast(x, x.dtype)))


@finds("kept_in_float32_elsewhere", "own")
def power_and_logarithm():
    return own(lambda x: ops.log(1 + ops.power(ops.abs(x), 1.5)))


# Numbers on data.


@finds("overflow_on_data", "own")
def squares_of_hundreds():
    return on_data(lambda x: ops.mean(x * x, -1, keepdims=True), scale=400)


@passes("overflow_on_data", "underflow_on_data", "cancellation_on_data")
def squares_of_ones():
    return on_data(lambda x: ops.log(1 + mean_square(x)))


@passes("overflow_on_data")
def masks_on_data():
    return own(lambda x: masked(x, -65504)), samples(size=8)


@finds("underflow_on_data", "own")
def root_of_tiny_squares():
    return on_data(lambda x: x * ops.rsqrt(ops.sum(x * x)), scale=1e-4)


@finds("cancellation_on_data", "own")
def variance_as_a_difference():
    def variance(x):
        x = 30 + ops.tanh(x)
        return ops.mean(x * x, 0) - ops.square(ops.mean(x, 0))

    return on_data(variance)


@passes("cancellation_on_data", "rounded_inputs")
def less_its_maximum():
    return on_data(lambda x: ops.exp(x - ops.max(x, -1, keepdims=True)))


@finds("rounded_inputs", "own")
def days_since_1970():
    x = np.random.default_rng(0).integers(19690, 19722, (32, 8))
    return own(lambda x: x / 1e4), x.astype("float32")


@passes("rounded_inputs")
def years():
    x = np.random.default_rng(0).integers(1990, 2030, (32, 8))
    return own(lambda x: x / 1e4), x.astype("float32")


@finds("angles_on_data", "own")
def sines_of_thousands():
    return on_data(lambda x: ops.sin(x * 1024.0), scale=4)


@passes("angles_on_data")
def sines_of_ones():
    return on_data(ops.sin)


# Products in float32 on a GPU.


def covariance_factor(x):
    return ops.cholesky(ops.matmul(ops.transpose(x), x) + ops.eye(8))


def distances(x):
    squares = ops.sum(ops.square(x), axis=-1, keepdims=True)
    products = ops.matmul(x, ops.transpose(x))
    return squares + ops.transpose(squares) - 2.0 * products


@finds("products_below_float32", "own")
def factorized_in_tf32():
    return own(covariance_factor, policy="float32"), {"products": "tf32"}


@finds("products_below_float32", "own")
def distances_in_tf32():
    def weighed(x):
        return ops.matmul(ops.exp(-distances(x)), x)

    return own(weighed, policy="float32"), {"products": "tf32"}


@finds("products_below_float32", "d0")
def kept_in_float32_for_its_digits():
    model = mlp(64, 8)
    wide = [kmp.PrecisionRule("d0", reason="precision_loss")]
    kmp.apply_policy(model, "mixed_float16", rules=wide)
    return model, {"products": "tf32"}


@passes("products_below_float32", "products_without_tf32")
def factorized_in_float32():
    return own(covariance_factor, policy="float32"), {"products": "float32"}


@passes("products_below_float32", "products_without_tf32")
def attention_in_tf32():
    inputs = keras.Input((16, 8))
    x = layers.MultiHeadAttention(2, 4)(inputs, inputs)
    x = layers.BatchNormalization()(layers.Dense(8)(x))
    return keras.Model(inputs, x), {"products": "tf32"}


@finds("products_without_tf32")
def dense_in_float32_on_a_gpu():
    return mlp(64, 8, policy="float32"), {"products": "float32"}


@passes("products_without_tf32")
def dense_in_float32_on_a_cpu():
    return mlp(64, 8, policy="float32")


@passes("products_without_tf32")
def only_a_small_head_in_float32_on_a_gpu():
    model = mlp(64, 4)
    wide = [kmp.PrecisionRule("d1")]
    kmp.apply_policy(model, "mixed_float16", rules=wide)
    return model, {"products": "float32"}
