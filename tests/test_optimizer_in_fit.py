"""The optimizer in `compile` and `fit`, and what reaches through it."""

import keras
import numpy as np
import pytest
from keras import layers
from monitor_models import scalars
from optimizer_models import (
    QUICK,
    assert_identical,
    make_variables,
    numbers,
    rarely,
    stepper,
)

import keras_mixprec as kmp
from keras_mixprec import LossScaleOptimizer, ensure_loss_scaling

sgd = keras.optimizers.SGD
keras_own = keras.optimizers.LossScaleOptimizer
X = np.linspace(-1, 1, 8, dtype="float32").reshape(4, 2)
Y = X[:, :1]


def make(policy, optimizer="sgd"):
    """Only its first layer follows the policy."""
    model = keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(3, dtype=policy),
            layers.Dense(1, dtype="float32"),
        ]
    )
    model.compile(optimizer, loss="mse", **QUICK)
    return model


def made_under_another_policy():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    kmp.apply_policy(model, "float32")
    model.compile("sgd", loss="mse", **QUICK)
    return model


def nested():
    inner = keras.Sequential([layers.Dense(2, dtype="mixed_float16")])
    model = keras.Sequential([keras.Input((2,)), inner, layers.Dense(1)])
    model.compile("sgd", loss="mse", **QUICK)
    return model


def policy_map():
    return make(keras.dtype_policies.DTypePolicyMap("mixed_float16"))


def with_a_factor():
    return make("mixed_float16", sgd(loss_scale_factor=8.0))


# Models, and whether they need loss scaling.
MODELS = {
    "float16 layers": (lambda: make("mixed_float16"), True),
    "a policy map": (policy_map, True),
    "pure float16": (lambda: make("float16"), True),
    "a nested model": (nested, True),
    "float32 behind an input": (made_under_another_policy, False),
    "float32": (lambda: make("float32"), False),
    "bfloat16": (lambda: make("mixed_bfloat16"), False),
    "ours": (lambda: make("mixed_float16", LossScaleOptimizer("sgd")), False),
    "Keras' own": (lambda: make("mixed_float16", keras_own(sgd())), False),
    "a fixed factor": (with_a_factor, False),
}


@pytest.mark.parametrize(
    "name", ["float16 layers", *map(rarely, list(MODELS)[1:])]
)
def test_an_optimizer_is_wrapped_where_it_is_needed(name):
    build, is_needed = MODELS[name]
    model = build()
    plain = model.optimizer
    if not is_needed:
        assert ensure_loss_scaling(model) is model.optimizer is plain
        return
    model.fit(X, Y, verbose=0)
    optimizer = ensure_loss_scaling(model)
    assert isinstance(optimizer, LossScaleOptimizer)
    assert ensure_loss_scaling(model) is model.optimizer is optimizer
    assert optimizer.inner_optimizer is plain
    # Between two fits the state stays.
    assert int(optimizer.iterations) == 1
    model.fit(X, Y, verbose=0)
    weights = model.get_weights()
    model.fit(X, Y * np.nan, verbose=0)
    assert optimizer.step_counts() == (2, 1, 1)
    assert_identical(model.get_weights(), weights)


@pytest.mark.parametrize("how", ["ensure", "callback"])
def test_what_takes_the_place_of_an_optimizer_is_of_the_public_class(
    how, tmp_path
):
    own = keras_own(keras.optimizers.Adam(0.25), initial_scale=64.0)
    if how == "ensure":
        model = make("mixed_float16", own.inner_optimizer)
        optimizer = ensure_loss_scaling(model)
    else:
        model = make("mixed_float16", own)
        callback = kmp.MixPrecMonitor(tmp_path, verbose=0)
        model.fit(X, Y, verbose=0, callbacks=[callback])
        optimizer = model.optimizer
        assert optimizer.get_config() == own.get_config()
    assert isinstance(optimizer, LossScaleOptimizer)
    plain = LossScaleOptimizer("sgd")
    assert repr(optimizer).split(" at ")[0] == repr(plain).split(" at ")[0]
    config = keras.saving.serialize_keras_object(optimizer)
    copy = keras.saving.deserialize_keras_object(config)
    assert type(copy) is LossScaleOptimizer
    keras_own.from_config(optimizer.get_config())


