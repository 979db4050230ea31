"""Why a run diverged, and the way back to its last good state."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_mixprec as kmp
from tests import scale_use_models
from tests.monitor_models import every_backend, monitor

ROWS, STEPS = 16, 24
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS * STEPS, 8)).astype("float32")
Y = X[:, :1] + 0.1
dense = layers.Dense


def model_of(*inner, optimizer, policy, loss="mse", shape=(8,)):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input(shape), *(make() for make in inner)])
    if policy == "mixed_float16":
        optimizer = kmp.LossScaleOptimizer(optimizer)
    model.compile(optimizer, loss, jit_compile=False)
    return model


def usual():
    return [
        lambda: dense(16, activation="relu", name="hidden"),
        lambda: dense(1, name="head", dtype="float32"),
    ]


def penalized():
    penalty = keras.regularizers.L2(1e6)
    return [lambda: dense(16, name="hidden", kernel_regularizer=penalty)] + (
        usual()[1:]
    )


SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam
PENALTY = {"cause": "penalty", "largest_of": "hidden"}
# Layers, optimizer, factors of inputs and targets, the numbers to find.
RUNS = {
    "rate": (usual, lambda: SGD(100.0), 1, 1, {"cause": "learning_rate"}),
    "adam": (usual, lambda: ADAM(50.0), 1, 1, {"cause": "learning_rate"}),
    "penalty": (penalized, lambda: SGD(0.01), 1, 1, PENALTY),
    "inputs": (usual, lambda: SGD(0.05), 1e3, 1, {"cause": "inputs"}),
    "targets": (usual, lambda: SGD(0.05), 1, 1e6, {"cause": "targets"}),
}
POLICIES = ["mixed_float16", "mixed_bfloat16", "float32"]
CASES = [
    (name, POLICIES[n % 3], bool(n % 2)) for n, name in enumerate(RUNS)
] + [
    ("rate", "float32", True),
    ("rate", "float32", False),
    ("targets", "mixed_float16", False),
]


def fit(model, *callbacks, x=X, y=Y, epochs=2):
    return model.fit(
        x, y, ROWS, epochs, verbose=0, shuffle=False, callbacks=[*callbacks]
    ).history["loss"]


@every_backend
@pytest.mark.parametrize(("name", "policy", "tuned"), CASES)
def test_the_cause_is_named_and_no_layer_is(name, policy, tuned, tmp_path):
    make, optimizer, of_x, of_y, numbers = RUNS[name]
    model = model_of(*make(), optimizer=optimizer(), policy=policy)
    watcher, tuner = monitor(tmp_path), kmp.PrecisionTuner(verbose=0)
    fit(model, *[watcher, tuner][: 1 + tuned], x=X * of_x, y=Y * of_y)
    verdict = watcher.verdicts[0]
    assert (verdict.kind, verdict.layer) == ("divergence", None)
    assert numbers.items() <= verdict.numbers.items()
    assert not any(v.layer for v in watcher.verdicts)
    if numbers["cause"] == "learning_rate":
        rate = float(keras.ops.convert_to_numpy(optimizer().learning_rate))
        assert verdict.numbers["learning_rate"] == pytest.approx(rate)
        assert f"{verdict.numbers['holds']:g}" in verdict.advice


def test_a_schedule_that_raised_the_rate_is_told_and_lowered(tmp_path):
    jump = keras.optimizers.schedules.PiecewiseConstantDecay([70], [1e-3, 1e3])
    model = model_of(*usual(), optimizer=SGD(jump), policy="mixed_float16")
    watcher = monitor(tmp_path)
    tuner = kmp.PrecisionTuner(verbose=0, recover=True)
    losses = fit(model, watcher, tuner, epochs=8)
    numbers = watcher.verdicts[0].numbers
    assert numbers["learning_rate"] == 1e3
    assert numbers["learning_rate_before"] == pytest.approx(1e-3)
    assert numbers["since"] == 64
    assert next(e["to"] for e in tuner.history if "to" in e) == 64
    assert losses[-1] < 2.0


LAYERS = {
    "log(0)": lambda x: keras.ops.log(keras.ops.relu(x) * 0.0),
    " / 0": lambda x: x / keras.ops.relu(-keras.ops.abs(x)),
    "exp(1000)": lambda x: keras.ops.exp(x * 0.0 + 1000.0),
}


@every_backend
@pytest.mark.parametrize("operation", LAYERS)
def test_the_operation_that_float32_cannot_do_is_named(operation):
    own = layers.Lambda(LAYERS[operation], name="own")
    model = model_of(
        *usual()[:1],
        lambda: own,
        *usual()[1:],
        optimizer=ADAM(),
        policy="mixed_float16",
    )
    (verdict,) = kmp.diagnose(model, X[:8], Y[:8])
    assert verdict.kind == "divergence"
    assert verdict.numbers["in_layer"] == "own"
    assert verdict.numbers["operation"].endswith(operation)
    assert "'own'" in verdict.advice


def test_numbers_that_grow_are_told_where_they_grow_the_most():
    great = keras.initializers.RandomNormal(stddev=1e15)
    hidden = [
        lambda: dense(8, name="first"),
        lambda: dense(8, name="great", kernel_initializer=great),
        lambda: dense(8, name="second", kernel_initializer=great),
    ]
    model = model_of(*hidden, *usual()[1:], optimizer=ADAM(), policy="float32")
    (verdict,) = kmp.diagnose(model, X[:8], Y[:8])
    assert verdict.numbers["in_layer"] in ("great", "second")
    assert verdict.numbers["largest_output"] > 1e10


@every_backend
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["rate", "adam"])
def test_training_goes_on_from_the_last_good_state(name, policy, tmp_path):
    make, optimizer, *_ = RUNS[name]
    model = model_of(*make(), optimizer=optimizer(), policy=policy)
    tuner = kmp.PrecisionTuner(verbose=0, recover=True)
    losses = fit(model, monitor(tmp_path), tuner, epochs=6)
    assert [event["kind"] for event in tuner.history][:1] == ["return"]
    assert losses[-1] < 2.0
    assert all(np.isfinite(w).all() for w in model.get_weights())
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    assert run["headline"]["state"] == "repaired"


@every_backend
def test_what_is_returned_to_is_what_was(tmp_path):
    model = model_of(*penalized(), optimizer=SGD(0.01), policy="float32")
    before = [w.copy() for w in model.get_weights()]
    tuner = kmp.PrecisionTuner(verbose=0, recover=True)
    fit(model, tuner)
    # A penalty is the user's to change.
    assert model.stop_training
    assert tuner.history[0]["done"] is None
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("most", [0, 1])
def test_it_returns_so_often_and_no_more(most, tmp_path):
    def again(batch, logs):
        """Sets the learning rate again after the tuner lowered it."""
        inner = raising.model.optimizer.inner_optimizer
        inner.learning_rate.assign(100.0)

    raising = keras.callbacks.LambdaCallback(on_train_batch_begin=again)
    model = model_of(*usual(), optimizer=SGD(100.0), policy="mixed_float16")
    tuner = kmp.PrecisionTuner(verbose=0, recover=True, max_returns=most)
    fit(model, tuner, raising, epochs=8)
    returns = [e for e in tuner.history if e["kind"] == "return"]
    assert len(returns) == most + 1
    assert returns[-1]["done"] is None
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_bad_rows_lose_no_weights_without_a_loss_scale(tmp_path):
    model = model_of(*usual(), optimizer=ADAM(), policy="mixed_bfloat16")
    y = Y.copy()
    y[40] = np.nan
    losses = fit(model, kmp.PrecisionTuner(verbose=0, recover=True), y=y)
    assert np.isfinite(losses).all()


@every_backend
@pytest.mark.parametrize("recover", [None, False, True])
def test_weights_lost_in_the_last_steps_are_told(recover, tmp_path):
    # Nothing counts here: no loss scale, and a `train_step` without a loss.
    step = scale_use_models.Step(scaled=lambda model, loss: loss)
    model = model_of(*usual(), optimizer=SGD(0.01), policy="float32")
    scale_use_models.with_step(model, step)

    def lose(batch, logs):
        if batch == STEPS - 2:
            losing.model.layers[0].bias.assign(np.full(16, np.nan))

    losing = keras.callbacks.LambdaCallback(on_train_batch_begin=lose)
    watcher = monitor(tmp_path)
    own = kmp.PrecisionTuner(verbose=0, recover=bool(recover))
    callbacks = [watcher] + [own] * (recover is not None)
    model.fit(X, Y, ROWS, verbose=0, callbacks=[*callbacks, losing])
    assert "weights_lost" in {v.kind for v in watcher.verdicts}
    finite = all(np.isfinite(w).all() for w in model.get_weights())
    assert finite == (recover is True)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("rate", "noise"), [(0.01, 0.0), (0.05, 1.0)])
def test_a_healthy_run_is_as_it_would_be(rate, noise, policy, tmp_path):
    y, losses = Y + noise * RANDOM.normal(size=Y.shape), []
    for watched in (False, True):
        optimizer = SGD(rate) if noise else ADAM(rate)
        model = model_of(*usual(), optimizer=optimizer, policy=policy)
        tuner = kmp.PrecisionTuner(verbose=0, recover=True)
        callbacks = [monitor(tmp_path), tuner] * watched
        losses.append(fit(model, *callbacks, y=y, epochs=8))
    assert tuner.history == []
    assert losses[0] == losses[1]
