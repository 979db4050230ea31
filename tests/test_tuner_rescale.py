"""The rung that keeps layers in float16, on inputs times a power of two."""

import keras
import numpy as np
import pytest
from keras import ops
from monitor_models import each_jit
from tuner_models import demoted, tuner
from zoo import cases

import keras_mixprec as kmp
from keras_mixprec.policies.summary import shares_in_16_bits

RUNGS = ("rescale", "float32")


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


def model(layer, jit, **arguments):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(4, kernel_initializer="identity", name="first"),
            layer(name="layer", **arguments),
            keras.layers.Dense(1, name="last"),
        ]
    )
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, loss="mse", jit_compile=jit)
    return model


def fit(model, *callbacks):
    x = 400.0 * np.random.default_rng(0).normal(size=(32, 4))
    arguments = {"batch_size": 8, "verbose": 0, "shuffle": False}
    y = np.ones((32, 1))
    return model.fit(x, y, callbacks=[*callbacks], **arguments).history["loss"]


def test_a_run_with_a_rescaled_layer_is_a_repaired_one(tmp_path):
    built = model(Norm, None)
    monitor = kmp.MixPrecMonitor(str(tmp_path), verbose=0)
    fit(built, tuner(rungs=RUNGS), monitor)
    said = str(kmp.load_report(str(tmp_path)))
    assert "demoted to rescaled float16" in " ".join(said.split()), said
    assert "Demoted to rescaled float16 before the first step: layer" in said


@each_jit
def test_a_normalization_stays_in_float16(jit, tmp_path):
    built = model(Norm, jit)
    callback = tuner(tmp_path / "plan.json", rungs=RUNGS)
    found = fit(built, callback)
    assert demoted(built) == {"layer": "rescaled(-6,0)_from_mixed_float16"}
    known = fit(model(Norm, jit, dtype="float32"))
    assert found == pytest.approx(known, rel=1e-2)
    # Another run starts from the plan.
    again = model(Norm, jit)
    callback = tuner(tmp_path / "plan.json", rungs=RUNGS)
    fit(again, callback)
    assert [e["kind"] for e in callback.history] == ["start"]
    assert demoted(again) == demoted(built)


@pytest.mark.parametrize("layer", [Shifted, Peaked])
def test_what_only_looks_homogeneous_is_demoted(layer):
    built = model(layer, None)
    fit(built, tuner(rungs=RUNGS))
    assert demoted(built) == {"layer": "float32"}


def test_more_of_the_flops_stay_in_16_bits():
    (case,) = cases(["t5_ffn"])
    oracle = case.model("mixed_float16", None, sorted(case.culprits))
    assert shares_in_16_bits(oracle).flops < 0.5
    built = case.model("mixed_float16", None)
    case.fit(built, 1, [tuner(rungs=RUNGS)])
    assert shares_in_16_bits(built).flops > 0.99


def test_a_model_without_a_fault_is_left_as_it_is():
    (case,) = cases(["healthy_mlp"])
    built = case.model("mixed_float16", None)
    before, callback = kmp.PrecisionPlan.from_model(built), tuner(rungs=RUNGS)
    case.fit(built, 1, [callback])
    assert callback.history == []
    assert before.diff(kmp.PrecisionPlan.from_model(built)) == []


WRONG = {
    "no sequence": ("float32", TypeError, "sequence of strings.*type str"),
    "no such": (("clamp", "float32"), ValueError, "must be some of"),
    "in another order": (("float32", "rescale"), ValueError, "in this order"),
    "none that always repairs": (("rescale",), ValueError, "always repairs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rungs(name):
    rungs, error, match = WRONG[name]
    with pytest.raises(error, match=match):
        kmp.PrecisionTuner(rungs=rungs)
