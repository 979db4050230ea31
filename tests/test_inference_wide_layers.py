"""The smallest set of layers that inference in 16 bits keeps in float32."""

import keras
import numpy as np
import pytest
from diagnosis_models import Overflowing
from keras import layers

import keras_mixprec as kmp
from keras_mixprec.inference.wide_layers import smallest_wide_set

X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
HALVES = [X[:16], X[16:]]


def model_of(*middle):
    head = layers.Dense(3, name="head")
    model = keras.Sequential([keras.Input((8,)), *middle, head])
    model.jit_compile = False
    return model


def drift(model, wide):
    """Of `predict` in float16, without this package's reference."""
    exact = model.predict(X, verbose=0)
    twin = keras.models.clone_model(model)
    twin.set_weights(model.get_weights())
    twin.jit_compile = False
    rules = [kmp.PrecisionRule(path) for path in wide]
    kmp.apply_policy(twin, "mixed_float16", rules=rules)
    low = twin.predict(X, verbose=0).astype("float64")
    return np.linalg.norm(low - exact) / np.linalg.norm(exact)


def test_nothing_is_kept_wide_that_need_not_be():
    model = model_of(layers.Dense(8, "relu"), layers.LayerNormalization())
    found = smallest_wide_set(model, HALVES, "float16")
    assert found.verdicts == {}
    assert 0 < found.drift == found.drift_without < 0.01
    assert found.drift == pytest.approx(drift(model, []), rel=0.7)


def test_what_overflows_is_kept_wide_and_says_why():
    model = model_of(layers.Dense(8), Overflowing(name="bad"))
    policies = kmp.PrecisionPlan.from_model(model)
    found = smallest_wide_set(model, HALVES, "float16")
    assert list(found.verdicts) == ["bad"]
    assert found.layers == [model.get_layer("bad")]
    verdict = found.verdicts["bad"]
    assert verdict.kind == "forward_overflow"
    assert verdict.numbers["output_error_without"] == np.inf
    assert found.drift < 0.01 < found.drift_without == np.inf
    assert kmp.PrecisionPlan.from_model(model) == policies


def test_a_weight_beyond_float16_is_kept_wide_although_nothing_shows():
    words = layers.Embedding(10, 8, name="words")
    model = keras.Sequential([keras.Input((3,), dtype="int32"), words])
    words.embeddings.assign(np.r_[np.ones((9, 8)), np.full((1, 8), 1e5)])
    ids = np.arange(6).reshape(2, 3)
    found = smallest_wide_set(model, [ids], "float16")
    assert found.verdicts["words"].kind == "weight_overflow"


class Offset(layers.Layer):
    def call(self, x):
        return x - 3000.0


def test_a_tighter_tolerance_keeps_more():
    steps = layers.Rescaling(1.0, offset=3000.0, name="steps")
    model = model_of(layers.Dense(8, name="first"), steps, Offset(name="less"))
    kept = [
        list(smallest_wide_set(model, [X], "float16", tolerance).verdicts)
        for tolerance in (1.0, 0.1, 1e-7)
    ]
    assert kept[0] == []
    assert kept[1] == ["steps", "less"]
    assert set(kept[1]) < set(kept[2])
    assert drift(model, kept[1]) < 0.1 < drift(model, ["steps"])
    assert drift(model, []) > 0.1


def test_what_the_model_keeps_wide_stays_so():
    model = model_of(Overflowing(name="bad"), Overflowing(name="too"))
    kmp.apply_policy(model, "mixed_float16", rules=[kmp.PrecisionRule("bad")])
    assert list(smallest_wide_set(model, [X]).verdicts) == ["too"]


class Noisy(layers.Layer):
    def call(self, x):
        return x + float(np.random.default_rng().normal())


def test_a_tolerance_that_no_set_reaches():
    model = model_of(layers.Dense(8, name="dense"), Noisy())
    with pytest.raises(ValueError, match="Even with all layers.*=1e-06"):
        smallest_wide_set(model, [X], "float16", 1e-6)
    model.get_layer("dense").bias.assign(np.full(8, np.nan))
    with pytest.raises(ValueError, match="In float32 no output is finite"):
        smallest_wide_set(model, [X], "float16")