class Capped(keras_own):
    """What a user derives from Keras' own, to hold the scale down."""

    def scale_loss(self, loss):
        if self.built:
            scale = keras.ops.minimum(self.dynamic_scale, 64.0)
            self.dynamic_scale.assign(scale)
        return super().scale_loss(loss)


@pytest.mark.parametrize("kind", ["MixPrecMonitor", rarely("PrecisionTuner")])
def test_a_subclass_of_keras_own_is_never_exchanged(kind, tmp_path):
    given = {"log_dir": tmp_path} if "Monitor" in kind else {}
    callback = getattr(kmp, kind)(verbose=0, **given)
    runs = []
    for callbacks in ([callback], []):
        keras.utils.set_random_seed(0)
        own = Capped(sgd(0.5), 64.0, dynamic_growth_steps=2)
        model = make("mixed_float16", own)
        arguments = {"batch_size": 1, "epochs": 2, "verbose": 0}
        history = model.fit(X, Y, callbacks=callbacks, **arguments).history
        assert model.optimizer is own
        state = [*model.weights, own.dynamic_scale]
        runs.append((history["loss"], numbers(state)))
    (losses, values), (expected, others) = runs
    assert losses == expected
    assert_identical(values, others)
    if given:
        points = scalars(tmp_path, "loss_scale")
        assert points[2 * len(X)] == values[-1]


@pytest.mark.parametrize("scale", [0.0, rarely(np.inf)])
def test_keras_own_at_an_unusable_scale_is_adopted_at_its_first(
    scale, tmp_path
):
    own = keras_own(sgd(), 2.0**10)
    model = make("mixed_float16", own)
    own.build(model.trainable_variables)
    own.dynamic_scale.assign(scale)
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0)
    with pytest.warns(UserWarning, match="loss scale of"):
        model.fit(X, Y, verbose=0, callbacks=[monitor])
    assert float(model.optimizer.loss_scale) == 2.0**10
    assert model.optimizer.skipped_steps == 0


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras 3.14 has it"
)
def test_an_optimizer_of_several(tmp_path):
    o = keras.optimizers
    parts = o.OptimizerMap(o.SGD(0.1), {".*kernel": o.Adam(0.1)})
    model = make("mixed_float16", o.MultiOptimizer(parts))
    ensure_loss_scaling(model)
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0)
    tuner = kmp.PrecisionTuner(verbose=0)
    before = model.get_weights()
    model.fit(X, Y, verbose=0, callbacks=[monitor, tuner])
    assert model.optimizer.attempted_steps == 1
    for a, b in zip(model.get_weights(), before, strict=True):
        assert np.any(a != b)
    assert kmp.diagnose(model, X, Y) == []


ARGUMENTS = {
    "weight_decay": (0.1, 0.2),
    "clipnorm": (1.0, 2.0),
    "clipvalue": (1.0, 2.0),
    "global_clipnorm": (1.0, 2.0),
    "use_ema": (True, False),
    "ema_momentum": (0.5, 0.25),
    "ema_overwrite_frequency": (2, 3),
    "gradient_accumulation_steps": (2, 4),
    "beta_1": (0.5, 0.75),
    "epsilon": (1e-4, 1e-5),
    "learning_rate": (0.5, 0.25),
}


@pytest.mark.one_backend
@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_attribute_reads_and_writes_the_inner_one(name):
    first, second = ARGUMENTS[name]
    inner = keras.optimizers.Adam(**{name: first})
    optimizer = LossScaleOptimizer(inner)
    assert float(getattr(optimizer, name)) == first
    setattr(optimizer, name, second)
    assert float(getattr(inner, name)) == second
    assert float(getattr(optimizer, name)) == second


@pytest.mark.one_backend
def test_what_the_inner_optimizer_lacks():
    optimizer = LossScaleOptimizer("sgd")
    with pytest.raises(AttributeError, match="beta_1"):
        _ = optimizer.beta_1
    assert not hasattr(optimizer, "_no_such_thing")
    optimizer.note = "mine"
    assert optimizer.note == "mine"
    assert not hasattr(optimizer.inner_optimizer, "note")


