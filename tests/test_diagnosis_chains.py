"""Many layers at fault, one after the other, take few runs of the step."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_mixprec as kmp
from keras_mixprec.diagnosis import call_search, search_state

LENGTH = 12
X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")


class Vanishing(layers.Layer):
    """1e-9 is 0 in float16, and what comes after is given zeros."""

    def call(self, x):
        return 1e9 * (1e-9 * x)


def chain(links):
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((8,))
    for number in range(LENGTH):
        x = links(number)(x)
        x = layers.Dense(8, kernel_initializer="orthogonal")(x)
    model = keras.Model(inputs, layers.Dense(2, name="head")(x))
    kmp.apply_policy(model, "mixed_float16", rules=[kmp.PrecisionRule("head")])
    model.compile(kmp.LossScaleOptimizer("adam"), "mse", jit_compile=False)
    return model


@pytest.fixture
def runs(monkeypatch):
    """A list with an item for each run of a step with its layers recorded."""
    counted, original = [], search_state.dry_step

    def counting(*args, **kwargs):
        counted.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(search_state, "dry_step", counting)
    return counted


def test_a_chain_takes_few_runs(runs):
    model = chain(lambda number: Vanishing(name=f"link{number}"))
    found = kmp.diagnose(model, X, np.ones((32, 2)))
    expected = [f"link{n}" for n in range(LENGTH)]
    assert [v.layer for v in found] == expected
    assert {v.kind for v in found} == {"underflow"}
    # One, one for each of the first three, one for all the others.
    assert len(runs) == 5


def test_what_is_found_after_a_chain_was_foreseen(runs):
    # Within another layer nothing is foreseen: it may take all that is inside.
    def link(number):
        inner = [Vanishing(name="inside")]
        if number % 2:
            return Vanishing(name=f"alone_{number}")
        return keras.Sequential(inner, name=f"block_{number}")

    found = kmp.diagnose(chain(link), X, np.ones((32, 2)))
    assert [v.layer for v in found] == [
        f"alone_{n}" if n % 2 else f"block_{n}/inside" for n in range(LENGTH)
    ]
    assert len(runs) < LENGTH


def test_the_same_without_a_loss(monkeypatch):
    counted, original = [], call_search.CallSearch._dry_step

    def counting(*args):
        counted.append(args)
        return original(*args)

    monkeypatch.setattr(call_search.CallSearch, "_dry_step", counting)
    model = chain(lambda number: Vanishing(name=f"link{number}"))
    found = kmp.diagnose(model, X)
    assert [v.layer for v in found] == [f"link{n}" for n in range(LENGTH)]
    assert len(counted) == 5


class Grows(layers.Layer):
    """Its results reach 1e6."""

    def call(self, x):
        return x * 1e6


@pytest.mark.parametrize(
    ("neighbour", "named"),
    [
        # Which Keras computes in float32.
        (lambda: layers.LayerNormalization(name="next"), ["grows"]),
        (lambda: layers.Rescaling(1e-6, name="next"), ["grows", "next"]),
    ],
)
def test_a_neighbour_is_named_only_if_it_cannot_take_large_inputs(
    neighbour, named
):
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((8,))
    for layer in Grows(name="grows"), neighbour(), layers.Dense(2, name="head"):
        x = layer(x)
    model = keras.Model(inputs, x)
    kmp.apply_policy(model, "mixed_float16", rules=[kmp.PrecisionRule("head")])
    model.compile(kmp.LossScaleOptimizer("adam"), "mse", jit_compile=False)
    assert [v.layer for v in kmp.diagnose(model, X, X[:, :2])] == named
