"""Optimizers that are copied, built or not."""

import copy
import pickle

import keras
import numpy as np
import pytest
from optimizer_models import numbers

import keras_mixprec as kmp

pytestmark = pytest.mark.parametrize(
    "make",
    [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))],
    ids=["deepcopy", "pickle"],
)


def test_unbuilt(make):
    twin = make(kmp.LossScaleOptimizer("adam", initial_scale=64.0))
    weight = keras.Variable([1.0])
    twin.build([weight])
    assert float(twin.loss_scale) == 64.0
    assert type(twin.inner_optimizer) is type(keras.optimizers.get("adam"))
    assert twin.skipped_steps == 0


def test_a_copy_of_a_copy_goes_on_where_the_first_was(make):
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(1.0, momentum=0.5))
    weight = keras.Variable([1.0])
    optimizer.build([weight])
    for gradient in np.inf, 2.0**14:
        optimizer.apply([keras.ops.convert_to_tensor([gradient])], [weight])
    twin = make(make(optimizer))
    twin.build([weight])
    assert float(twin.loss_scale) == 2.0**14
    assert (twin.skipped_steps, twin.attempted_steps) == (1, 2)
    for value, other in zip(
        numbers(twin.variables), numbers(optimizer.variables), strict=True
    ):
        np.testing.assert_array_equal(value, other)
