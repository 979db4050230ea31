"""A model with two optimizers and a `train_step` of its own."""

import keras
import numpy as np
import pytest
from keras import ops
from monitor_models import (
    BACKEND,
    EveryStep,
    assert_logged,
    each_jit,
    fit,
    good,
    monitor,
    one_weight,
    scalars,
    tags,
    with_bad,
)

import keras_mixprec as kmp


class TwoPlayers(keras.Model):
    """Two layers, each trained on its own loss by its own optimizer."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (
            keras.layers.Dense(1, use_bias=False, name=name)
            for name in ("left", "right")
        )
        self.left_loss = keras.metrics.Mean(name="left_loss")

    def compile(self, make, **arguments):
        super().compile(**arguments)
        self.left_optimizer = make(keras.optimizers.SGD(0.0))
        self.right_optimizer = make(keras.optimizers.SGD(0.0))

    def build(self, input_shape):
        self.left.build(input_shape)
        self.right.build(input_shape)

    def call(self, x):
        return self.left(x) + self.right(x)

    @property
    def metrics(self):
        return [self.left_loss]

    def losses_of(self, x, y):
        y = ops.cast(y, "float32")
        left = ops.cast(self.left(x), "float32") - y
        right = ops.cast(self.right(x), "float32") - y
        return ops.mean(left**2), ops.mean(right) / 2.0


def _tensorflow_step(self, data):
    import tensorflow as tf

    with tf.GradientTape(persistent=True) as tape:
        left, right = self.losses_of(*data)
        scaled_left = self.left_optimizer.scale_loss(left)
        scaled_right = self.right_optimizer.scale_loss(right)
    for optimizer, loss, layer in (
        (self.left_optimizer, scaled_left, self.left),
        (self.right_optimizer, scaled_right, self.right),
    ):
        weights = layer.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
    self.left_loss.update_state(left)
    return {"left_loss": self.left_loss.result()}


def _torch_step(self, data):
    import torch

    left, right = self.losses_of(*data)
    self.zero_grad()
    self.left_optimizer.scale_loss(left).backward()
    self.right_optimizer.scale_loss(right).backward()
    with torch.no_grad():
        for optimizer, layer in (
            (self.left_optimizer, self.left),
            (self.right_optimizer, self.right),
        ):
            weights = layer.trainable_variables
            optimizer.apply([w.value.grad for w in weights], weights)
    self.left_loss.update_state(left)
    return {"left_loss": self.left_loss.result()}


STEPS = {"tensorflow": _tensorflow_step, "torch": _torch_step}
pytestmark = pytest.mark.skipif(
    BACKEND == "jax", reason="JAX hands `fit` the state of one optimizer"
)
each_maker = pytest.mark.parametrize(
    "make",
    [kmp.LossScaleOptimizer, keras.optimizers.LossScaleOptimizer],
    ids=["ours", "keras"],
)


def trained(make, jit, tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    kind = type("Gan", (TwoPlayers,), {"train_step": STEPS[BACKEND]})
    model = kind()
    model.build((None, 1))
    model.compile(make, jit_compile=jit)
    watcher = monitor(tmp_path, update_freq=1)
    history = fit(model, with_bad(good(5), 2), [watcher])
    return model, watcher, history


@each_jit
@each_maker
def test_each_optimizer_is_logged_by_name(make, jit, tmp_path):
    model, watcher, history = trained(make, jit, tmp_path)
    assert np.isfinite(history["left_loss"]).all()
    assert set(watcher.summary.optimizers) == {
        "left_optimizer",
        "right_optimizer",
    }
    # Both skipped the same step, which is one.
    (run,) = watcher.report.to_dict().values()
    assert run["skipped"] == 1
    expected = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1}
    assert scalars(tmp_path, "skipped_steps/left_optimizer") == expected
    tag = "mixprec_gradient_norm_by_variable/left_optimizer/"
    assert sum(t.startswith(tag) for t in tags(tmp_path)) == 1


@each_jit
def test_an_optimizer_that_no_step_uses_is_left_out(jit, tmp_path):
    _, watcher, _ = trained(lambda inner: inner, jit, tmp_path)
    text = str(watcher.summary)
    assert not watcher.summary.optimizers
    assert "steps skipped" not in text
    assert "none skipped" not in text
    assert "optimizer.scale_loss(loss)` in `train_step`" in text.replace(
        "\n    ", " "
    )
    assert watcher.summary.headline["state"] == "warning"
    report = " ".join(str(watcher.report).split())
    assert watcher.summary.headline["text"] in report
    assert "loss_scale" not in tags(tmp_path)


def test_the_scale_of_each_is_that_of_each_step(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    model = type("Gan", (TwoPlayers,), {"train_step": STEPS[BACKEND]})()
    model.build((None, 1))
    rule = kmp.DynamicLossScale(growth_interval=5)
    model.compile(lambda inner: kmp.LossScaleOptimizer(inner, rule))
    # The gradient of `right` is the smaller one.
    names = "left_optimizer", "right_optimizer"
    values = [[1 / 8, 30.0][i % 23 == 22] for i in range(120)]
    seen = [EveryStep(name) for name in names]
    fit(model, values, [monitor(tmp_path), *seen])
    assert seen[0].scales != seen[1].scales
    for name, each in zip(names, seen, strict=True):
        assert_logged(tmp_path, each.scales, name)


@each_maker
def test_each_optimizer_keeps_to_its_own_variables(make, tmp_path):
    model, _, _ = trained(make, False, tmp_path)
    for optimizer in model.left_optimizer, model.right_optimizer:
        assert isinstance(optimizer, kmp.LossScaleOptimizer)
        assert len(optimizer.overflow_counts()) == 1


@each_jit
def test_one_optimizer_with_two_names(jit, tmp_path):
    model = one_weight(keras.optimizers.LossScaleOptimizer, jit)
    model.its_optimizer = model.optimizer
    watcher = monitor(tmp_path)
    fit(model, with_bad(good(4), 2), [watcher])
    assert model.its_optimizer is model.optimizer
    assert watcher.summary.optimizers[""].skipped == 1
