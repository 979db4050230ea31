"""Sparse gradients: repeated rows, embeddings, and variables without any."""

import keras
import numpy as np
import pytest
from optimizer_models import (
    BACKEND,
    each_mode,
    make_apply,
    make_variables,
    numbers,
    only_tensorflow,
)

from keras_mixprec import LossScaleOptimizer

ROWS = 4


def slices(values, indices):
    import tensorflow as tf

    return tf.IndexedSlices(
        tf.constant(values, tf.float32),
        tf.constant(indices),
        tf.constant([ROWS, 1]),
    )


def make(mode, inner=None, **arguments):
    variables = make_variables((ROWS, 1), (2,))
    inner = inner or keras.optimizers.SGD(1.0)
    optimizer = LossScaleOptimizer(inner, **arguments)
    return optimizer, variables, make_apply(optimizer, variables, mode)


@only_tensorflow
@each_mode
@pytest.mark.parametrize(
    ("inner", "bad"),
    [("SGD", np.inf), ("SGD", np.nan), ("Adam", -np.inf), ("Lion", np.nan)],
)
def test_a_repeated_index_hides_no_overflow(inner, bad, mode):
    kind = getattr(keras.optimizers, inner)
    optimizer, variables, apply = make(mode, kind(0.1))
    for rows in ([bad], [1.0]), ([1.0], [bad]):
        apply([slices(rows, [0, 0]), np.ones(2, "float32")])
    assert optimizer.skipped_steps == 2
    np.testing.assert_array_equal(numbers(variables)[0], np.ones((ROWS, 1)))
    assert list(optimizer.overflow_counts().values()) == [2, 0]


@only_tensorflow
@each_mode
def test_a_sum_of_repeated_rows_that_overflows_is_skipped(mode):
    optimizer, variables, apply = make(mode, loss_scale=1.0)
    apply([slices([[3e38], [3e38]], [0, 0]), np.ones(2, "float32")])
    assert optimizer.last_step_skipped
    np.testing.assert_array_equal(numbers(variables)[0], np.ones((ROWS, 1)))


@only_tensorflow
@each_mode
def test_finite_repeated_rows_are_added_up(mode):
    optimizer, variables, apply = make(mode, loss_scale=4.0)
    apply([slices([[4.0], [8.0], [2.0]], [1, 1, 3]), np.zeros(2, "float32")])
    values = numbers(variables)[0][:, 0]
    np.testing.assert_array_equal(values, [1, -2, 1, 0.5])
    norm = list(optimizer.gradient_norms().values())[0]
    np.testing.assert_allclose(norm, np.sqrt(1 + 4 + 0.25), rtol=1e-6)


@only_tensorflow
@each_mode
@pytest.mark.parametrize("value", [100.0, 3e4, 6e4])
def test_rows_of_a_float16_table(value, mode):
    """Two rows of 6e4 fit float16, but not their sum."""
    variables = make_variables((ROWS, 1), dtype="float16", value=0.0)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), 1.0)
    apply = make_apply(optimizer, variables, mode)
    apply([slices([[value], [value]], [1, 2])])
    apply([slices([[value], [value]], [0, 0])])
    fits = 2 * value < 65504
    assert optimizer.last_step_skipped is not fits
    assert np.isfinite(numbers(variables)[0]).all()


@only_tensorflow
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@each_mode
def test_none_beside_a_sparse_gradient(mode):
    optimizer, variables, apply = make(mode, loss_scale=2.0)
    apply([slices([[2.0]], [2]), None])
    assert not optimizer.last_step_skipped
    apply([slices([[np.inf]], [2]), None])
    assert optimizer.last_step_skipped
    np.testing.assert_array_equal(numbers(variables)[0][:, 0], [1, 1, 0, 1])
    np.testing.assert_array_equal(numbers(variables)[1], [1, 1])


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@each_mode
@pytest.mark.parametrize("value", [1.0, np.nan])
def test_none_beside_a_dense_gradient(value, mode):
    optimizer, variables, apply = make(mode, loss_scale=2.0)
    apply([None, np.full(2, value, "float32")])
    assert optimizer.last_step_skipped == np.isnan(value)
    expected = 1.0 if np.isnan(value) else 0.5
    np.testing.assert_array_equal(numbers(variables)[1], [expected] * 2)
    np.testing.assert_array_equal(numbers(variables)[0], np.ones((ROWS, 1)))


@pytest.mark.parametrize(
    "xla", [False, True] if BACKEND != "torch" else [False]
)
def test_an_embedding_model_through_fit(xla):
    tokens = np.array([[0, 0, 1], [2, 2, 2], [3, 0, 1]] * 4)
    targets = np.zeros((12, 1), "float32")
    model = keras.Sequential(
        [
            keras.layers.Embedding(ROWS, 2),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), 1024.0)
    model.compile(optimizer, loss="mse", jit_compile=xla)
    model.fit(tokens, targets, batch_size=5, verbose=0)
    assert (optimizer.attempted_steps, optimizer.skipped_steps) == (3, 0)
    before = numbers(model.weights)
    model.fit(tokens, targets * np.nan, batch_size=5, verbose=0)
    assert optimizer.skipped_steps == 3
    for a, b in zip(numbers(model.weights), before, strict=True):
        np.testing.assert_array_equal(a, b)
