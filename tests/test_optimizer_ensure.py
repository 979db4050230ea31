"""`ensure_loss_scaling`: every model that computes in float16 without it."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers
from monitor_models import scalars
from optimizer_models import BACKEND

import keras_mixprec
from keras_mixprec import LossScaleOptimizer, ensure_loss_scaling

X = np.linspace(-1, 1, 8, dtype="float32").reshape(4, 2)
JIT = {} if BACKEND == "jax" else {"jit_compile": False}


def make(policy, compiled=True, optimizer="sgd"):
    model = keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(3, dtype=policy),
            layers.Dense(1, dtype="float32"),
        ]
    )
    if compiled:
        model.compile(optimizer, loss="mse", **JIT)
    return model


def made_before():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    keras_mixprec.apply_policy(model, "float32")
    model.compile("sgd", loss="mse", **JIT)
    return model


def policy_map():
    return keras.dtype_policies.DTypePolicyMap("mixed_float16")


def nested():
    inner = keras.Sequential([layers.Dense(2, dtype="mixed_float16")])
    model = keras.Sequential([keras.Input((2,)), inner, layers.Dense(1)])
    model.compile("sgd", loss="mse", **JIT)
    return model


NEEDY = {
    "float16 layers": lambda: make("mixed_float16"),
    "a policy map": lambda: make(policy_map()),
    "pure float16": lambda: make("float16"),
    "a nested model": nested,
}
FINE = {
    "float32 behind an input made under another policy": made_before,
    "float32": lambda: make("float32"),
    "bfloat16": lambda: make("mixed_bfloat16"),
    "ours": lambda: make("mixed_float16", optimizer=LossScaleOptimizer("sgd")),
    "Keras' own": lambda: make(
        "mixed_float16",
        optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    ),
    "a fixed factor": lambda: make(
        "mixed_float16", optimizer=keras.optimizers.SGD(loss_scale_factor=8.0)
    ),
}


@pytest.mark.parametrize("build", NEEDY.values(), ids=NEEDY)
def test_the_optimizer_is_wrapped_and_trains(build):
    model = build()
    plain = model.optimizer
    optimizer = ensure_loss_scaling(model)
    assert isinstance(optimizer, LossScaleOptimizer)
    assert model.optimizer is optimizer
    assert optimizer.inner_optimizer is plain
    assert ensure_loss_scaling(model) is optimizer
    model.fit(X, X[:, :1], verbose=0)
    assert optimizer.attempted_steps == 1


@pytest.mark.parametrize("build", FINE.values(), ids=FINE)
def test_what_needs_nothing_is_left_alone(build):
    model = build()
    before = model.optimizer
    assert ensure_loss_scaling(model) is before
    assert model.optimizer is before


def test_between_two_fits_the_state_stays():
    model = make("mixed_float16", optimizer=keras.optimizers.SGD(0.1, 0.9))
    model.fit(X, X[:, :1], epochs=3, verbose=0)
    optimizer = ensure_loss_scaling(model)
    assert int(optimizer.iterations) == 3
    weights = model.get_weights()
    model.fit(X, X[:, :1] * np.nan, verbose=0)
    assert optimizer.skipped_steps == 1
    for a, b in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("how", ["ensure", "callback"])
def test_what_takes_the_place_of_an_optimizer_is_of_the_public_class(
    how, tmp_path
):
    if how == "ensure":
        model = make("mixed_float16", optimizer=keras.optimizers.Adam(0.25))
        optimizer = ensure_loss_scaling(model)
    else:
        inner = keras.optimizers.Adam(0.25)
        own = keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0)
        model = make("mixed_float16", optimizer=own)
        callback = keras_mixprec.MixPrecMonitor(tmp_path, verbose=0)
        model.fit(X, X[:, :1], verbose=0, callbacks=[callback])
        optimizer = model.optimizer
        assert optimizer.get_config() == own.get_config()
    assert isinstance(optimizer, keras_mixprec.LossScaleOptimizer)
    plain = keras_mixprec.LossScaleOptimizer("sgd")
    assert repr(optimizer).split(" at ")[0] == repr(plain).split(" at ")[0]
    copy = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(optimizer)
    )
    assert type(copy) is keras_mixprec.LossScaleOptimizer
    keras.optimizers.LossScaleOptimizer.from_config(optimizer.get_config())


KERAS_ALONE = """
import sys
import keras
import numpy as np
model = keras.saving.load_model(sys.argv[1])
optimizer = model.optimizer
print(type(optimizer).__module__.partition(".")[0], type(optimizer).__name__)
print(int(optimizer.iterations), float(optimizer.dynamic_scale))
x = np.ones((4, 2), "float32")
model.fit(x, x[:, :1], verbose=0)
print(int(optimizer.iterations), "keras_mixprec" in sys.modules)
"""


@pytest.mark.parametrize("fitted", [False, True], ids=["new", "between fits"])
def test_a_saved_model_needs_keras_alone(tmp_path, fitted):
    model = make("mixed_float16", optimizer=keras.optimizers.Adam(0.25))
    if fitted:
        model.fit(X, X[:, :1], verbose=0)
    optimizer = ensure_loss_scaling(model)
    model.fit(X, X[:, :1], verbose=0)
    model.fit(X, X[:, :1] * np.nan, verbose=0)
    model.save(tmp_path / "model.keras")
    steps = 1 + fitted
    done = subprocess.run(
        [sys.executable, "-c", KERAS_ALONE, tmp_path / "model.keras"],
        env=os.environ
        | {"KERAS_BACKEND": BACKEND, "PYTHONWARNINGS": "error::UserWarning"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "keras LossScaleOptimizer",
        f"{steps} {2.0**14}",
        f"{steps + 1} False",
    ]
    assert float(optimizer.loss_scale) == 2.0**14
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    rate = loaded.optimizer.inner_optimizer.learning_rate
    assert float(rate) == 0.25


def test_a_model_that_is_not_compiled():
    with pytest.raises(ValueError, match=r"call `model.compile\(...\)` first"):
        ensure_loss_scaling(make("mixed_float16", compiled=False))


@pytest.mark.parametrize("model", [None, "model", layers.Dense(1)])
def test_no_model(model):
    with pytest.raises(TypeError, match="must be a `keras.Model`.*Received"):
        ensure_loss_scaling(model)


class Capped(keras.optimizers.LossScaleOptimizer):
    """What a user derives from Keras' own, to hold the scale down."""

    def scale_loss(self, loss):
        if self.built:
            scale = keras.ops.minimum(self.dynamic_scale, 64.0)
            self.dynamic_scale.assign(scale)
        return super().scale_loss(loss)


