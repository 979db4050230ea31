"""Files: Keras' optimizer and ours read each other's, whole and once."""

import functools
import json
import os
import zipfile

import h5py
import keras
import numpy as np
import pytest
from keras import layers, ops
from optimizer_models import BACKEND, assert_identical, numbers

from keras_mixprec import (
    DynamicLossScale,
    FixedLossScale,
    LossScaleOptimizer,
    ScheduledLossScale,
)

X = np.linspace(-1, 1, 32, dtype="float32").reshape(16, 2)
Y = X[:, :1].copy()
Y[5] = np.nan
JIT = {} if BACKEND == "jax" else {"jit_compile": False}
SCALE = 2.0**12


def ours(inner=None, **arguments):
    return LossScaleOptimizer(
        inner or keras.optimizers.Adam(0.01),
        initial_scale=SCALE,
        dynamic_growth_steps=100,
        **arguments,
    )


def theirs(inner=None):
    return keras.optimizers.LossScaleOptimizer(
        inner or keras.optimizers.Adam(0.01),
        initial_scale=SCALE,
        dynamic_growth_steps=100,
    )


def bare():
    return keras.optimizers.Adam(0.01)


# Keras' wrapper looks for the inner state a second time, in vain: it has it.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Skipping variable loading for optimizer 'adam.*has 0 variables"
)
WRAPPERS = {"ours": ours, "Keras'": theirs}


def make(optimizer, units=3):
    model = keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(units, dtype="mixed_float16"),
            layers.Dense(1, dtype="float32"),
        ]
    )
    model.compile(optimizer, loss="mse", **JIT)
    return model


def built(optimizer, **arguments):
    """Keras' own optimizer reads a file only once it has its variables."""
    model = make(optimizer, **arguments)
    optimizer.build(model.trainable_variables)
    return model


@functools.cache
def trained(kind, policy="float32"):
    """Fitted once for all tests, which leave it as it is."""
    keras.config.set_dtype_policy(policy)
    model = make(kind())
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return model


def state(optimizer):
    inner = numbers(optimizer.inner_optimizer.variables)
    wrapper = numbers([optimizer.dynamic_scale, optimizer.step_counter])
    return inner + wrapper


def record(optimizer):
    return (
        optimizer.attempted_steps,
        optimizer.skipped_steps,
        # Without paths: those of a loaded model lack the model's name.
        list(optimizer.overflow_counts().values()),
        [s[:2] + tuple(s.kinds.values()) for s in optimizer.nonfinite_steps()],
        optimizer.nonfinite_counts(),
    )


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("reader", WRAPPERS)
@pytest.mark.parametrize("writer", WRAPPERS)
def test_weights_files(writer, reader, policy, tmp_path):
    model = trained(WRAPPERS[writer])
    assert int(model.optimizer.iterations) == 6
    model.save_weights(tmp_path / "w.weights.h5")
    keras.config.set_dtype_policy(policy)
    other = built(WRAPPERS[reader]())
    other.load_weights(tmp_path / "w.weights.h5")
    assert_identical(state(other.optimizer), state(model.optimizer))
    if writer == reader == "ours":
        assert record(other.optimizer) == record(model.optimizer)
        assert record(other.optimizer)[:2] == (8, 2)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("writer", WRAPPERS)
def test_model_files(writer, policy, tmp_path):
    model = trained(WRAPPERS[writer])
    model.save(tmp_path / "m.keras")
    keras.config.set_dtype_policy(policy)
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert type(loaded.optimizer) is type(model.optimizer)
    assert_identical(state(loaded.optimizer), state(model.optimizer))
    if writer == "ours":
        assert record(loaded.optimizer) == record(model.optimizer)


def test_a_loaded_model_trains_on(tmp_path):
    trained(ours).save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    loaded.fit(X, Y, batch_size=4, verbose=0)
    assert np.isfinite(loaded.get_weights()[0]).all()
    assert loaded.optimizer.attempted_steps == 12


@pytest.mark.parametrize("reader", WRAPPERS)
@pytest.mark.parametrize("writer", WRAPPERS)
def test_a_model_file_read_as_weights(writer, reader, tmp_path):
    model = trained(WRAPPERS[writer])
    model.save(tmp_path / "m.keras")
    other = built(WRAPPERS[reader]())
    other.load_weights(tmp_path / "m.keras")
    assert_identical(state(other.optimizer), state(model.optimizer))


