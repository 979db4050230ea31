"""Several optimizers: skipping together with one scale, or each on its own."""

import keras
import numpy as np
import pytest
from optimizer_models import (
    MODES,
    as_tensor,
    each_mode,
    make_apply,
    make_variables,
    numbers,
    only_jax,
)

from keras_mixprec import LossScaleOptimizer

GOOD = np.full(2, 8.0, "float32")
BAD = np.array([1, np.inf], "float32")


def make_pair():
    pairs = []
    for _ in range(2):
        optimizer = LossScaleOptimizer(
            keras.optimizers.SGD(1.0), initial_scale=8.0
        )
        variables = make_variables((2,))
        optimizer.build(variables)
        pairs.append((optimizer, variables))
    return pairs


def apply_together(pairs, gradients, mode):
    if mode == "jit":
        return jitted_together(pairs, gradients)
    steps = [
        (optimizer, [gradient], variables)
        for (optimizer, variables), gradient in zip(
            pairs, map(as_tensor, gradients), strict=True
        )
    ]
    if mode == "eager":
        return LossScaleOptimizer.apply_together(*steps)
    import tensorflow as tf

    together = tf.function(
        lambda: LossScaleOptimizer.apply_together(*steps),
        jit_compile=mode == "xla",
    )
    return together()


def jitted_together(pairs, gradients):
    import jax

    optimizers = [optimizer for optimizer, _ in pairs]

    @jax.jit
    def step(owns, gradients, weights):
        return LossScaleOptimizer.stateless_apply_together(
            *zip(optimizers, owns, gradients, weights, strict=True)
        )

    new = step(
        [[v.value for v in o.variables] for o in optimizers],
        [[g] for g in gradients],
        [[v.value for v in variables] for _, variables in pairs],
    )
    for (optimizer, variables), (weights, own) in zip(pairs, new, strict=True):
        for variable, value in zip(variables, weights, strict=True):
            variable.assign(value)
        for variable, value in zip(optimizer.variables, own, strict=True):
            variable.assign(value)


@each_mode
@pytest.mark.parametrize("bad", [(0,), (1,), (0, 1)])
def test_one_overflow_skips_all(bad, mode):
    pairs = make_pair()
    gradients = [BAD if i in bad else GOOD for i in range(2)]
    apply_together(pairs, gradients, mode)
    for index, (optimizer, variables) in enumerate(pairs):
        np.testing.assert_array_equal(numbers(variables)[0], [1, 1])
        assert optimizer.skipped_steps == 1
        assert float(optimizer.loss_scale) == 4.0
        (step,) = optimizer.nonfinite_steps()
        assert bool(step.variables) is (index in bad)


@each_mode
def test_good_gradients_update_all(mode):
    pairs = make_pair()
    apply_together(pairs, [GOOD, GOOD * 2], mode)
    values = [numbers(variables)[0][0] for _, variables in pairs]
    assert values == [0, -1]
    assert [int(o.iterations) for o, _ in pairs] == [1, 1]


@pytest.mark.parametrize("mode", MODES[-1:])
def test_equal_rules_keep_equal_scales(mode):
    pairs = make_pair()
    for bad in (0, 1, None, 1, 0):
        gradients = [BAD if i == bad else GOOD for i in range(2)]
        apply_together(pairs, gradients, mode)
        first, second = (float(o.loss_scale) for o, _ in pairs)
        assert first == second
    assert first == 0.5


@each_mode
def test_applied_apart_each_has_its_own_scale(mode):
    pairs = make_pair()
    for (optimizer, variables), gradient in zip(
        pairs, (BAD, GOOD), strict=True
    ):
        make_apply(optimizer, variables, mode)([gradient])
    assert [float(o.loss_scale) for o, _ in pairs] == [4.0, 8.0]
    assert [o.skipped_steps for o, _ in pairs] == [1, 0]


@only_jax
def test_the_stateless_form_takes_values_without_jit():
    (optimizer, variables), _ = make_pair()
    own = [v.value for v in optimizer.variables]
    weights = [v.value for v in variables]
    steps = (optimizer, own, [as_tensor(GOOD)], weights)
    (result,) = LossScaleOptimizer.stateless_apply_together(steps)
    new_weights, new_own = result
    assert keras.ops.convert_to_numpy(new_weights[0]).tolist() == [0, 0]
    assert len(new_own) == len(own)
    np.testing.assert_array_equal(numbers(variables)[0], [1, 1])
