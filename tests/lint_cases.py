"""Models in which each lint rule must find something, or nothing.

A case is a function that returns a model, `(model, x)` or `(model, x, y)`. A
dict at the end has more arguments of `lint`; `products` sets the matmul
precision on an H100. `FINDS` has cases by the rule that must find something,
with the layer that it must name and the severity if it differs from the
rule's. `PASSES` has cases by the rules that must find nothing.
`test_lint_rules.py` runs all of them.
"""

import functools

import keras
import numpy as np
from keras import layers, ops

import keras_mixprec as kmp

make = functools.partial


def float16(model, policy="mixed_float16"):
    """Sets every layer, without the rules that keep some in float32."""
    kmp.apply_policy(model, policy, rules=[])
    return model


def between(layer, shape=(4,), policy="mixed_float16"):
    """A model of one layer and a head, in 16 bits."""
    inputs = keras.Input(shape)
    x = layers.Flatten()(layer(inputs))
    return float16(keras.Model(inputs, layers.Dense(8, name="head")(x)), policy)


def mlp(*units, size=64, policy="mixed_float16", wide=(), **arguments):
    """Dense layers `d0`, `d1` ... in 16 bits, except the `wide` ones."""
    inputs = x = keras.Input((size,))
    for index, count in enumerate(units):
        x = layers.Dense(count, name=f"d{index}", **arguments)(x)
    model = float16(keras.Model(inputs, x), policy)
    kmp.apply_policy(model, policy, rules=[*map(kmp.PrecisionRule, wide)])
    return model


def with_kernel(number):
    model = mlp(8, 8)
    model.get_layer("d0").kernel.assign(np.full((64, 8), number))
    return model


def compiled(model, optimizer, **arguments):
    model.compile(optimizer, "mse", auto_scale_loss=False, **arguments)
    return model


def task(activation, y, loss):
    """A model with one output, inputs for the model, and targets."""
    head = layers.Dense(1, activation, dtype="float32")
    model = keras.Sequential([keras.Input((4,)), head])
    model.compile("sgd", loss)
    return model, samples(8, 4), y


def samples(count=8, size=64, scale=1.0):
    random = np.random.default_rng(0)
    return (scale * random.normal(size=(count, size))).astype("float32")


class Subclassed(keras.Model):
    """Only the operations in `call` show which layer makes the output."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(8, name="head")
        self.body = layers.Dense(16, name="body")

    def call(self, x):
        return self.head(self.body(x))


class Block(layers.Layer):
    """A user-written block that may pass its dtype to sublayers."""

    def __init__(self, hands_on, **arguments):
        super().__init__(**arguments)
        dtype = self.dtype_policy if hands_on else None
        self.inner = layers.Dense(8, dtype=dtype, name="inner")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)


def with_block(hands_on):
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((8,))
    x = Block(hands_on, dtype="float32", name="block")(inputs)
    return keras.Model(inputs, x)


def scale_of_a_billionth():
    return between(layers.Rescaling(1e-9, name="bytes"))


def large_moving_variance():
    model = between(layers.BatchNormalization(name="bn"))
    model.get_layer("bn").moving_variance.assign(np.full(4, 1e6))
    return model


def normalization(mean, variance):
    """Returns a `Normalization` of features around a mean."""
    return between(layers.Normalization(mean=mean, variance=variance, name="n"))


def unit_normalization():
    return between(layers.UnitNormalization(name="norm"))


def pure(policy, **arguments):
    keras.config.set_dtype_policy(policy)
    inputs = keras.Input((64,))
    x = layers.Dense(64, name="d0", **arguments)(inputs)
    return keras.Model(inputs, layers.Dense(8, name="d1")(x))


# Optimizers.


def plain_adam():
    return compiled(mlp(8), "adam")


def with_optimizer(wrap=kmp.LossScaleOptimizer, build=mlp, of=8, **arguments):
    """Returns a model with SGD, wrapped unless `wrap` is None."""
    optimizer = keras.optimizers.SGD(**arguments)
    return compiled(build(of), wrap(optimizer) if wrap else optimizer)


def with_adam(dtype, **arguments):
    return compiled(pure(dtype), keras.optimizers.Adam(**arguments))


class Stepping(keras.Model):
    """A step of the user's own, which is not run."""

    def train_step(self, data):
        raise NotImplementedError


