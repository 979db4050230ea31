"""Which gradients are applied, for every size, dtype, shape and sparsity."""

import keras
import numpy as np
import pytest
from keras import ops
from monitor_models import only_tensorflow
from optimizer_models import (
    BACKEND,
    each_mode,
    make_apply,
    make_variables,
    numbers,
    over_modes,
    stepper,
)

from keras_mixprec import DynamicLossScale, LossScaleOptimizer

sgd = keras.optimizers.SGD
INF, NAN = np.inf, np.nan
SCALE = 2.0**15

# Gradient, whether it is applied, and what is not as usual.
SIZES = {
    "overflows when unscaled": ([1e35], False, {"scale": 2.0**-20}),
    "inf": ([1.0, INF], False, {}),
    "nan": ([NAN, 1.0], False, {}),
    "both infinities": ([-INF, INF], False, {"scale": 2.0**10}),
    "norm overflows": (np.full(100, 1e38), False, {}),
    "1e38": ([1e38, 1e38], True, {}),
    "large scale": ([1e38], True, {"scale": 2.0**100}),
    "small": ([1e-30, 0.0], True, {"scale": 2.0**-60}),
    "subnormal": ([1e-40, 3.0], True, {}),
    "float16 beyond": ([7e4, 1.0], False, {"dtype": "float16"}),
    "float16 norm": (np.full(10**4, 1e3), True, {"dtype": "float16"}),
    "bfloat16": ([1e30, 1.0], True, {"dtype": "bfloat16"}),
    "float64 inf": ([1.0, -INF], False, {"dtype": "float64"}),
    "float64 digits": ([1 / 3], True, {"dtype": "float64", "of": "float64"}),
    # Unscaled in float32.
    "of float16, small": ([6e-8], True, {"scale": SCALE, "of": "float16"}),
    "of float16, inf": ([INF], False, {"scale": SCALE, "of": "float16"}),
}
if BACKEND == "jax":  # It has no float64 unless asked for.
    SIZES = {k: v for k, v in SIZES.items() if "float64" not in k}


@pytest.mark.long
@over_modes("gradient,is_applied,unusual", SIZES, quick=9)
def test_what_the_update_can_hold_is_applied(
    gradient, is_applied, unusual, mode
):
    scale, dtype = unusual.get("scale", 1.0), unusual.get("dtype", "float32")
    gradient = np.asarray(gradient).astype(unusual.get("of", "float32"))
    rule = DynamicLossScale(scale, min_scale=None, max_scale=None)
    optimizer, variables, apply = stepper(
        mode,
        gradient.shape,
        inner=sgd(1.0),
        loss_scale=rule,
        dtype=dtype,
        value=0.0,
    )
    apply([gradient])
    (values,) = numbers(variables)
    assert optimizer.last_step_skipped is not is_applied
    if not is_applied:
        assert not values.any()
        (step,) = optimizer.nonfinite_steps()
        kinds = {"inf": np.isposinf, "-inf": np.isneginf, "nan": np.isnan}
        held = [kind for kind, test in kinds.items() if test(gradient).any()]
        assert step.kinds == {variables[0].path: held}
        return
    true = gradient.astype("float64") / scale
    expected = -true.astype(values.dtype)
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-38)
    if max(gradient) > 1e-15:  # Below, squares vanish, and norms with them.
        (norm,) = optimizer.gradient_norms().values()
        rtol = 1e-6 if true.size <= 1000 else 1e-5
        np.testing.assert_allclose(norm, np.linalg.norm(true), rtol=rtol)


@pytest.mark.one_backend
def test_a_float16_loss_is_scaled_in_float32():
    optimizer = LossScaleOptimizer("sgd")
    loss = ops.cast(3.0, "float16")
    for _ in range(2):
        scaled = optimizer.scale_loss(loss)
        assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
        assert float(scaled) == 98304.0
        optimizer.build(make_variables((1,)))


def arrays(*rows):
    return [np.array(row, "float32") for row in rows]


def random_gradients(*shapes):
    rng = np.random.default_rng(0)
    return [
        np.asarray(
            rng.normal(size=s) * SCALE * 10.0 ** rng.integers(-3, 3)
        ).astype("float32")
        for s in shapes
    ]


# 2**16 elements and fewer are stacked by shape, larger ones are not.
UNEQUAL = (3, 4), (4,), (), (4, 3), (2, 1, 3), (1,)
NEAR_THE_LIMIT = (256, 256), (65537,), (256, 256), (300, 300), (7,)
LARGE = (70_001,), (2**17,), (3 * 2**15, 2), (70_001,)
GRADIENTS = {
    "unequal": random_gradients(*UNEQUAL),
    "near the limit": random_gradients(*NEAR_THE_LIMIT),
    "odd and large": random_gradients(*LARGE),
    "empty": random_gradients((0, 3), (2, 2)),
    "one huge": arrays([1e30, 0], [3, 4], [2e30, 1, 0]),
}


def norms_of(gradients):
    return [np.linalg.norm(g.astype("float64")) / SCALE for g in gradients]


def assert_norms(optimizer, expected):
    norms = list(optimizer.gradient_norms().values())
    np.testing.assert_allclose(norms, expected, rtol=2e-6)


