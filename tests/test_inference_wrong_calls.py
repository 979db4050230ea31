"""Wrong calls raise helpful errors, and change nothing."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_mixprec as kmp

pytestmark = pytest.mark.one_backend

X = np.ones((6, 4), "float32")
SCALE = 2.0


def dense(*kernel, name="dense"):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4, name=name)])
    model.add(layers.Dense(4, name="last"))
    for number in kernel:
        model.layers[0].kernel.assign(np.full((4, 4), number))
    return model


def with_lambda(function):
    twice = layers.Lambda(function, name="twice")
    return keras.Sequential([keras.Input((4,)), twice, layers.Dense(2)])


def summed():
    """A sum in the graph is too large for the layers before and behind it."""
    inputs = keras.Input((4,))
    x = layers.Dense(4, "linear", name="dense")(inputs)
    x = keras.ops.sum(keras.ops.square(1e3 * x), -1, keepdims=True)
    model = keras.Model(inputs, layers.Dense(2, name="last")(x))
    model.get_layer("dense").kernel.assign(np.eye(4))
    return model


def both_formats():
    """The refusal of both has a sentence on each."""
    return {"policy": "auto", "tolerance": 1e-9}


LOW_A = kmp.PrecisionPlan({"dense": "mixed_float16", "last": "float32"})
WRONG = {
    "`model` must be": {"model": lambda: "model.keras"},
    "In float32": {"model": lambda: dense(np.nan)},
    "`Lambda` layers.*'SCALE'": {
        "model": lambda: with_lambda(lambda x: SCALE * x)
    },
    "not finite.*overflow.*'dense'": {"model": summed, "rules": []},
    "overflow.*'dense'.*8e": {"model": lambda: dense(2e4), "policy": LOW_A},
    "Neither.* float16 the.* bfloat16 the": both_formats(),
    "PrecisionRule": {"rules": ["dense"]},
    "at least one": {"calibration": X[:0]},
    "cannot be called on `cal": {"calibration": np.ones((6, 5))},
}


def state_of(model):
    if not isinstance(model, keras.Model):
        return []
    policies = [layer.dtype_policy.name for layer in model._flatten_layers()]
    return policies, [weight.tolist() for weight in model.get_weights()]


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_call_is_refused_and_changes_nothing(said):
    arguments = {"policy": "float16", "calibration": X, **WRONG[said]}
    model = arguments.pop("model", dense)()
    before = str(state_of(model))
    with pytest.raises((TypeError, ValueError), match=said) as refusal:
        kmp.convert_for_inference(model, **arguments)
    assert str(state_of(model)) == before
    assert keras.config.dtype_policy().name == "float32"
    # Joined sentences have no stray punctuation.
    joints = "..", "  ", " .", ";."
    assert not any(joint in str(refusal.value) for joint in joints)
