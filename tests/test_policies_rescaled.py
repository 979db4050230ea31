"""Rescaled layers are exact, and stay rescaled in files and copies."""

import copy
import pickle

import keras
import numpy as np
import pytest
from keras import layers, ops
from optimizer_models import rarely

from keras_mixprec import PrecisionPlan, RescaledPolicy

# JAX has no float64 unless asked for before it starts. Powers of two are exact
# in float32 as well.
WIDE = "float32" if keras.backend.backend() == "jax" else "float64"


class Norm(layers.Layer):
    """x / |x|, of degree 0."""

    def call(self, x):
        return x / ops.sqrt(ops.sum(x * x, -1, keepdims=True))


class Energy(layers.Layer):
    """|x|^2, of degree 2."""

    def call(self, x):
        return ops.sum(x * x, -1, keepdims=True)


def dense(**arguments):
    start = keras.initializers.RandomNormal(seed=0)
    starts = {"kernel_initializer": start, "bias_initializer": start}
    return layers.Dense(4, "relu", **starts, **arguments)


KINDS = {0: Norm, 1: dense, 2: Energy}


def numbers(scale=1.0):
    x = np.random.default_rng(0).normal(size=(8, 16))
    return (scale * x).astype("float32")


def values(layer, x):
    return ops.convert_to_numpy(layer(x)).astype("float64")


@pytest.mark.parametrize("bits", [-9, rarely(5)])
@pytest.mark.parametrize("degree", KINDS)
def test_outputs_and_gradients_are_exact(degree, bits):
    found = []
    rescaled = RescaledPolicy(bits, -degree * bits, source_name=WIDE)
    for policy in (WIDE, rescaled):
        inputs = keras.Input((16,), dtype=WIDE)
        x = layers.Dense(16, dtype=WIDE, kernel_initializer="identity")(inputs)
        y = layers.Flatten(dtype=WIDE)(KINDS[degree](dtype=policy)(x))
        model = keras.Model(inputs, y)
        before = values(model, ops.convert_to_tensor(numbers(), WIDE))
        assert np.any(before)
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        model.fit(numbers(), np.ones(before.shape), shuffle=False, verbose=0)
        found.append([before, *model.get_weights()])
    for own, rescaled in zip(*found, strict=True):
        np.testing.assert_array_equal(rescaled, own)


def test_the_range_of_float16():
    x = numbers(400.0)
    squares = np.square(x, dtype="float64").sum(-1, keepdims=True)
    assert np.abs(values(Norm(dtype="mixed_float16"), x)).max() < 0.01
    found = values(Norm(dtype=RescaledPolicy(-6)), x)
    np.testing.assert_allclose(found, x / np.sqrt(squares), rtol=2e-3)
    # Outputs that do not fit are returned in float32.
    layer = Energy(dtype=RescaledPolicy(-6, 12, wide_outputs=True))
    assert squares.max() > 65504
    np.testing.assert_allclose(values(layer, x), squares, rtol=2e-3)
    assert keras.backend.standardize_dtype(layer(x).dtype) == "float32"
    # Inputs beyond the format are scaled before they are cast.
    x = ops.convert_to_tensor(numbers(1e6))
    found = values(Norm(dtype=RescaledPolicy(-15)), x)
    np.testing.assert_allclose(np.square(found).sum(-1), 1, rtol=4e-3)


def by_a_plan(model, path):
    PrecisionPlan.from_model(model).save(path)
    other = keras.models.clone_model(model)
    for layer in other.layers:
        layer.dtype_policy = "float32"
    assert set(PrecisionPlan.from_model(other).values()) == {"float32"}
    PrecisionPlan.load(path).apply(other)
    return other


COPIES = {
    "clone": lambda model, _: keras.models.clone_model(model),
    "copy": lambda model, _: copy.deepcopy(model),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
    "plan": by_a_plan,
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_keep_it(name, tmp_path):
    inputs = keras.Input((16,))
    x = layers.UnitNormalization(dtype=RescaledPolicy(-6))(inputs)
    x = layers.Dense(4, dtype=RescaledPolicy(-6, 6, True))(x)
    own = keras.Model(inputs, x)
    other = COPIES[name](own, tmp_path / "plan.json")
    other.set_weights(own.get_weights())
    assert dict(PrecisionPlan.from_model(other)) == {
        "unit_normalization": "rescaled(-6,0)_from_mixed_float16",
        "dense": "rescaled(-6,6,float32)_from_mixed_float16",
    }
    x = numbers(400.0)
    np.testing.assert_array_equal(values(other, x), values(own, x))


@pytest.mark.one_backend
@pytest.mark.parametrize("bits", [(-30, 30), (0, 0), (7, -7)])
@pytest.mark.parametrize("wide", [True, False])
def test_a_name_says_all(bits, wide):
    policy = RescaledPolicy(*bits, wide)
    again = RescaledPolicy.from_name(policy.name)
    assert again == policy != RescaledPolicy(*bits, not wide)
