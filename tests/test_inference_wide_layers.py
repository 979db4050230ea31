"""The smallest set of layers in float32 for inference, and its cost."""

import keras
import numpy as np
import pytest
from diagnosis_models import Overflowing
from keras import layers
from monitor_models import not_jax

import keras_mixprec as kmp
from keras_mixprec.inference import wide_layers
from keras_mixprec.numerics.forward_pass import Prediction

LENGTH = 12
X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")


class Offset(layers.Layer):
    def call(self, x):
        return x - 3000.0


class Vanishing(layers.Layer):
    """1e-9 is 0 in float16, and what comes after is given zeros."""

    def call(self, x):
        return 1e9 * (1e-9 * x)


def model_of(*middle):
    head = layers.Dense(3, name="head")
    model = keras.Sequential([keras.Input((8,)), *middle, head])
    model.jit_compile = False
    return model


def converted(model, x=X, **kwargs):
    return kmp.convert_for_inference(model, "float16", calibration=x, **kwargs)


@not_jax  # XLA computes what overflows with what follows it, in float32.
def test_what_overflows_is_kept_wide_and_says_why():
    model = model_of(layers.Dense(8), Overflowing(name="bad"))
    policies = kmp.PrecisionPlan.from_model(model)
    _, report = converted(model, batch_size=16)
    assert report.wide_layers == ["bad"]
    assert "forward_overflow" in report.plan.reasons["bad"]
    assert report.drift[0]["relative"] < 0.01
    assert kmp.PrecisionPlan.from_model(model) == policies


@pytest.mark.one_backend
def test_a_weight_beyond_float16_is_kept_wide_although_nothing_shows():
    words = layers.Embedding(10, 8, name="words")
    model = keras.Sequential([keras.Input((3,), dtype="int32"), words])
    words.embeddings.assign(np.r_[np.ones((9, 8)), np.full((1, 8), 1e5)])
    _, report = converted(model, np.arange(6).reshape(2, 3))
    assert "weight_overflow" in report.plan.reasons["words"]


@not_jax
@pytest.mark.one_backend
def test_a_tighter_tolerance_keeps_more():
    steps = layers.Rescaling(1.0, offset=3000.0, name="steps")
    model = model_of(layers.Dense(8, name="first"), steps, Offset(name="less"))
    kept = [
        converted(model, tolerance=tolerance, rules=[])[1].wide_layers
        for tolerance in (1.0, 0.1)
    ]
    assert kept == [[], ["steps", "less"]]


# What a search costs.


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


@pytest.mark.slow
@pytest.mark.one_backend
def test_a_search_takes_few_runs_and_says_where_it_stopped(runs, monkeypatch):
    _, report = converted(chain())
    assert report.wide_layers == [f"link{n}" for n in range(LENGTH)]
    # In float32, with none wide, and with all but one of the set wide.
    assert runs.count(True) == 2 + LENGTH
    assert not report.notes
    took = len(runs)
    monkeypatch.setattr(wide_layers, "_MOST_TRIED", 12)
    _, report = converted(chain())
    assert {*report.wide_layers} >= {f"link{n}" for n in range(LENGTH)}
    assert report.drift[0]["relative"] < 0.05
    assert any("may be enough" in note for note in report.notes)
    assert len(runs) - took < took