class Deferring(keras.Model):
    """A step of the user's own that leaves the work to Keras."""

    def train_step(self, *arguments):
        return super().train_step(*arguments)


def stepping(kind):
    inputs = keras.Input((8,))
    model = float16(kind(inputs, layers.Dense(8)(inputs)))
    return compiled(model, kmp.LossScaleOptimizer("sgd"))


def with_callbacks(*callbacks):
    return with_optimizer(), {"callbacks": list(callbacks)}


# With data.


def overflow_in_a_product():
    return with_kernel(5e3), np.ones((8, 64), "float32")


def one_large_sample_far_behind():
    x = samples(20000)
    x[15000] = 1e6
    model = compiled(mlp(8, 8), kmp.LossScaleOptimizer("sgd"))
    return model, x, samples(20000, 8)


def attention_over_padded_ids():
    """The fused attention of torch has float32 sums of rows that are masked."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 16, mask_zero=True)(inputs)
    x = layers.MultiHeadAttention(2, 8)(x, x)
    model = keras.Model(inputs, layers.Dense(4)(x))
    float16(model, "mixed_bfloat16")  # JAX refuses float16 on CPUs.
    ids = np.arange(48).reshape(8, 6) % 20
    ids[:, 3:] = 0
    ids[0] = 0
    return model, ids


# Custom layers, on samples.


class Own(layers.Layer):
    """A layer of the user's own, whose `call` is a function."""

    def __init__(self, function, **kwargs):
        super().__init__(name="own", **kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


def own(function, scale=1.0):
    """A case of one such layer."""
    x = samples(size=8, scale=scale)
    return lambda: (between(Own(function), (8,)), x)


def raises_in_16_bits_only(error="float32 only"):
    def refuse(x):
        if keras.backend.standardize_dtype(x.dtype) != "float32":
            raise TypeError(error)
        return x

    layer = Own(lambda x: x)
    model = between(layer)
    layer.function = refuse
    return model


def mean_square(x):
    return ops.mean(ops.square(x), axis=-1, keepdims=True)


def variance_as_a_difference(x):
    x = 30 + ops.tanh(x)
    return ops.mean(x * x, 0) - ops.square(ops.mean(x, 0))


def exponentials(x):
    by_hand = ops.exp(x - ops.max(x, -1, keepdims=True))
    return by_hand / ops.sum(by_hand, -1, keepdims=True)


def kept_for_digits():
    """A layer that a diagnosis moved to float32 because of precision loss."""
    model = mlp(64, 8)
    rule = kmp.PrecisionRule("d0", reason="precision_loss")
    kmp.apply_policy(model, "mixed_float16", rules=[rule])
    return model


# Products in float32 on a GPU.
FLOAT32, TF32 = {"products": "float32"}, {"products": "tf32"}
BETA = {"beta_2": 0.99}
TINY = {"epsilon": 1e-8}
ACTIVITY = {"activity_regularizer": "l2"}
FINDS = {
    "dimension_not_multiple_of_8 d0": [make(mlp, 100, 8)],
    "dimension_not_multiple_of_8 d1 low": [make(mlp, 256, 10, size=256)],
    "no_16_bit_layers": [make(mlp, 8, policy="float32")],
    "wrapper_dtype_ignored block": [make(with_block, hands_on=False)],
    "argument_beyond_format bytes": [scale_of_a_billionth],
    "argument_beyond_format offset": [
        lambda: between(layers.Rescaling(1.0, 1e6, name="offset"))
    ],
    "weights_beyond_format d0": [make(with_kernel, 1e6)],
    # Days since 1970.
    "normalization_statistics n": [make(normalization, 19706.0, 85.0)],
    "sensitive_layer norm": [unit_normalization],
    "output_in_16_bits d1 low": [make(mlp, 16, 8)],
    "sensitive_layer d0": [make(mlp, 64, 8, **ACTIVITY)],
    "variables_in_16_bits": [
        make(pure, "bfloat16"),
        make(pure, "bfloat16", dtype="float32"),
    ],
    "constant_of_the_optimizer": [
        make(with_adam, "float16", **TINY, **BETA),
        make(with_adam, "bfloat16"),
    ],
    "no_loss_scaling": [plain_adam],
    "constant_loss_scale": [
        make(with_optimizer, None, loss_scale_factor=1024.0)
    ],
    "callbacks_that_read_the_loss": [
        lambda: with_callbacks(keras.callbacks.TerminateOnNaN())
    ],
    "targets_beyond_format d1": [
        lambda: (mlp(16, 1), samples(), np.full((8, 1), 1.5e5))
    ],
    "task_cannot_be_learned": [
        make(task, None, np.arange(8) % 2, "binary_crossentropy"),
        make(task, "sigmoid", np.arange(3.0, 11.0), "mse"),
    ],
    "inputs_not_to_scale": [
        lambda: (mlp(8, size=4, wide=["d0"]), samples(8, 4, 1e5)),
    ],
    "wrong_on_the_data d0": [
        overflow_in_a_product,
        lambda: (mlp(8, size=4), np.full((8, 4), 1.5e5)),
        one_large_sample_far_behind,
    ],
    "wrong_on_the_data own": [
        own(mean_square, 400),
        own(lambda x: x * ops.rsqrt(ops.sum(x * x)), 1e-4),
        own(variance_as_a_difference),
        own(lambda x: ops.sin(x * 1024.0), 4),
        own(lambda x: ops.log(ops.relu(x) + 1e-12)),
    ],
    "products_below_float32 d0": [lambda: (kept_for_digits(), TF32)],
}
PASSES = {
    "dimension_not_multiple_of_8": [make(mlp, 104, 8)],
    "dimension_not_multiple_of_8 no_loss_scaling": [
        lambda: compiled(mlp(100, 10, policy="float32"), "adam")
    ],
    "no_16_bit_layers": [make(mlp, 8, policy="mixed_bfloat16")],
    "output_in_16_bits": [make(mlp, 8, 8, wide=["d1"])],
    "wrapper_dtype_ignored": [make(with_block, hands_on=True)],
    "argument_beyond_format": [
        lambda: between(layers.Rescaling(1 / 255, -1)),
        lambda: between(layers.Rescaling(1e-9), policy="mixed_bfloat16"),
    ],
    "weights_beyond_format": [large_moving_variance],
    # Years.
    "normalization_statistics": [make(normalization, 2010.0, 130.0)],
    "sensitive_layer argument_beyond_format": [
        lambda: between(layers.LayerNormalization(epsilon=1e-12))
    ],
    "constant_of_the_optimizer": [
        make(with_adam, "mixed_float16", **TINY),
        make(with_adam, "bfloat16", **BETA),
    ],
    "no_loss_scaling": [with_optimizer],
    "constant_loss_scale": [
        lambda: compiled(mlp(8), kmp.LossScaleOptimizer("sgd", 1024.0))
    ],
    "callbacks_that_read_the_loss": [
        lambda: with_callbacks(keras.callbacks.EarlyStopping("val_loss")),
        lambda: with_callbacks(
            keras.callbacks.TerminateOnNaN(), kmp.MixPrecMonitor(verbose=0)
        ),
    ],
    "variables_in_16_bits": [
        make(with_optimizer, None, pure, "mixed_bfloat16", use_ema=True)
    ],
    "targets_beyond_format": [
        lambda: (mlp(16, 1), samples(), np.full((8, 1), 15.0))
    ],
    "task_cannot_be_learned": [
        make(task, "sigmoid", np.arange(8) % 2, "binary_crossentropy"),
        make(task, None, np.arange(3.0, 11.0), "mse"),
    ],
    "inputs_not_to_scale": [
        lambda: (mlp(8, size=4), samples(8, 4, 255.0)),
        attention_over_padded_ids,
    ],
    "wrong_on_the_data": [
        lambda: (float16(Subclassed()), samples(8, 4)),
        attention_over_padded_ids,
        own(lambda x: ops.log(1 + mean_square(x))),
        own(exponentials),
        own(ops.sin),
    ],
    "products_below_float32": [lambda: (kept_for_digits(), FLOAT32)],
}
