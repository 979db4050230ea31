"""Layers on inputs times a power of two: exact, and kept wherever they go."""

import copy
import pickle

import keras
import numpy as np
import pytest
from keras import layers, ops
from test_optimizer_fresh_process import run

from keras_mixprec import PrecisionPlan, RescaledPolicy

# JAX has no float64 unless asked for before it starts. Powers of two are exact
# in float32 as well.
WIDE = "float32" if keras.backend.backend() == "jax" else "float64"


@keras.saving.register_keras_serializable("tests")
class Norm(layers.Layer):
    """x / |x|, of degree 0."""

    def call(self, x):
        return x / ops.sqrt(ops.sum(x * x, -1, keepdims=True))


@keras.saving.register_keras_serializable("tests")
class Energy(layers.Layer):
    """|x|^2, of degree 2."""

    def call(self, x):
        return ops.sum(x * x, -1, keepdims=True)


def dense(**arguments):
    start = keras.initializers.RandomNormal(seed=0)
    return layers.Dense(
        4,
        "relu",
        kernel_initializer=start,
        bias_initializer=start,
        **arguments,
    )


KINDS = {0: Norm, 1: dense, 2: Energy}


def numbers(scale=1.0):
    x = np.random.default_rng(0).normal(size=(8, 16))
    return (scale * x).astype("float32")


def values(layer, x):
    return ops.convert_to_numpy(layer(x)).astype("float64")


@pytest.mark.parametrize("bits", [-9, 5])
@pytest.mark.parametrize("degree", KINDS)
def test_powers_of_two_are_exact(degree, bits):
    x = ops.convert_to_tensor(numbers(), WIDE)
    own = KINDS[degree](dtype=WIDE)
    policy = RescaledPolicy(bits, -degree * bits, source_name=WIDE)
    rescaled = KINDS[degree](dtype=policy)
    known = values(own, x)
    assert np.any(known)
    np.testing.assert_array_equal(values(rescaled, x), known)


@pytest.mark.parametrize("degree", KINDS)
def test_gradients_are_exact(degree):
    found = []
    for policy in (WIDE, RescaledPolicy(-9, 9 * degree, source_name=WIDE)):
        inputs = keras.Input((16,), dtype=WIDE)
        x = layers.Dense(16, dtype=WIDE, kernel_initializer="identity")(inputs)
        y = layers.Flatten(dtype=WIDE)(KINDS[degree](dtype=policy)(x))
        model = keras.Model(inputs, y)
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        y = np.ones((8, *y.shape[1:]))
        model.fit(numbers(), y, shuffle=False, verbose=0)
        found.append(model.get_weights())
    for own, rescaled in zip(*found, strict=True):
        np.testing.assert_array_equal(rescaled, own)


def test_float16_has_the_range_then():
    x = numbers(400.0)
    known = x / np.sqrt(np.square(x, dtype="float64").sum(-1, keepdims=True))
    assert np.abs(values(Norm(dtype="mixed_float16"), x)).max() < 0.01
    found = values(Norm(dtype=RescaledPolicy(-6)), x)
    np.testing.assert_allclose(found, known, rtol=2e-3)


def test_what_does_not_fit_is_returned_in_float32():
    layer = Energy(dtype=RescaledPolicy(-6, 12, wide_outputs=True))
    x = numbers(400.0)
    known = np.square(x, dtype="float64").sum(-1, keepdims=True)
    assert known.max() > 65504
    np.testing.assert_allclose(values(layer, x), known, rtol=2e-3)
    assert keras.backend.standardize_dtype(layer(x).dtype) == "float32"


def test_inputs_beyond_the_format_are_scaled_before_they_are_cast():
    x = ops.convert_to_tensor(numbers(1e6))
    found = values(Norm(dtype=RescaledPolicy(-15)), x)
    np.testing.assert_allclose(np.square(found).sum(-1), 1, rtol=4e-3)


def test_masks_and_integers_pass_through():
    x = layers.Embedding(5, 4, mask_zero=True)(np.array([[1, 2, 0]]))
    pooled = layers.GlobalAveragePooling1D
    known = values(pooled(), x)
    found = values(pooled(dtype=RescaledPolicy(-4, 4)), x)
    np.testing.assert_allclose(found, known, rtol=2e-3, atol=1e-4)
    chosen = layers.Embedding(5, 4, dtype=RescaledPolicy(-4))
    assert values(chosen, np.array([[4]])).shape == (1, 1, 4)


@keras.saving.register_keras_serializable("tests")
def model():
    inputs = keras.Input((16,))
    x = layers.UnitNormalization(dtype=RescaledPolicy(-6))(inputs)
    x = layers.Dense(4, dtype=RescaledPolicy(-6, 6, True))(x)
    return keras.Model(inputs, x)


COPIES = {
    "clone": keras.models.clone_model,
    "copy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_keep_it(name):
    own = model()
    other = COPIES[name](own)
    other.set_weights(own.get_weights())
    assert dict(PrecisionPlan.from_model(other)) == {
        "unit_normalization": "rescaled(-6,0)_from_mixed_float16",
        "dense": "rescaled(-6,6,float32)_from_mixed_float16",
    }
    x = numbers(400.0)
    np.testing.assert_array_equal(values(other, x), values(own, x))


LOAD = """
import sys
import keras
{extra}
import numpy as np
assert keras.Operation.__call__.__module__ == "keras.src.ops.operation"
model = keras.saving.load_model(sys.argv[1])
print(keras.ops.convert_to_numpy(model(np.full((1, 16), 400.0))).tolist())
"""


def test_a_new_process_loads_it(tmp_path):
    """In which no layer is called in another way before that."""
    own, path = model(), tmp_path / "model.keras"
    own.save(path)
    result = run(path, LOAD.format(extra="import keras_mixprec"))
    assert result.returncode == 0, result.stderr[-3000:]
    known = values(own, np.full((1, 16), 400.0))
    assert eval(result.stdout) == known.tolist()


def test_a_plan_keeps_it(tmp_path):
    PrecisionPlan.from_model(model()).save(tmp_path / "plan.json")
    other = keras.models.clone_model(model())
    for layer in other.layers:
        layer.dtype_policy = "float32"
    assert set(PrecisionPlan.from_model(other).values()) == {"float32"}
    PrecisionPlan.load(tmp_path / "plan.json").apply(other)
    own = PrecisionPlan.from_model(model())
    assert own.diff(PrecisionPlan.from_model(other)) == []


@pytest.mark.parametrize("bits", [(-30, 30), (0, 0), (7, -7)])
@pytest.mark.parametrize("wide", [True, False])
def test_workers_agree_by_number(bits, wide):
    policy = RescaledPolicy(*bits, wide)
    assert policy.number < 2**14
    again = RescaledPolicy.from_number(policy.number, "mixed_float16")
    assert again == policy != RescaledPolicy(*bits, not wide)
    assert RescaledPolicy.from_name(policy.name) == policy


WRONG = {
    "too far": (lambda: RescaledPolicy(-31), ValueError, "input_bits=-31"),
    "no integer": (lambda: RescaledPolicy(0.5), TypeError, "input_bits=0.5"),
    "no such": (
        lambda: RescaledPolicy(1, source_name="float15"),
        ValueError,
        "float15",
    ),
    "in a plan": (
        lambda: PrecisionPlan({"a": "rescaled(31,0)_from_mixed_float16"}),
        ValueError,
        "does not know",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    call, error, match = WRONG[name]
    with pytest.raises(error, match=match):
        call()
