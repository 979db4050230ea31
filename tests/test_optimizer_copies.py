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
    replay = make(kmp.LossScaleOptimizer("adam", initial_scale=64.0))
    weight = keras.Variable([1.0])
    replay.build([weight])
    assert float(replay.loss_scale) == 64.0
    assert type(replay.inner_optimizer) is type(keras.optimizers.get("adam"))
    assert replay.skipped_steps == 0


def test_a_copy_of_a_copy_goes_on_where_the_first_was(make):
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(1.0, momentum=0.5))
    weight = keras.Variable([1.0])
    optimizer.build([weight])
    for gradient in np.inf, 2.0**14:
        optimizer.apply([keras.ops.convert_to_tensor([gradient])], [weight])
    replay = make(make(optimizer))
    replay.build([weight])
    assert float(replay.loss_scale) == 2.0**14
    assert (replay.skipped_steps, replay.attempted_steps) == (1, 2)
    for value, other in zip(
        numbers(replay.variables), numbers(optimizer.variables), strict=True
    ):
        np.testing.assert_array_equal(value, other)


def test_what_ensure_loss_scaling_made(make):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    kmp.apply_policy(model, "mixed_float16")
    model.compile("adam", "mse", auto_scale_loss=False)
    optimizer = kmp.ensure_loss_scaling(model)
    optimizer.build(model.trainable_variables)
    optimizer.set_loss_scale(2.0**7)
    replay = make(optimizer)
    replay.build([keras.Variable(v) for v in model.trainable_variables])
    assert isinstance(replay, kmp.LossScaleOptimizer)
    assert float(replay.loss_scale) == 2.0**7
