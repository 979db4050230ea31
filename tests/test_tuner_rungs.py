"""Which rung a layer is demoted to: rescaled, bfloat16 or float32."""

import keras
import numpy as np
import pytest
from keras import ops
from monitor_models import each_jit, monitor
from tuner_models import (
    BIG,
    CURE,
    chain,
    demoted,
    fit,
    kinds,
    sequential,
    tuner,
)
from zoo import cases

import keras_mixprec as kmp
from keras_mixprec.devices import found, measured
from keras_mixprec.devices.processor import Processor
from keras_mixprec.policies.summary import shares_in_16_bits

RUNGS = ("rescale", "float32")


def test_faults_of_range_take_the_bfloat16_rung():
    fit(model := chain(), [BIG] * 4, tuner(bfloat16=True))
    # The loss would be of outputs with eight bits.
    assert demoted(model) == CURE | {"big": "mixed_bfloat16"}


def test_bfloat16_that_was_measured_to_be_fast_is_a_rung(monkeypatch):
    cpu = Processor("some CPU", ("AVX512-BF16",))
    monkeypatch.setattr(found, "this_processor", lambda: cpu)
    speed = measured.Measured({"bfloat16": 1.9}, (), "2026-11-23", False)
    for expected in ("float32", "mixed_bfloat16"):
        model, callback = chain(), tuner()
        fit(model, [BIG] * 4, callback)
        assert demoted(model) == CURE | {"big": expected}
        assert measured.save(found.find_devices(), speed)
    for fact in "doctor", "1.90 times", "2026-11-23":
        assert fact in callback.history[0]["message"]


def test_faults_of_precision_do_not():
    (case,) = cases(["bn_variance_200"])
    model = case.model("mixed_float16", None)
    case.fit(model, epochs=1, callbacks=[tuner(bfloat16=True)])
    assert demoted(model)["naive_bn"] == "float32"


class Norm(keras.layers.Layer):
    """x / |x|, whose squares overflow from 256 on."""

    def call(self, x):
        return x / ops.sqrt(ops.sum(x * x, axis=-1, keepdims=True) + 1e-6)


class Shifted(Norm):
    """A norm of what is shifted by a weight that is zero at first."""

    def build(self, input_shape):
        self.shift = self.add_weight(shape=(1,), initializer="zeros")

    def call(self, x):
        return super().call(x + self.shift)


class Peaked(keras.layers.Layer):
    """Softmax of squares: of such as overflow it is one and zeros."""

    def call(self, x):
        return ops.softmax(x * x) * x


def train(layer, *callbacks, jit=None, **arguments):
    """The model and the loss of one epoch."""
    model = sequential(
        lambda: [
            keras.layers.Dense(4, kernel_initializer="identity", name="first"),
            layer(name="layer", **arguments),
            keras.layers.Dense(1, name="last"),
        ],
        features=4,
        rate=0.01,
        momentum=0.0,
        loss="mse",
        scale=None,
        jit=jit,
    )
    x = 400.0 * np.random.default_rng(0).normal(size=(32, 4))
    options = {"batch_size": 8, "verbose": 0, "shuffle": False}
    options["callbacks"] = [*callbacks]
    return model, model.fit(x, np.ones((32, 1)), **options).history["loss"]


@each_jit
def test_a_normalization_stays_in_float16(jit, tmp_path):
    path, watcher = tmp_path / "plan.json", monitor(tmp_path / "logs")
    callback = tuner(path, rungs=RUNGS)
    model, loss = train(Norm, callback, watcher, jit=jit)
    assert demoted(model) == {"layer": "rescaled(-6,0)_from_mixed_float16"}
    _, known = train(Norm, jit=jit, dtype="float32")
    assert loss == pytest.approx(known, rel=1e-2)
    said = " ".join(str(kmp.load_report(tmp_path / "logs")).split())
    assert "to rescaled float16" in said
    # Another run starts from the plan.
    again, _ = train(Norm, callback := tuner(path, rungs=RUNGS), jit=jit)
    assert kinds(callback) == ["start"]
    assert demoted(again) == demoted(model)


@pytest.mark.parametrize("layer", [Shifted, Peaked])
def test_what_only_looks_homogeneous_is_demoted(layer):
    model, _ = train(layer, tuner(rungs=RUNGS))
    assert demoted(model) == {"layer": "float32"}


def test_more_of_the_flops_stay_in_16_bits():
    (case,) = cases(["t5_ffn"])
    oracle = case.model("mixed_float16", None, sorted(case.culprits))
    assert shares_in_16_bits(oracle).flops < 0.5
    model = case.model("mixed_float16", None)
    case.fit(model, 1, [tuner(rungs=RUNGS)])
    assert shares_in_16_bits(model).flops > 0.99


def test_a_model_without_a_fault_is_left_as_it_is():
    (case,) = cases(["healthy_mlp"])
    model = case.model("mixed_float16", None)
    before, callback = kmp.PrecisionPlan.from_model(model), tuner(rungs=RUNGS)
    case.fit(model, 1, [callback])
    assert callback.history == []
    assert before.diff(kmp.PrecisionPlan.from_model(model)) == []
