"""What a conversion's search costs: runs, and arrays at once."""

import weakref

import keras
import numpy as np
import pytest
from keras import layers

import keras_mixprec as kmp
from keras_mixprec.inference import graph_values, refusal, wide_layers
from keras_mixprec.inference.wide_layers import smallest_wide_set
from keras_mixprec.numerics.forward_pass import Prediction

LENGTH = 12
X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")


class Vanishing(layers.Layer):
    """1e-9 is 0 in float16, and what comes after is given zeros."""

    def call(self, x):
        return 1e9 * (1e-9 * x)


@pytest.fixture
def runs(monkeypatch):
    """A list with, for each run of a model, whether its calls were recorded."""
    counted, original = [], Prediction.run

    def counting(prediction, *, records=True, drawing=None):
        counted.append(records)
        return original(prediction, records=records, drawing=drawing)

    monkeypatch.setattr(Prediction, "run", counting)
    return counted


def chain():
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((8,))
    for number in range(LENGTH):
        x = Vanishing(name=f"link{number}")(x)
        x = layers.Dense(8, kernel_initializer="orthogonal")(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(x))


def test_only_the_runs_that_are_looked_into_are_recorded(runs):
    found = smallest_wide_set(chain(), [X], "float16")
    assert list(found.verdicts) == [f"link{n}" for n in range(LENGTH)]
    # In float32, with none wide, one for each of the first three, one for the
    # rest; recorded ones take five times as long.
    assert runs.count(True) == 6


def test_a_search_that_would_take_too_long_says_so(runs, monkeypatch):
    everything = smallest_wide_set(chain(), [X], "float16")
    assert everything.is_smallest
    took = len(runs)
    monkeypatch.setattr(wide_layers, "_MOST_TRIED", 12)
    _, report = kmp.convert_for_inference(chain(), "float16", calibration=X)
    assert set(report.wide_layers) >= set(everything.verdicts)
    assert len(runs) - took < took
    assert report.drift[0]["relative"] < 0.05
    assert any("fewer may do" in note for note in report.notes)


@pytest.fixture
def arrays(monkeypatch):
    """A list of how many arrays of activations there were, at each new one."""
    alive, counts = weakref.WeakValueDictionary(), []

    def counting(tensor):
        array = np.array(keras.ops.convert_to_numpy(tensor))
        alive[id(array)] = array
        counts.append(len(alive))
        return array

    for module in (graph_values, refusal):
        monkeypatch.setattr(module, "to_array", counting)
    return counts


@pytest.mark.parametrize("policy", ["float16", "plan"])
def test_activations_become_arrays_one_by_one(policy, arrays):
    x = inputs = keras.Input((8,))
    for _ in range(LENGTH):
        x = layers.Dense(8, kernel_initializer="orthogonal")(x)
    x = keras.ops.multiply(keras.ops.multiply(x, 1e6), 1e-6)
    model = keras.Model(inputs, x)
    if policy == "plan":
        policy = kmp.apply_policy(model, "mixed_float16", rules=[])
        with pytest.raises(ValueError, match="The operation 'multiply"):
            kmp.convert_for_inference(model, policy, calibration=X)
    else:
        kmp.convert_for_inference(model, policy, calibration=X)
    # One, and outputs; of 14 activations.
    assert len(arrays) > LENGTH
    assert max(arrays) <= 4
