"""A `train_step` that divides by the loss scale without multiplying by it."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
from keras import ops
from optimizer_models import BACKEND

from keras_mixprec import (
    LossScaleOptimizer,
    MixPrecMonitor,
    ensure_loss_scaling,
)

X = np.ones((4, 2), "float32")
JITS = {"tensorflow": [False, True], "jax": [True], "torch": [False]}[BACKEND]


def by_hand(scale):
    """A model whose `train_step` scales the loss as `scale` does, or not."""

    class ByHand(keras.Sequential):
        def train_step(this, *arguments):  # noqa: N805
            return STEPS[BACKEND](this, scale, *arguments)

    return ByHand([keras.Input((2,)), keras.layers.Dense(1)])


def _tensorflow_step(model, scale, data):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = scale(model.optimizer, ops.mean(model(data[0])))
    weights = model.trainable_variables
    gradients = tape.gradient(loss, [v.value for v in weights])
    model.optimizer.apply(gradients, weights)
    return {"loss": loss}


def _torch_step(model, scale, data):
    import torch

    model.zero_grad()
    loss = scale(model.optimizer, ops.mean(model(data[0])))
    loss.backward()
    weights = model.trainable_variables
    with torch.no_grad():
        model.optimizer.apply([v.value.grad for v in weights], weights)
    return {"loss": loss}


def _jax_step(model, scale, state, data):
    import jax

    weights, others, own, metrics = state

    def loss_of(weights):
        y, _ = model.stateless_call(weights, others, data[0])
        mapping = list(zip(model.optimizer.variables, own, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return scale(model.optimizer, ops.mean(y))

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    weights, own = model.optimizer.stateless_apply(own, gradients, weights)
    return {"loss": loss}, (weights, others, own, metrics)


STEPS = {
    "tensorflow": _tensorflow_step,
    "torch": _torch_step,
    "jax": _jax_step,
}


def train(scale, jit):
    model = by_hand(scale)
    model.compile(LossScaleOptimizer("sgd"), jit_compile=jit)
    # Before that it has no variable `dynamic_scale`, nor has Keras' own.
    model.optimizer.build(model.trainable_variables)
    model.fit(X, X, batch_size=2, epochs=2, verbose=0)
    return model


@pytest.mark.parametrize("jit", JITS)
def test_a_forgotten_scale_is_warned_of_once(jit):
    advice = "stateless_scale_loss" if BACKEND == "jax" else "r.scale_loss"
    with pytest.warns(UserWarning, match=advice) as caught:
        train(lambda optimizer, loss: loss, jit)
    assert sum("scale_loss" in str(w.message) for w in caught) == 1


@pytest.mark.parametrize("jit", JITS)
def test_gradients_of_a_forgotten_scale_are_not_divided(jit):
    with pytest.warns(UserWarning, match="undivided"):
        forgotten = train(lambda optimizer, loss: loss, jit)
    scaled = train(lambda optimizer, loss: optimizer.scale_loss(loss), jit)
    (_, bias), (_, expected) = forgotten.get_weights(), scaled.get_weights()
    np.testing.assert_allclose(bias, [-0.04], rtol=1e-5)
    np.testing.assert_allclose(bias, expected, rtol=1e-5)


@pytest.mark.parametrize("jit", JITS)
def test_a_scale_that_is_only_logged_multiplies_nothing(jit):
    model = by_hand(lambda optimizer, loss: loss)
    step = model.train_step

    def logging_step(*arguments):
        result = step(*arguments)
        logs, own = result, []
        if BACKEND == "jax":
            logs, (*_, own, _) = result
            own = zip(model.optimizer.variables, own, strict=True)
        with keras.StatelessScope(own) if own else contextlib.nullcontext():
            logs["scale"] = model.optimizer.loss_scale
        return result

    model.train_step = logging_step
    model.compile(LossScaleOptimizer("sgd"), jit_compile=jit)
    with pytest.warns(UserWarning, match="undivided"):
        model.fit(X, X, batch_size=2, epochs=2, verbose=0)
    np.testing.assert_allclose(model.get_weights()[1], [-0.04], rtol=1e-5)


@pytest.mark.parametrize("adopted", [False, True])
def test_a_forgotten_scale_is_a_finding_of_the_run(adopted, tmp_path):
    model = by_hand(lambda optimizer, loss: loss)
    model.layers[0].dtype_policy = "mixed_float16"
    if adopted:
        sgd = keras.optimizers.SGD(0.01)
        model.compile(keras.optimizers.LossScaleOptimizer(sgd))
    else:
        model.compile("sgd")
        ensure_loss_scaling(model)
    monitor = MixPrecMonitor(tmp_path, verbose=0)
    with pytest.warns(UserWarning, match="undivided"):
        model.fit(X, X, batch_size=2, verbose=0, callbacks=[monitor])
    np.testing.assert_allclose(model.get_weights()[1], [-0.02], rtol=1e-3)
    text = str(monitor.summary)
    assert "no findings" not in text
    assert "`train_step` does not scale the loss" in text
    assert "ensure_loss_scaling" not in text
    report = " ".join(str(monitor.report).split())
    assert monitor.summary.headline["text"] in report


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize(
    "scale",
    [
        lambda optimizer, loss: optimizer.scale_loss(loss),
        lambda optimizer, loss: optimizer.get_scaled_loss(loss),
        lambda optimizer, loss: loss * optimizer.loss_scale,
        lambda optimizer, loss: loss * optimizer.dynamic_scale.value,
    ],
    ids=["scale_loss", "get_scaled_loss", "loss_scale", "dynamic_scale"],
)
def test_a_scaled_loss_is_not(scale, jit):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(scale, jit)
