"""Variables that take their gradient as their value, as in float8 training."""

import keras
import numpy as np
from optimizer_models import each_mode, make_apply, make_variables, numbers

from keras_mixprec import LossScaleOptimizer


def make(mode, scale):
    variables = make_variables((2,), (3,))
    variables[1].overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), scale)
    return optimizer, variables, make_apply(optimizer, variables, mode)


def arrays(*rows):
    return [np.array(row, "float32") for row in rows]


@each_mode
def test_the_value_is_written_as_it_is(mode):
    optimizer, variables, apply = make(mode, 8.0)
    apply(arrays([8, 16], [5, 6, 7]))
    np.testing.assert_array_equal(numbers(variables)[0], [0, -1])
    np.testing.assert_array_equal(numbers(variables)[1], [5, 6, 7])
    norms = list(optimizer.gradient_norms().values())
    np.testing.assert_allclose(norms, [5**0.5, 110**0.5], rtol=1e-6)


@each_mode
def test_it_stays_on_a_bad_step(mode):
    optimizer, variables, apply = make(mode, 8.0)
    apply(arrays([np.inf, 1], [5, 6, 7]))
    apply(arrays([1, 1], [np.nan, 6, 7]))
    assert optimizer.skipped_steps == 2
    np.testing.assert_array_equal(numbers(variables)[1], [1, 1, 1])


@each_mode
def test_a_small_scale_makes_no_overflow_of_it(mode):
    optimizer, variables, apply = make(mode, 2.0**-20)
    apply(arrays([0, 0], [1e35, 1, 1]))
    assert not optimizer.last_step_skipped
    np.testing.assert_array_equal(
        numbers(variables)[1], arrays([1e35, 1, 1])[0]
    )
