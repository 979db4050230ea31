"""The optimizer in `compile` and `fit`, and its access to the inner one."""

import keras
import numpy as np
import pytest
from keras import layers
from monitor_models import scalars
from optimizer_models import QUICK, assert_identical, numbers, rarely

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


def with_a_factor():
    return make("mixed_float16", sgd(loss_scale_factor=8.0))


# Models, and whether they need loss scaling.
MODELS = {
    "float16 layers": (lambda: make("mixed_float16"), True),
    "float32": (lambda: make("float32"), False),
    "bfloat16": (lambda: make("mixed_bfloat16"), False),
    "ours": (lambda: make("mixed_float16", LossScaleOptimizer("sgd")), False),
    "a fixed factor": (with_a_factor, False),
}


@pytest.mark.long
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


class Capped(keras_own):
    """A user's subclass of Keras' optimizer that limits the scale."""

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
