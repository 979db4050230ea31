"""Examples of the rules that look at data, as in `lint_cases.py`."""

import keras
import numpy as np
from keras import layers
from lint_cases import between, compiled, finds, float16, mlp, passes, samples

import keras_mixprec as kmp


def embedding(dtype, size=5000):
    """An embedding of ids of two inputs, joined by a layer."""
    inputs = [keras.Input((2,), dtype=dtype) for _ in range(2)]
    x = layers.Concatenate(name="ids")(inputs)
    x = layers.Flatten()(layers.Embedding(size, 8)(x))
    return float16(keras.Model(inputs, layers.Dense(8)(x)))


@finds("ids_as_floats", "ids")
def ids_by_a_default_input():
    return embedding(None)


@passes("ids_as_floats")
def ids_by_an_integer_input():
    return embedding("int32")


@passes("ids_as_floats")
def few_ids_by_a_default_input():
    return embedding(None, size=100)


@passes("ids_as_floats")
def straight_to_an_embedding():
    inputs = keras.Input((4,))
    x = layers.Flatten()(layers.Embedding(5000, 8)(inputs))
    return float16(keras.Model(inputs, layers.Dense(8)(x)))


def with_days(**arguments):
    return mlp(8, size=4, **arguments), 19700.0 + np.arange(32).reshape(8, 4)


@finds("integers_as_floats")
def days_as_floats():
    return with_days()


@passes("integers_as_floats")
def days_to_a_float32_layer():
    model, x = with_days()
    kmp.apply_policy(model, "mixed_float16", rules=[kmp.PrecisionRule("d0")])
    return model, x


@passes("integers_as_floats", "inputs_beyond_format")
def pixels_as_floats():
    return mlp(8, size=4), np.arange(32.0).reshape(8, 4)


@finds("index_tensors_in_16_bits")
def ids_in_float16():
    return straight_to_an_embedding(), np.full((8, 4), 4096.0, "float16")


@passes("index_tensors_in_16_bits")
def ids_in_int32():
    return embedding("int32"), [np.full((8, 2), 4096, "int32")] * 2


@finds("targets_beyond_format", "d1")
def prices_of_houses():
    return mlp(16, 1), samples(), np.full((8, 1), 1.5e5)


@passes("targets_beyond_format")
def prices_of_meals():
    return mlp(16, 1), samples(), np.full((8, 1), 15.0)


@finds("inputs_beyond_format")
def prices_as_inputs():
    return mlp(8, size=4), np.full((8, 4), 1.5e5)


@finds("wrong_on_the_data", "d0")
def overflow_in_a_product():
    model = mlp(8, 8)
    model.get_layer("d0").kernel.assign(np.full((64, 8), 5e3))
    return model, np.ones((8, 64), "float32")


@finds("wrong_on_the_data", "norm")
def small_vectors():
    return between(layers.UnitNormalization(name="norm")), samples(8, 4, 1e-5)


@finds("wrong_on_the_data", "d0")
def one_large_sample_far_behind():
    model = mlp(8, 8)
    x = samples(200)
    x[150] = 1e6
    return compiled(model, kmp.LossScaleOptimizer("sgd")), x, samples(200, 8)


@passes("wrong_on_the_data")
def usual_vectors():
    model = between(layers.UnitNormalization(name="norm"))
    return compiled(model, "sgd"), samples(8, 4), samples(8, 8)


@passes("wrong_on_the_data")
def not_compiled():
    return mlp(8, 8), samples()


@passes("overflow_on_data")
def attention_over_padded_ids():
    """The fused attention of torch has float32 sums of rows that are masked."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 16, mask_zero=True)(inputs)
    x = layers.MultiHeadAttention(2, 8)(x, x)
    model = float16(keras.Model(inputs, layers.Dense(4)(x)))
    ids = np.arange(48).reshape(8, 6) % 20
    ids[:, 3:] = 0
    ids[0] = 0
    return model, ids