def test_the_file_of_a_model_that_keras_wrapped_by_itself(tmp_path):
    model = trained(bare, "mixed_float16")
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    model.save_weights(tmp_path / "w.weights.h5")
    keras.config.set_dtype_policy("float32")
    other = built(ours())
    other.load_weights(tmp_path / "w.weights.h5")
    assert_identical(state(other.optimizer), state(model.optimizer))


def test_the_file_of_a_bare_optimizer(tmp_path):
    model = trained(bare)
    model.save_weights(tmp_path / "w.weights.h5")
    other = built(ours())
    other.load_weights(tmp_path / "w.weights.h5")
    inner = other.optimizer.inner_optimizer
    assert_identical(
        numbers(inner.variables), numbers(model.optimizer.variables)
    )
    assert float(other.optimizer.loss_scale) == SCALE


@pytest.mark.parametrize("writer", WRAPPERS)
def test_an_optimizer_that_is_not_built_waits_for_its_variables(
    writer, tmp_path
):
    model = trained(WRAPPERS[writer])
    model.save_weights(tmp_path / "w.weights.h5")
    other = make("sgd")
    other.optimizer = ours()
    other.load_weights(tmp_path / "w.weights.h5")
    assert not other.optimizer.built
    other.optimizer.build(other.trainable_variables)
    assert_identical(state(other.optimizer), state(model.optimizer))
    if writer == "ours":
        assert record(other.optimizer) == record(model.optimizer)


@pytest.mark.parametrize("saved", [0.0, np.inf, np.nan, -1.0])
def test_a_collapsed_scale_is_repaired(saved, tmp_path):
    model = trained(theirs)
    model.save_weights(tmp_path / "w.weights.h5")
    with h5py.File(tmp_path / "w.weights.h5", "r+") as file:
        file["optimizer/vars/3"][...] = saved
    other = built(ours())
    with pytest.warns(UserWarning, match="has a loss scale of"):
        other.load_weights(tmp_path / "w.weights.h5")
    assert float(other.optimizer.loss_scale) == SCALE
    assert int(other.optimizer.iterations) == int(model.optimizer.iterations)


def test_a_fixed_scale_is_not_taken_from_the_file(tmp_path):
    model = trained(theirs)
    model.save_weights(tmp_path / "w.weights.h5")
    other = built(LossScaleOptimizer(bare(), 512.0))
    other.load_weights(tmp_path / "w.weights.h5")
    assert float(other.optimizer.loss_scale) == 512.0


def test_a_file_that_does_not_match_says_so(tmp_path):
    model = trained(ours)
    model.save_weights(tmp_path / "w.weights.h5")
    other = built(ours(keras.optimizers.SGD()))
    with pytest.warns(UserWarning, match="was not loaded.*do not match"):
        other.load_weights(tmp_path / "w.weights.h5")
    assert int(other.optimizer.iterations) == 0


def weights_of(path):
    with zipfile.ZipFile(path) as archive:
        return h5py.File(archive.open("model.weights.h5"))


def test_the_state_is_stored_once(tmp_path):
    for name, kind in (("ours", ours), ("bare", bare)):
        built(kind(), units=500).save(tmp_path / f"{name}.keras")
    file = weights_of(tmp_path / "ours.keras")
    assert sorted(file["optimizer"]) == ["history", "vars"]
    sizes = [os.path.getsize(tmp_path / f"{n}.keras") for n in ("ours", "bare")]
    # 20 scalars and counters of 4 variables, each with HDF5's header.
    assert sizes[0] - sizes[1] < 6_000


RULES = {
    "dynamic": DynamicLossScale(hysteresis=3, growth_factor=4.0),
    "preset": DynamicLossScale.preset("deepspeed"),
    "fixed": FixedLossScale(64.0),
    "table": ScheduledLossScale({0: 8.0, 3: 16.0}),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_rule_survives_the_file(rule, tmp_path):
    model = built(LossScaleOptimizer(bare(), rule))
    for value in (1.0, np.nan, np.nan):
        gradients = [ops.full(w.shape, value) for w in model.weights]
        model.optimizer.apply(gradients)
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert loaded.optimizer.rule == rule
    assert record(loaded.optimizer) == record(model.optimizer)


def test_from_config_leaves_the_dict_alone():
    config = ours().get_config()
    text = json.dumps(config)
    for kind in (LossScaleOptimizer, LossScaleOptimizer):
        assert kind.from_config(config).initial_scale == SCALE
    assert json.dumps(config) == text
    assert keras.optimizers.LossScaleOptimizer.from_config(config)