@pytest.mark.parametrize(
    "callback", [keras_mixprec.MixPrecMonitor, keras_mixprec.PrecisionTuner]
)
def test_a_subclass_of_keras_own_is_never_exchanged(callback, tmp_path):
    def fit(*callbacks):
        keras.utils.set_random_seed(0)
        own = Capped(keras.optimizers.SGD(0.5), 64.0, dynamic_growth_steps=2)
        model = make("mixed_float16", optimizer=own)
        history = model.fit(
            X, X[:, :1], batch_size=1, epochs=2, verbose=0, callbacks=callbacks
        )
        assert model.optimizer is own
        return (
            history.history,
            [*model.get_weights()],
            float(keras.ops.convert_to_numpy(own.dynamic_scale)),
        )

    given = (
        {}
        if callback is keras_mixprec.PrecisionTuner
        else {"log_dir": tmp_path}
    )
    history, weights, scale = fit(callback(verbose=0, **given))
    expected, others, other_scale = fit()
    assert history["loss"] == expected["loss"]
    for a, b in zip(weights, others, strict=True):
        np.testing.assert_array_equal(a, b)
    assert scale == other_scale
    if given:
        points = dict(scalars(tmp_path, "loss_scale"))
        assert points[2 * len(X)] == scale


@pytest.mark.parametrize("scale", [0.0, np.inf])
def test_keras_own_at_an_unusable_scale_is_adopted_at_its_first(
    scale, tmp_path
):
    own = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), 2.0**10)
    model = make("mixed_float16", optimizer=own)
    own.build(model.trainable_variables)
    own.dynamic_scale.assign(scale)
    monitor = keras_mixprec.MixPrecMonitor(tmp_path, verbose=0)
    with pytest.warns(UserWarning, match="loss scale of"):
        model.fit(X, X[:, :1], verbose=0, callbacks=[monitor])
    assert float(model.optimizer.loss_scale) == 2.0**10
    assert model.optimizer.skipped_steps == 0


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras 3.14 has it"
)
def test_an_optimizer_of_several(tmp_path):
    o = keras.optimizers
    parts = o.OptimizerMap(o.SGD(0.1), {".*kernel": o.Adam(0.1)})
    model = make("mixed_float16", optimizer=o.MultiOptimizer(parts))
    ensure_loss_scaling(model)
    monitor = keras_mixprec.MixPrecMonitor(tmp_path, verbose=0)
    tuner = keras_mixprec.PrecisionTuner(verbose=0)
    before = model.get_weights()
    model.fit(X, X[:, :1], verbose=0, callbacks=[monitor, tuner])
    assert model.optimizer.attempted_steps == 1
    for a, b in zip(model.get_weights(), before, strict=True):
        assert np.any(a != b)
    assert keras_mixprec.diagnose(model, X, X[:, :1]) == []
