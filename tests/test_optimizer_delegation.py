"""What reaches through the wrapper, and `compile` that wraps but once."""

import keras
import numpy as np
import pytest
from optimizer_models import (
    COMPILED,
    each_mode,
    make_apply,
    make_variables,
    numbers,
)

from keras_mixprec import LossScaleOptimizer

ARGUMENTS = {
    "weight_decay": (0.1, 0.2),
    "clipnorm": (1.0, 2.0),
    "clipvalue": (1.0, 2.0),
    "global_clipnorm": (1.0, 2.0),
    "use_ema": (True, False),
    "ema_momentum": (0.5, 0.25),
    "ema_overwrite_frequency": (2, 3),
    "gradient_accumulation_steps": (2, 4),
    "beta_1": (0.5, 0.75),
    "epsilon": (1e-4, 1e-5),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_attribute_reads_and_writes_the_inner_one(name):
    first, second = ARGUMENTS[name]
    inner = keras.optimizers.Adam(**{name: first})
    optimizer = LossScaleOptimizer(inner)
    assert getattr(optimizer, name) == first
    setattr(optimizer, name, second)
    assert getattr(inner, name) == second
    assert getattr(optimizer, name) == second


def test_what_neither_has_is_missing():
    optimizer = LossScaleOptimizer("sgd")
    with pytest.raises(AttributeError, match="beta_1"):
        _ = optimizer.beta_1
    assert not hasattr(optimizer, "_no_such_thing")
    optimizer.note = "mine"
    assert optimizer.note == "mine"
    assert not hasattr(optimizer.inner_optimizer, "note")


def test_the_learning_rate_is_the_inner_one():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5))
    optimizer.learning_rate = 0.25
    assert float(optimizer.inner_optimizer.learning_rate) == 0.25
    assert float(optimizer.learning_rate) == 0.25


@each_mode
def test_excluded_from_weight_decay_takes_effect(mode):
    variables = make_variables((2,), (2,))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5, weight_decay=0.5))
    optimizer.exclude_from_weight_decay(var_list=[variables[0]])
    zeros = np.zeros(2, "float32")
    make_apply(optimizer, variables, mode)([zeros, zeros])
    first, second = numbers(variables)
    np.testing.assert_array_equal(first, [1, 1])
    np.testing.assert_array_equal(second, [0.75, 0.75])


def test_finalize_writes_the_averages_into_the_weights():
    variables = make_variables((1,))
    inner = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
    optimizer = LossScaleOptimizer(inner, 1.0)
    apply = make_apply(optimizer, variables, "eager")
    for _ in range(2):
        apply([np.ones(1, "float32")])
    optimizer.finalize_variable_values(variables)
    np.testing.assert_array_equal(numbers(variables)[0], [-0.5])


def test_apply_gradients_returns_iterations():
    variables = make_variables((1,))
    optimizer = LossScaleOptimizer("sgd")
    told = []
    for value in (1.0, np.nan, 1.0):
        gradient = keras.ops.convert_to_tensor([value])
        told.append(int(optimizer.apply_gradients([(gradient, variables[0])])))
    assert told == [1, 1, 2]
    assert optimizer.attempted_steps == 3


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_compile_does_not_wrap_again(policy):
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1)], name="model"
    )
    model.dtype_policy = policy
    optimizer = LossScaleOptimizer("sgd")
    model.compile(optimizer, loss="mse")
    assert model.optimizer is optimizer
    assert type(optimizer.inner_optimizer) is not LossScaleOptimizer


def test_the_optimizer_lists_its_own_and_the_inner_variables_once():
    variables = make_variables((2,))
    optimizer = LossScaleOptimizer("adam")
    optimizer.build(variables)
    listed = [id(v) for v in optimizer.variables]
    assert len(set(listed)) == len(listed)
    assert {id(v) for v in optimizer.inner_optimizer.variables} < set(listed)
    assert id(variables[0]) not in listed


@pytest.mark.parametrize("mode", COMPILED or ["eager"])
def test_the_learning_rate_can_change_between_compiled_steps(mode):
    variables = make_variables((1,))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), 1.0)
    apply = make_apply(optimizer, variables, mode)
    apply([np.ones(1, "float32")])
    optimizer.learning_rate = 0.5
    apply([np.ones(1, "float32")])
    np.testing.assert_array_equal(numbers(variables)[0], [-0.5])
