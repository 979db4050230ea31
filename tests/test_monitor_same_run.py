"""A monitored run is the run that it watches."""

import keras
import numpy as np
import pytest
from monitor_models import BACKEND, JITS, OPTIMIZERS, monitor, scalars
from optimizer_models import numbers

import keras_mixprec as kmp

RNG = np.random.default_rng(1)
X = RNG.normal(size=(96, 8)).astype("float32")
Y = RNG.integers(0, 3, size=96)
# XLA takes seconds over each; TensorFlow adopts Keras' own op by op as well.
COMPILED = ("ours", "keras") if BACKEND == "jax" else ("ours",)
WRAPPERS = OPTIMIZERS | {"none": None}


def network(wrap, jit):
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy("mixed_float16" if wrap else "float32")
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(3),
        ]
    )
    model.compile(
        (wrap or OPTIMIZERS["auto"])(keras.optimizers.Adam(0.01)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=["sparse_categorical_crossentropy"],
        jit_compile=jit,
    )
    return model


def trained(wrap, jit, callbacks):
    model = network(wrap, jit)
    history = []
    for _ in range(2):
        history += model.fit(
            X,
            Y,
            batch_size=16,
            epochs=2,
            verbose=0,
            validation_data=(X[:32], Y[:32]),
            callbacks=list(callbacks),
        ).history.items()
    return history, numbers(model.variables)


@pytest.mark.parametrize(
    ("name", "jit"),
    [(n, j) for n in WRAPPERS for j in JITS if n in COMPILED or not j],
)
def test_losses_metrics_and_weights_are_the_same(name, jit, tmp_path):
    wrap = WRAPPERS[name]
    watched = trained(wrap, jit, [monitor(tmp_path, update_freq=2)])
    _assert_same(watched, trained(wrap, jit, []), jit)


@pytest.mark.parametrize("jit", JITS)
def test_they_are_the_same_where_ranges_are_measured(jit, tmp_path):
    wrap = OPTIMIZERS["ours"]
    watched = trained(wrap, jit, [kmp.MixPrecMonitor(tmp_path, verbose=0)])
    # Two calls of `fit`, of two epochs of six steps each.
    steps = sorted(scalars(tmp_path, "mixprec_ranges/weight_headroom_bits"))
    assert steps[0] == 1
    assert steps[-1] >= 24
    _assert_same(watched, trained(wrap, jit, []), jit)


@pytest.mark.parametrize("jit", JITS)
def test_a_loss_that_keras_takes_from_logits_is_the_same(jit, tmp_path):
    def losses(callbacks):
        keras.utils.set_random_seed(3)
        keras.config.set_dtype_policy("mixed_float16")
        head = keras.layers.Dense(3, activation="softmax", dtype="float32")
        model = keras.Sequential([keras.Input((8,)), head])
        optimizer = kmp.LossScaleOptimizer("sgd", initial_scale=8.0)
        loss = "sparse_categorical_crossentropy"
        model.compile(optimizer, loss, jit_compile=jit)
        # The probabilities underflow, where softmax has no gradient.
        fit = model.fit(
            100 * X, Y, verbose=0, shuffle=False, callbacks=callbacks
        )
        return fit.history["loss"]

    watching = monitor(tmp_path, update_freq=1, probe_every=1)
    _assert_equal(losses([watching]), losses([]), jit)


def _assert_same(watched, plain, jit):
    for (name, values), (other, expected) in zip(
        watched[0], plain[0], strict=True
    ):
        assert name == other
        _assert_equal(values, expected, jit)
    for value, expected in zip(watched[1], plain[1], strict=True):
        _assert_equal(value, expected, jit)


def _assert_equal(value, expected, jit):
    if not jit:
        np.testing.assert_array_equal(value, expected)
    # The metrics' guard is in the program that XLA optimizes as a whole, so
    # sums may be fused, and rounded, differently.
    np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-5)


def test_random_state_is_left_alone(tmp_path):
    network(OPTIMIZERS["ours"], BACKEND == "jax").fit(
        X, Y, verbose=0, callbacks=[monitor(tmp_path)]
    )
    watched = keras.random.uniform((3,))
    network(OPTIMIZERS["ours"], BACKEND == "jax").fit(X, Y, verbose=0)
    np.testing.assert_array_equal(
        *numbers([watched, keras.random.uniform((3,))])
    )


def test_an_adopted_optimizer_goes_on_where_it_was(tmp_path):
    model = network(keras.optimizers.LossScaleOptimizer, BACKEND == "jax")
    model.fit(X, Y, batch_size=16, verbose=0)
    before = model.optimizer
    model.fit(X, Y, batch_size=16, verbose=0, callbacks=[monitor(tmp_path)])
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)
    assert model.optimizer.inner_optimizer is before.inner_optimizer
    assert int(model.optimizer.iterations) == 12
    assert int(keras.ops.convert_to_numpy(before.step_counter)) == 12
