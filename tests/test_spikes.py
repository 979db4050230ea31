"""Steps whose gradients are far out of their recent range."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_mixprec as kmp
from keras_mixprec.numerics.rehearsal import rates_of, rehearse
from tests.monitor_models import every_backend

ROWS, STEPS, BAD = 8, 200, 150
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS * STEPS, 8)).astype("float32")
Y = np.tanh(X[:, :1] + X[:, 1:2] ** 2)
# The compiled step decides by itself.
JITS = [False, True] if keras.backend.backend() != "torch" else [False]


def model_of(policy="float32", jit=False, norm=True):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    parts = [layers.Dense(16, activation="relu", name="hidden")]
    parts += [layers.BatchNormalization()] * norm
    parts += [layers.Dense(1, name="head", dtype="float32")]
    model = keras.Sequential([keras.Input((8,)), *parts])
    optimizer = keras.optimizers.Adam(0.01, use_ema=True)
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=jit)
    return model


def fit(model, *callbacks, x=X, y=Y):
    how = {"batch_size": ROWS, "shuffle": False, "verbose": 0}
    return model.fit(x, y, callbacks=[*callbacks], **how).history


def rows(first, count):
    return slice(first * ROWS, (first + count) * ROWS)


def tuner():
    return kmp.PrecisionTuner(verbose=0, recover=True)


def state(model):
    variables = *model.variables, *model.optimizer.inner_optimizer.variables
    return [keras.ops.convert_to_numpy(v) for v in variables]


@every_backend
@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize(
    ("policy", "count"), [("float32", 1), ("mixed_bfloat16", 6)]
)
def test_a_run_is_as_if_it_had_not_seen_the_spikes(policy, jit, count):
    y = Y.copy()
    y[rows(BAD, count)] *= 300
    model, repaired = model_of(policy, jit), tuner()
    losses = fit(model, repaired, y=y)
    x, y = (np.delete(a, np.r_[rows(BAD, count)], axis=0) for a in (X, Y))
    other = model_of(policy, jit)
    assert losses == fit(other, tuner(), x=x, y=y)
    np.testing.assert_equal(state(model), state(other))
    spikes = [e for e in repaired.history if e["kind"] == "spikes"]
    assert sum(event["count"] for event in spikes) == count


@every_backend
def test_lost_weights_that_are_finite_are_put_back():
    sound, model = model_of(norm=False), model_of(norm=False)

    def flip(batch, logs):
        if batch == BAD:
            kernel = flipping.model.get_layer("hidden").kernel
            kernel.assign(np.array(keras.ops.convert_to_numpy(kernel)) * 2**13)

    fit(sound)
    repaired = tuner()
    flipping = keras.callbacks.LambdaCallback(on_train_batch_begin=flip)
    fit(model, repaired, flipping)
    (back,) = (e for e in repaired.history if e["kind"] == "return")
    assert back["to"] == 128
    losses = [m.evaluate(X, Y, verbose=0)[0] for m in (model, sound)]
    assert losses[0] < 2 * losses[1]


@every_backend
def test_larger_gradients_become_usual():
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(1.0), 1.0)
    weight = keras.Variable([0.0, 0.0])
    optimizer.build([weight])
    optimizer.skip_spikes()
    taken = []
    # 9 times the largest is none, 11 times is; 64 steps are compared with.
    sizes = [1.0] * 63 + [30.0, 270.0, 3000.0] + [1.0] * 99 + [3000.0] * 140
    for size in sizes:
        before = int(optimizer.iterations)
        optimizer.apply(
            [keras.ops.convert_to_tensor([0.6 * size, -0.8 * size])]
        )
        taken.append(int(optimizer.iterations) > before)
    usual = [True] * 65 + [False] + [True] * 99
    assert taken == usual + [False] * 128 + [True] * 12
    assert optimizer.skipped_steps == 0
    assert optimizer.spikes.read().last == pytest.approx(100 / 9)


@every_backend
@pytest.mark.parametrize("jit", JITS)
def test_a_rehearsal_takes_spikes(jit):
    model = model_of(jit=jit, norm=False)
    model.optimizer = kmp.LossScaleOptimizer("adam", 1.0)
    model.optimizer.build(model.trainable_variables)
    model.optimizer.skip_spikes()
    fit(model)
    gate, spike = model.optimizer.spikes, (X[:ROWS], 1e4 * Y[:ROWS])
    first, second = rehearse(model, [spike], 2, rates_of(model)).losses
    assert first != second
    fit(model, x=spike[0], y=spike[1])
    assert gate.read().skipped == 1


def test_a_tuner_leaves_nothing_behind():
    model = model_of()
    fit(model, tuner())
    y = Y.copy()
    y[rows(BAD, 1)] *= 300
    before = int(model.optimizer.iterations)
    fit(model, y=y)
    assert int(model.optimizer.iterations) == before + STEPS


def test_samples_of_other_sizes_are_no_spikes():
    rare = np.where(np.arange(len(X)) % 1000 == 700, 20.0, 1.0)
    sizes = rare * np.exp(RANDOM.normal(size=len(X)))
    repaired = tuner()
    fit(model_of(norm=False), repaired, y=Y * sizes[:, None])
    assert not [e for e in repaired.history if e["kind"] == "spikes"]


def test_data_that_change_for_good_are_trained_on():
    y = Y.copy()
    y[rows(BAD, STEPS)] *= 300
    model, repaired = model_of(norm=False), tuner()
    fit(model, repaired, y=y)
    # Until the next reading, and then no more.
    assert [event["kind"] for event in repaired.history] == ["spikes"]
    assert int(model.optimizer.iterations) > STEPS - 30
