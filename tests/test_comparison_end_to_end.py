"""From `compare_precisions` to a verdict, on the backend in use."""

import keras
import numpy as np
import pytest

import keras_mixprec as kmp

GOOD = {"direction": "float32", "head": "mixed_float16"}
BAD = {"direction": "mixed_float16", "head": "float32"}


class Direction(keras.layers.Layer):
    """Its squares overflow in float16, which leaves zeros of it."""

    def call(self, x):
        squares = keras.ops.sum(x * x, axis=-1, keepdims=True)
        return x / keras.ops.sqrt(squares + 1e-6)


def build():
    inputs = keras.Input((4,))
    x = Direction(name="direction")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, name="head")(x))
    model.compile(keras.optimizers.SGD(0.3), "mse", metrics=["mae"])
    return model


def data():
    x = 400 * np.random.default_rng(0).normal(size=(32, 4))
    return x, x[:, :1] / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def result():
    """The same policy twice, a plan that suits the model, and one that not."""
    policies = {"float32": "float32", "again": "float32"}
    for name, layers in ("good", GOOD), ("bad", BAD):
        policies[name] = kmp.PrecisionPlan(layers, default="mixed_float16")
    return kmp.compare_precisions(
        build, data, policies, metric="mae", tolerance=0.1, seeds=3,
        steps=16, blocks=4, batch_size=8, verbose=0,
    )  # fmt: skip


def test_equal_ones_are_within_tolerance_and_a_worse_plan_is_worse(result):
    verdicts = {row["name"]: row["verdict"] for row in result.rows}
    assert verdicts == {
        "float32": "reference",
        "again": "within tolerance",
        "good": "within tolerance",
        "bad": "worse",
    }
    assert "again: within tolerance: the same losses and metric" in str(result)


def test_the_best_is_never_the_worse_plan(result):
    policy, reason = result.best()
    assert policy == "float32" or dict(policy) == GOOD
    # Noise may show one of the right ones as faster, never the worse one.
    assert "bad is worse" in reason or "trains at" in reason
    assert "bad trains at" not in reason


def test_a_real_result_is_shown_saved_and_signed(result, tmp_path):
    assert result._repr_html_().count("<polyline") == 4
    result.sign_off(tmp_path / "signed.json")
    loaded = kmp.ComparisonResult.load(tmp_path / "signed.json")
    assert str(loaded) == str(result)
    assert max(map(len, str(result).splitlines())) <= 100