@over_modes("gradients", {k: (v,) for k, v in GRADIENTS.items()})
def test_norms(gradients, mode):
    optimizer, _, apply = stepper(mode, *(g.shape for g in gradients))
    apply(gradients)
    assert_norms(optimizer, norms_of(gradients))


@pytest.mark.long
@each_mode
def test_order_and_subsets_of_variables(mode):
    gradients, chosen = GRADIENTS["unequal"], [4, 0, 2]
    variables = make_variables(*UNEQUAL)
    optimizer = LossScaleOptimizer("sgd")
    optimizer.build(variables)
    mode = "eager" if BACKEND == "jax" else mode
    apply = make_apply(optimizer, [variables[i] for i in chosen], mode)
    apply([gradients[i] for i in chosen])
    true = norms_of(gradients)
    assert_norms(optimizer, [true[i] if i in chosen else 0 for i in range(6)])
    apply([gradients[4], np.full((3, 4), NAN, "float32"), gradients[2]])
    assert list(optimizer.overflow_counts().values()) == [1, 0, 0, 0, 0, 0]


@each_mode
def test_a_variable_that_takes_its_gradient_as_its_value(mode):
    """As in float8 training: it is not unscaled."""
    variables = make_variables((2,), (3,))
    variables[1].overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(sgd(1.0), initial_scale=8.0)
    apply = make_apply(optimizer, variables, mode)
    apply(arrays([INF, 1], [5, 6, 7]))
    apply(arrays([1, 1], [NAN, 6, 7]))
    assert optimizer.skipped_steps == 2
    np.testing.assert_array_equal(numbers(variables)[1], [1, 1, 1])
    optimizer.set_loss_scale(8.0)
    apply(arrays([8, 16], [5, 6, 7]))
    np.testing.assert_array_equal(numbers(variables)[0], [0, -1])
    np.testing.assert_array_equal(numbers(variables)[1], [5, 6, 7])
    assert_norms(optimizer, [5**0.5, 110**0.5])
    optimizer.set_loss_scale(2.0**-20)
    (large,) = arrays([1e35, 1, 1])
    apply([np.zeros(2, "float32"), large])
    assert not optimizer.last_step_skipped
    np.testing.assert_array_equal(numbers(variables)[1], large)


ROWS = 4
TWO = np.ones(2, "float32")


def slices(values, indices):
    import tensorflow as tf

    rows = tf.constant([[value] for value in values], tf.float32)
    return tf.IndexedSlices(rows, tf.constant(indices), tf.constant([ROWS, 1]))


@only_tensorflow
@each_mode
def test_repeated_rows_of_a_sparse_gradient(mode):
    optimizer, (table, _), apply = stepper(
        mode, (ROWS, 1), (2,), inner=sgd(1.0), loss_scale=4.0
    )
    apply([slices([4.0, 8.0, 2.0], [1, 1, 3]), 0 * TWO])
    expected = [1, -2, 1, 0.5]
    np.testing.assert_array_equal(numbers([table])[0][:, 0], expected)
    norm = list(optimizer.gradient_norms().values())[0]
    np.testing.assert_allclose(norm, np.sqrt(1 + 4 + 0.25), rtol=1e-6)
    # Added up by index some of them would be NaN, or not finite at all.
    optimizer.set_loss_scale(1.0)
    for rows in (
        [INF, -INF, 1.0],
        [INF, 1.0, 1.0],
        [1.0, NAN, 1.0],
        [3e38, 3e38, 1.0],
    ):
        apply([slices(rows, [0, 0, 2]), TWO])
    assert optimizer.skipped_steps == 4
    np.testing.assert_array_equal(numbers([table])[0][:, 0], expected)
    assert list(optimizer.overflow_counts().values()) == [4, 0]
    kinds = [s.kinds[table.path] for s in optimizer.nonfinite_steps()]
    assert kinds == [["inf", "-inf"], ["inf"], ["nan"], []]
    assert optimizer.nonfinite_counts() == {"inf": 2, "-inf": 1, "nan": 1}


@pytest.mark.filterwarnings("ignore:Gradients do not")
@each_mode
@pytest.mark.parametrize(
    "sparse", [False, pytest.param(True, marks=only_tensorflow)]
)
def test_none_beside_a_gradient(sparse, mode):
    optimizer, variables, apply = stepper(
        mode, (ROWS, 1), (2,), (2,), inner=sgd(1.0), loss_scale=2.0
    )

    def gradients(value):
        rows = slices([value], [2]) if sparse else None
        return [rows, None, value * TWO]

    apply(gradients(1.0))
    assert not optimizer.last_step_skipped
    apply(gradients(-INF))
    given = [0, 2] if sparse else [2]
    (step,) = optimizer.nonfinite_steps()
    assert step.kinds == {variables[i].path: ["-inf"] for i in given}
    table, without, dense = numbers(variables)
    row = 0.5 if sparse else 1.0
    np.testing.assert_array_equal(table[:, 0], [1, 1, row, 1])
    np.testing.assert_array_equal(without, [1, 1])
    np.testing.assert_array_equal(dense, [0.5, 0.5])
