"""Infinities of either sign and NaN in gradients are recorded apart."""

import h5py
import keras
import numpy as np
import pytest
from optimizer_models import (
    each_mode,
    make_apply,
    make_variables,
    only_tensorflow,
)

from keras_mixprec import LossScaleOptimizer

TESTS = {"inf": np.isposinf, "-inf": np.isneginf, "nan": np.isnan}
INF, NAN = np.inf, np.nan


def make(mode, *shapes, dtype="float32", **arguments):
    variables = make_variables(*shapes, dtype=dtype)
    optimizer = LossScaleOptimizer("sgd", **arguments)
    return optimizer, variables, make_apply(optimizer, variables, mode)


def kinds_of(array):
    """By NumPy."""
    return [kind for kind, test in TESTS.items() if test(array).any()]


def expected(variables, gradients):
    bad = [
        (v, g)
        for v, g in zip(variables, gradients, strict=True)
        if not np.isfinite(g).all()
    ]
    return {v.path: kinds_of(g) for v, g in bad}


def total(steps):
    return {k: sum(k in sum(s.values(), []) for s in steps) for k in TESTS}


@each_mode
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_kinds_are_those_that_numpy_finds(dtype, mode):
    shapes = (3, 2), (), (2,), (3, 2), (1, 2, 2, 3), ()
    optimizer, variables, apply = make(mode, *shapes, dtype=dtype)
    rng, steps = np.random.default_rng(0), []
    for _ in range(12):
        gradients = [np.ones(s, dtype) for s in shapes]
        for index in rng.integers(0, 6, rng.integers(0, 4)):
            place = tuple(rng.integers(0, n) for n in shapes[index])
            gradients[index][place] = rng.choice([INF, -INF, NAN])
        apply(gradients)
        steps.append(expected(variables, gradients))
    bad = [step for step in steps if step]
    assert [s.kinds for s in optimizer.nonfinite_steps()] == bad
    assert optimizer.nonfinite_counts() == total(bad)
    assert {k for s in bad for kinds in s.values() for k in kinds} == {*TESTS}


@each_mode
def test_what_the_dtype_does_not_hold_is_of_no_kind(mode):
    optimizer, variables, apply = make(mode, (2,), dtype="float16")
    apply([np.array([1e9, 1], "float32")])
    optimizer.set_loss_scale(1.0)
    apply([np.array([1e9, 1], "float32")])
    last = optimizer.nonfinite_steps()[-1]
    assert last.kinds == {variables[0].path: []}
    assert not any(optimizer.nonfinite_counts().values())


def test_variables_without_a_gradient_are_left_out():
    optimizer, variables, _ = make("eager", (2,), (3,), (2,))
    gradient = keras.ops.convert_to_tensor(np.array([1, -INF], "float32"))
    optimizer.apply([None, None, gradient], variables)
    (step,) = optimizer.nonfinite_steps()
    assert step.kinds == {variables[2].path: ["-inf"]}


@only_tensorflow
@each_mode
def test_rows_of_sparse_gradients(mode):
    import tensorflow as tf

    optimizer, variables, apply = make(mode, (4, 1), (2,))
    # Added up by index the rows would be NaN.
    rows = tf.constant([[INF], [-INF], [1.0]])
    indices, shape = tf.constant([0, 0, 2]), tf.constant([4, 1])
    slices = tf.IndexedSlices(rows, indices, shape)
    apply([slices, np.ones(2, "float32")])
    (step,) = optimizer.nonfinite_steps()
    assert step.kinds == {variables[0].path: ["inf", "-inf"]}
    assert optimizer.nonfinite_counts() == {"inf": 1, "-inf": 1, "nan": 0}


@each_mode
def test_a_discarded_window_records_the_batch_that_failed(mode):
    inner = keras.optimizers.SGD(gradient_accumulation_steps=3)
    optimizer = LossScaleOptimizer(inner, discard_window=True)
    variables = make_variables((2,))
    apply = make_apply(optimizer, variables, mode)
    for value in (1, NAN, 1, 1, -INF, 1):
        apply([np.array([1, value], "float32")])
    kinds = [s.kinds for s in optimizer.nonfinite_steps()]
    assert kinds == [{variables[0].path: [kind]} for kind in ("nan", "-inf")]
    assert optimizer.nonfinite_counts() == {"inf": 0, "-inf": 1, "nan": 1}


def saved(tmp_path, *values):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer("sgd"), "mse")
    model.optimizer.build(model.trainable_variables)
    for value in values:
        gradients = [keras.ops.full(w.shape, value) for w in model.weights]
        model.optimizer.apply(gradients)
    path = str(tmp_path / f"{len(values)}.weights.h5")
    model.save_weights(path)
    return model, path


def test_a_file_keeps_them(tmp_path):
    model, path = saved(tmp_path, INF, NAN, -INF, NAN)
    other, empty = saved(tmp_path)
    other.load_weights(path)
    assert other.optimizer.nonfinite_counts() == {"inf": 1, "-inf": 1, "nan": 2}
    steps = [o.optimizer.nonfinite_steps() for o in (model, other)]
    assert [[*s.kinds.values()] for s in steps[0]] == (
        [[*s.kinds.values()] for s in steps[1]]
    )
    other.load_weights(empty)
    assert not any(other.optimizer.nonfinite_counts().values())


def test_a_file_from_before_they_were_recorded(tmp_path):
    _, path = saved(tmp_path, INF, NAN)
    other, _ = saved(tmp_path, NAN, NAN, NAN)
    with h5py.File(path, "r+") as file:
        history = file["optimizer/history"]
        history = history.get("vars", history)
        del history["nonfinite_counts"]
        history["recent_flags"][...] = np.minimum(history["recent_flags"], 1)
    other.load_weights(path)
    assert not any(other.optimizer.nonfinite_counts().values())
    steps = other.optimizer.nonfinite_steps()
    assert [len(s.variables) for s in steps] == [2, 2]
    assert [[*s.kinds.values()] for s in steps] == [[[], []], [[], []]]