def test_excluded_from_weight_decay_takes_effect():
    variables = make_variables((2,), (2,))
    optimizer = LossScaleOptimizer(sgd(0.5, weight_decay=0.5))
    optimizer.exclude_from_weight_decay(var_list=[variables[0]])
    gradients = [keras.ops.zeros(2)] * 2
    optimizer.apply(gradients, variables)
    first, second = numbers(variables)
    np.testing.assert_array_equal(first, [1, 1])
    np.testing.assert_array_equal(second, [0.75, 0.75])


def test_finalize_writes_the_averages_into_the_weights():
    inner = sgd(1.0, use_ema=True, ema_momentum=0.5)
    optimizer, variables, apply = stepper(
        "eager", (1,), inner=inner, loss_scale=1.0
    )
    for _ in range(2):
        apply([np.ones(1, "float32")])
    optimizer.finalize_variable_values(variables)
    np.testing.assert_array_equal(numbers(variables)[0], [-0.5])


def test_apply_gradients_returns_iterations():
    variables = make_variables((1,))
    optimizer = LossScaleOptimizer("sgd")
    told = []
    for value in (1.0, np.nan, 1.0):
        gradient = keras.ops.convert_to_tensor([value])
        told.append(int(optimizer.apply_gradients([(gradient, variables[0])])))
    assert told == [1, 1, 2]
    assert optimizer.attempted_steps == 3
    # It lists its own and the inner variables once.
    listed = [id(v) for v in optimizer.variables]
    assert len(set(listed)) == len(listed)
    assert {id(v) for v in optimizer.inner_optimizer.variables} < set(listed)
    assert id(variables[0]) not in listed


LINE = np.linspace(-1, 1, 16, dtype="float32")[:, None]


def fit(*callbacks, epochs=2, targets=LINE, **inner):
    """Trains on four batches an epoch; returns the model."""
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    model.compile(LossScaleOptimizer(sgd(0.25, **inner)), "mse", **QUICK)
    arguments = {"epochs": epochs, "batch_size": 4, "verbose": 0}
    model.fit(LINE, targets, callbacks=list(callbacks), **arguments)
    return model


def test_callbacks_that_set_the_learning_rate():
    def rate(epoch):
        return 0.5**epoch

    schedule = keras.callbacks.LearningRateScheduler(rate)
    # It sees the loss unscaled.
    model = fit(schedule, keras.callbacks.TerminateOnNaN(), epochs=3)
    assert float(model.optimizer.inner_optimizer.learning_rate) == 0.25
    assert int(model.optimizer.iterations) == 12
    plateau = keras.callbacks.ReduceLROnPlateau(
        monitor="loss", factor=0.5, patience=1, min_delta=1e9
    )
    assert float(fit(plateau, epochs=4).optimizer.learning_rate) == 0.25 / 8


def test_swap_ema_weights():
    model = fit(use_ema=True, ema_momentum=0.5, epochs=1)
    inner = model.optimizer.inner_optimizer
    averages = numbers(inner._model_variables_moving_average)
    ones = [np.ones_like(w) for w in averages]
    model.set_weights(ones)
    swap = keras.callbacks.SwapEMAWeights()
    swap.set_model(model)
    for event, expected in (
        (swap.on_test_begin, averages),
        (swap.on_test_end, ones),
    ):
        event()
        # The callback swaps by adding and subtracting.
        for a, b in zip(numbers(model.weights), expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_backup_and_restore(tmp_path):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    targets = LINE.copy()
    targets[[2, 9]] = np.nan
    restore = keras.callbacks.BackupAndRestore
    with pytest.raises(KeyboardInterrupt):
        fit(restore(tmp_path), Interrupt(), epochs=4, targets=targets)
    optimizer = fit(restore(tmp_path), epochs=4, targets=targets).optimizer
    # Two bad batches of four in each of four epochs.
    assert optimizer.attempted_steps == 16
    assert optimizer.skipped_steps + int(optimizer.iterations) == 16
    assert float(optimizer.loss_scale) == 2.0**15 / 2**optimizer.skipped_steps
