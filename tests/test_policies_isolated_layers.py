"""16-bit layers that two casts make dearer than float32."""

import keras
import numpy as np
import pytest
from keras.layers import Activation, Dense, LayerNormalization

import keras_mixprec as kmp
from keras_mixprec.policies.casts import isolated_layers


def names(build, low):
    """The lone layers of a float32 model in which `low` are float16."""
    model = build()
    rules = [kmp.PrecisionRule(name, "mixed_float16") for name in low]
    kmp.apply_policy(model, "float32", rules=rules)
    return [layer.name for layer in isolated_layers(model)]


def chain(width=64, features=2048):
    inputs = keras.Input((features,))
    x = Dense(width, name="a")(inputs)
    x = Activation("relu", name="b")(x)
    x = Dense(width, name="c")(x)
    return keras.Model(inputs, Dense(1, name="d")(x))


def residual():
    inputs = keras.Input((8,))
    x = Dense(8, name="a")(inputs)
    y = LayerNormalization(name="b")(keras.ops.relu(x))
    x = keras.layers.Add(name="c")([x, y])
    return keras.Model(inputs, Dense(1, name="d")(x))


@pytest.mark.parametrize(
    ("build", "low", "lone"),
    [
        (chain, "b", "b"),
        (chain, "c", "c"),  # 32 multiply-adds an element, 3% of all.
        (lambda: chain(features=64), "c", ""),  # 50% of all.
        (lambda: chain(features=64), "b", "b"),
        (lambda: chain(1024, 2**15), "c", ""),  # 512 an element, 3% of all.
        (lambda: chain(1024, 2**15), "b", "b"),
        (chain, "bc", ""),  # Not alone.
        (chain, "a", ""),  # Its input comes from outside.
        (chain, "d", ""),
        (residual, "b", "b"),
        (residual, "c", "c"),
        (residual, "bc", ""),
    ],
)
def test_isolated_between_two_in_float32(build, low, lone):
    assert names(build, low) == list(lone)


def test_next_to_bfloat16_it_is_not_isolated():
    model = chain()
    rules = [
        kmp.PrecisionRule("a", "mixed_bfloat16"),
        kmp.PrecisionRule("b", "mixed_float16"),
    ]
    kmp.apply_policy(model, "float32", rules=rules)
    assert isolated_layers(model) == []


def test_a_subclassed_model_has_no_graph():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = Dense(4), Activation("relu"), Dense(1)

        def call(self, x):
            return self.c(self.b(self.a(x)))

    model = Model()
    model(np.zeros((1, 4)))
    low = kmp.PrecisionRule("activation", "mixed_float16")
    kmp.apply_policy(model, "float32", rules=[low])
    assert isolated_layers(model) == []


def test_a_shared_layer_is_isolated_if_all_its_neighbours_are_float32():
    def shared():
        inputs, relu = keras.Input((8,)), Activation("relu", name="b")
        x = relu(Dense(8, name="a")(inputs))
        return keras.Model(inputs, Dense(8, name="c")(relu(Dense(8)(x))))

    assert names(shared, "b") == ["b"]
    assert names(shared, "bc") == []
