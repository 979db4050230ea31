"""What counts as non-finite: what the update could not hold, and no more."""

import keras
import numpy as np
import pytest
from keras import ops
from optimizer_models import each_mode, make_apply, make_variables, numbers

from keras_mixprec import DynamicLossScale, LossScaleOptimizer

MAXIMUM = float(np.finfo("float32").max)


def step_once(gradient, mode, *, scale=1.0, dtype="float32", as_dtype=None):
    """Returns whether a step was taken, the new values, and the optimizer."""
    gradient = np.asarray(gradient, as_dtype or "float32")
    variables = make_variables(gradient.shape, dtype=dtype, value=0.0)
    rule = DynamicLossScale(scale, min_scale=None, max_scale=None)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), rule)
    make_apply(optimizer, variables, mode)([gradient])
    return not optimizer.last_step_skipped, numbers(variables)[0], optimizer


@each_mode
@pytest.mark.parametrize(
    ("gradient", "scale"),
    [
        ([1e35], 2.0**-20),
        ([1.0, np.inf], 1.0),
        ([np.nan, 1.0], 1.0),
        ([-np.inf, np.inf], 2.0**10),
        ([1.0, np.nan], 2.0**-126),
        ([10.0], 2.0**-126),
        (np.full(100, 1e38), 1.0),
    ],
    ids=[
        "overflows when unscaled",
        "inf",
        "nan",
        "both infinities",
        "nan at the smallest scale",
        "overflows at the smallest scale",
        "norm overflows",
    ],
)
def test_is_skipped(gradient, scale, mode):
    taken, values, _ = step_once(gradient, mode, scale=scale)
    assert not taken
    assert not values.any()


@each_mode
@pytest.mark.parametrize(
    ("gradient", "scale"),
    [
        ([1e25, 3e25], 1.0),
        ([1e38, 1e38], 1.0),
        (np.full(1000, 1e36), 1.0),
        ([1e38], 2.0**100),
        ([1e-30, 0.0], 2.0**-60),
        ([1e-40, 3.0], 1.0),
    ],
    ids=[
        "1e25",
        "1e38",
        "a thousand 1e36",
        "large scale",
        "small",
        "subnormal",
    ],
)
def test_is_applied(gradient, scale, mode):
    taken, values, optimizer = step_once(gradient, mode, scale=scale)
    true = np.asarray(gradient, "float64") / scale
    assert taken
    np.testing.assert_allclose(values, -true, rtol=1e-6, atol=1e-38)
    if max(gradient) > 1e-15:  # Below, squares vanish, and norms with them.
        (norm,) = optimizer.gradient_norms().values()
        np.testing.assert_allclose(norm, np.linalg.norm(true), rtol=1e-6)


@each_mode
@pytest.mark.parametrize(
    ("dtype", "gradient", "taken"),
    [
        ("float16", [65504.0, 0.0], True),
        ("float16", [7e4, 1.0], False),
        ("float16", [np.nan, 1.0], False),
        ("float16", [1.0, np.inf], False),
        ("float16", np.full(10_000, 1000.0), True),
        ("float16", np.full(10_000, -7e4), False),
        ("bfloat16", [1e30, 1.0], True),
        ("bfloat16", [np.nan, 1.0], False),
        ("float64", [1e30, 1.0], True),
        ("float64", [1.0, -np.inf], False),
    ],
)
def test_variables_of_other_dtypes(dtype, gradient, taken, mode):
    if dtype == "float64" and keras.backend.backend() == "jax":
        pytest.skip("JAX has no float64 unless asked for")
    was_taken, values, _ = step_once(gradient, mode, dtype=dtype)
    assert was_taken is taken
    if not taken:
        gradient = np.zeros_like(gradient)
    expected = np.asarray(gradient, "float32").astype(values.dtype)
    np.testing.assert_array_equal(values, -expected)


@each_mode
@pytest.mark.parametrize("value", [3.0, 6e-8, np.inf])
def test_float16_gradients_are_unscaled_in_float32(value, mode):
    taken, values, _ = step_once(
        [value], mode, scale=2.0**15, as_dtype="float16"
    )
    assert taken == np.isfinite(value)
    if taken:
        expected = np.float32(np.float16(value)) / 2.0**15
        np.testing.assert_array_equal(values, [-expected])


@each_mode
def test_float64_keeps_its_digits(mode):
    if keras.backend.backend() == "jax":
        pytest.skip("JAX has no float64 unless asked for")
    third = np.float64(1) / 3
    _, values, _ = step_once([third], mode, dtype="float64", as_dtype="float64")
    np.testing.assert_array_equal(values, [-third])


def test_a_float16_loss_is_scaled_in_float32():
    optimizer = LossScaleOptimizer("sgd")
    loss = ops.cast(3.0, "float16")
    for _ in range(2):
        scaled = optimizer.scale_loss(loss)
        assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
        assert float(scaled) == 98304.0
        optimizer.build(make_variables((1,)))
