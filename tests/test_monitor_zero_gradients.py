"""Layers that get gradients of exactly zero: vanished, or zero by design."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from monitor_models import JITS, each_jit, told

import keras_mixprec as kmp
from keras_mixprec.monitoring import audits
from keras_mixprec.reporting.file_source import FileSource
from keras_mixprec.reporting.run_data import RunData

JIT = next(iter(JITS))
LAYERS = ["first", "lost"]


def in_metres(jit=JIT, wrap=kmp.LossScaleOptimizer):
    """A head in SI units beside one that keeps the loss scale down."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(8, name="first")(inputs)
    metres = layers.Dense(1, name="lost")(hidden)
    metres = layers.Rescaling(1e-7, name="metres")(metres)
    large = layers.Dense(1, name="large")(inputs)
    model = keras.Model(inputs, [metres, large])
    kmp.apply_policy(model, "mixed_float16")
    inner = keras.optimizers.Adam(1e-3, epsilon=1e-16)
    model.compile(wrap(inner), loss=["mse", "mse"], jit_compile=jit)
    return model


def trained(model, log_dir, steps=40, **arguments):
    x = np.random.default_rng(0).normal(size=(8 * steps, 4)).astype("float32")
    y = [2e-7 * x[:, :1], x[:, :1]][: len(model.outputs)]
    watcher = kmp.MixPrecMonitor(log_dir, verbose=0, **arguments)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[watcher])
    return watcher


@each_jit
@pytest.mark.parametrize("update_freq", [4, 50])
def test_gradients_that_vanish_at_every_step_are_found(
    jit, update_freq, tmp_path
):
    model = in_metres(jit)
    before = [model.get_layer(name).get_weights()[0] for name in LAYERS]
    watcher = trained(model, tmp_path, update_freq=update_freq)
    after = [model.get_layer(name).get_weights()[0] for name in LAYERS]
    assert all(map(np.array_equal, before, after))
    (verdict,) = watcher.verdicts
    assert verdict.kind == "scale_too_low"
    assert verdict.numbers["first"] == "first"
    headline = watcher.summary.headline
    assert headline["text"].startswith(
        "Gradients vanished at too low a loss scale (found"
    )
    assert headline["state"] == "warning"
    (step,) = examined(tmp_path)
    assert 32 <= step <= 40


def examined(log_dir):
    """The steps that were compared with float32."""
    run = RunData("run", FileSource(str(log_dir / "mixprec")))
    return run.grid("forward_error_against_float32", 100).last.tolist()


def test_with_the_optimizer_of_keras(tmp_path):
    model = in_metres(wrap=keras.optimizers.LossScaleOptimizer)
    watcher = trained(model, tmp_path)
    assert [v.kind for v in watcher.verdicts] == ["scale_too_low"]


class Gate(layers.Layer):
    """Lets nothing back into what is before it, in float32 neither."""

    def call(self, x):
        return x + 0.0 * ops.cast(ops.sign(x), x.dtype) - x


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_gradients_that_are_zero_in_float32_are_no_finding(policy, tmp_path):
    inputs = keras.Input((4,))
    dead = Gate(name="gate")(layers.Dense(1, name="dead")(inputs))
    live = layers.Dense(1, name="live")(inputs)
    model = keras.Model(inputs, layers.Add()([dead, live]))
    kmp.apply_policy(model, policy)
    model.compile("sgd", "mse", jit_compile=JIT)
    watcher = trained(model, tmp_path, 80, update_freq=4)
    assert watcher.verdicts == []
    assert watcher.summary.headline["state"] == "healthy"
    assert len(examined(tmp_path)) == 1
    assert told(tmp_path, "zero_gradients") == []


@pytest.fixture
def no_diagnosis(monkeypatch):
    """As where none is possible."""
    monkeypatch.setattr(audits.Examiner, "wants", lambda *_: False)


@pytest.mark.usefixtures("no_diagnosis")
def test_zero_gradients_that_nothing_was_compared_for_are_a_warning(tmp_path):
    watcher = trained(in_metres(), tmp_path, 31)
    assert examined_none(tmp_path)
    text, state = watcher.summary.headline.values()
    assert text.startswith("Weight gradients of first, lost all zero in the ")
    assert "no findings" not in text
    assert state == "warning"
    report = kmp.load_report(tmp_path)
    (run,) = report.to_dict().values()
    assert run["headline"] == watcher.summary.headline
    (event,) = told(tmp_path, "zero_gradients")
    assert event["paths"] == LAYERS
    finding = run["events"][run["finding"]["event"]]
    assert event["layer"] == finding["layer"] == "first"
    assert "kmp.diagnose(model, x, y)" in finding["fix"]["diagnosis"]


class Normalized(layers.Layer):
    """By the sum of squares, which float16 does not hold: all zero."""

    def call(self, x):
        squares = ops.sum(x * x, axis=-1, keepdims=True)
        return x / ops.sqrt(squares + 1e-6)


@pytest.mark.usefixtures("no_diagnosis")
def test_the_first_layer_of_zeros_is_named_before_what_it_starves(tmp_path):
    inputs = keras.Input((4,))
    x = layers.Dense(64, name="before")(inputs)
    x = layers.Rescaling(1e3, dtype="float32", name="gain")(x)
    x = layers.Dense(8, name="behind")(Normalized(name="sum_of_squares")(x))
    model = keras.Model(inputs, layers.Dense(1, name="out")(x))
    kmp.apply_policy(model, "mixed_float16", rules=())
    model.compile(kmp.LossScaleOptimizer("sgd"), "mse", jit_compile=JIT)
    text = trained(model, tmp_path, 31).summary.headline["text"]
    assert text.startswith(
        "Outputs of sum_of_squares and weight gradients of before all zero"
    )


def examined_none(log_dir):
    run = RunData("run", FileSource(str(log_dir / "mixprec")))
    names = [m["name"] for m in run.overview()["heat"]["metrics"]]
    return "forward_error_against_float32" not in names


def test_what_is_all_zero_is_no_share_of_what_vanishes(tmp_path):
    trained(in_metres(), tmp_path, 2)
    run = RunData("run", FileSource(str(tmp_path / "mixprec")))
    for metric in "weight_gradient_below", "weight_gradient_subnormal":
        grid = run.grid(metric, 100)
        rows = dict(zip(grid.layers, grid.worst, strict=True))
        assert np.all(np.isinf(rows["lost"]))
        assert np.all(np.isfinite(rows["large"]))
