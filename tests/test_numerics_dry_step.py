"""Optimizers are held while a step is run dry."""

import keras
import numpy as np
from keras import ops
from optimizer_models import assert_identical, make_variables, numbers

import keras_mixprec as kmp
from keras_mixprec.numerics.dry_step import dry_step, held


def test_optimizers_that_skip_together_are_held():
    variables = make_variables((2,), (3,))
    before = numbers(variables)
    losses, gradients = [], {}
    steps = []
    for variable in variables:
        optimizer = kmp.LossScaleOptimizer(keras.optimizers.Adam())
        optimizer.build([variable])
        gradient = ops.ones(variable.shape)
        steps.append((optimizer, [gradient], [variable]))
    first, second = (step[0] for step in steps)
    with (
        held(first, 4.0, losses, gradients),
        held(second, 4.0, losses, gradients),
    ):
        assert float(first.scale_loss(ops.ones(()))) == 4.0
        kmp.LossScaleOptimizer.apply_together(*steps)
    assert_identical(numbers(variables), before)
    assert losses == [1.0]
    assert set(gradients) == {id(v) for v in variables}
    assert first.attempted_steps == 0
    kmp.LossScaleOptimizer.apply_together(*steps)
    assert first.attempted_steps == second.attempted_steps == 1


def test_a_dry_step_leaves_no_gradients_behind():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    model.steps_taken = keras.Variable(0, dtype="int32", trainable=False)
    x = ops.convert_to_tensor(np.ones((4, 2), "float32"))
    step = dry_step(model, (x, x[:, :1]), 2.0)
    assert len(step.gradients) == 2
    for variable in model.trainable_variables:
        assert getattr(variable.value, "grad", None) is None
