"""Steps whose gradients are far out of their recent range."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_mixprec as kmp
from keras_mixprec.numerics.rehearsal import rates_of, rehearse
from tests.monitor_models import every_backend, monitor

ROWS, STEPS, BAD, NORM = 8, 200, 150, "norm"
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS * STEPS, 8)).astype("float32")
Y = np.tanh(X[:, :1] + X[:, 1:2] ** 2)
# The compiled step decides by itself.
JITS = [False, True] if keras.backend.backend() != "torch" else [False]


def model_of(policy="float32", jit=False, norm=True):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    parts = [layers.Dense(16, activation="relu", name="hidden")]
    parts += [layers.BatchNormalization(name=NORM)] * norm
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


def spoil(step, layer, name, factor):
    """Multiplies a variable by a factor at a step."""

    def at(batch, logs):
        if batch == step:
            variable = getattr(spoiling.model.get_layer(layer), name)
            variable.assign(keras.ops.multiply(variable.value, factor))

    spoiling = keras.callbacks.LambdaCallback(on_train_batch_begin=at)
    return spoiling


@every_backend
@pytest.mark.parametrize(
    ("parts", "to"),
    [
        ((BAD, "hidden", "kernel", 2.0**13), 128),
        # Before there are enough steps to tell a spike by.
        ((30, "hidden", "kernel", 2.0**13), 0),
        ((BAD, NORM, "moving_variance", np.inf), 128),
    ],
)
def test_lost_weights_are_put_back_and_training_goes_on(parts, to):
    sound, model = (model_of(norm=NORM in parts) for _ in range(2))
    fit(sound)
    repaired = tuner()
    loss = fit(model, repaired, spoil(*parts))["loss"]
    (back,) = (e for e in repaired.history if e["kind"] == "return")
    assert back["to"] == to
    assert not model.stop_training
    losses = [m.evaluate(X, Y, verbose=0)[0] for m in (model, sound)]
    assert losses[0] < 2 * losses[1]
    # The epoch's results are of the steps since then.
    assert loss[0] < 1


@every_backend
@pytest.mark.parametrize("place", [0, 1])
def test_a_backup_restores_the_optimizer_wherever_the_tuner_is(place, tmp_path):
    states = []

    def note(epoch, logs):
        states.append(state(noting.model))
        if epoch == 1:
            raise InterruptedError

    noting = keras.callbacks.LambdaCallback(on_epoch_begin=note)
    for _ in range(2):
        callbacks = [keras.callbacks.BackupAndRestore(tmp_path), noting]
        callbacks.insert(place, tuner())
        options = {"epochs": 2, "verbose": 0, "callbacks": callbacks}
        with pytest.raises(InterruptedError):
            model_of().fit(X[:80], Y[:80], **options)
    np.testing.assert_equal(*states[1:])


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


@pytest.mark.parametrize("rate", ["at once", "slowly"])
def test_data_that_change_for_good_are_trained_on(rate, tmp_path):
    place = np.arange(len(X)) / ROWS - BAD
    factor = np.where(place < 0, 1, 300)
    if rate == "slowly":
        factor = 100 * np.arange(len(X)) / len(X)
    model, repaired = model_of(norm=False), tuner()
    watcher = monitor(tmp_path)
    fit(model, repaired, watcher, y=Y * factor[:, None])
    assert not watcher.verdicts
    # Until the next reading, and then no more.
    kinds = [event["kind"] for event in repaired.history]
    assert kinds == ["spikes"] * (rate == "at once")
    assert int(model.optimizer.iterations) > STEPS - 30


def test_a_plan_of_float16_gets_a_scale_that_adapts(tmp_path):
    file = tmp_path / "plan.json"
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(4), layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    kmp.apply_policy(keras.models.clone_model(model), "mixed_float16").save(
        file
    )
    tuner = kmp.PrecisionTuner(plan=file, recover=True, verbose=0)
    model.evaluate(X[:8], Y[:8], verbose=0, callbacks=[tuner])
    assert not isinstance(model.optimizer, kmp.LossScaleOptimizer)
    model.fit(X[:64], Y[:64], verbose=0, callbacks=[tuner])
    assert isinstance(model.optimizer.rule, kmp.DynamicLossScale)
