"""An overflow discards the whole window of gradient accumulation."""

import keras
import numpy as np
import pytest
from optimizer_models import each_mode, make_apply, make_variables, numbers

from keras_mixprec import LossScaleOptimizer

STEPS = 3
INF = float("inf")


def make(**arguments):
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=STEPS)
    return LossScaleOptimizer(
        inner, initial_scale=4.0, discard_window=True, **arguments
    )


def expected(gradients):
    """A weight of 1 after each window: that of NumPy, windows as they fall."""
    weight, seen = 1.0, []
    for start in range(0, len(gradients), STEPS):
        window = np.array(gradients[start : start + STEPS])
        if len(window) == STEPS and np.isfinite(window).all():
            weight -= window.mean()
        seen.append(weight)
    return seen


def train(optimizer, variables, gradients, mode):
    apply, seen = make_apply(optimizer, variables, mode), []
    for number, gradient in enumerate(gradients, 1):
        scale = float(optimizer.loss_scale)
        apply([np.array([gradient * scale], "float32")])
        if number % STEPS == 0:
            seen.append(float(numbers(variables)[0][0]))
    return seen


@each_mode
@pytest.mark.parametrize("bad", [(), (3,), (4,), (5,), (3, 4), (3, 5), (0, 8)])
def test_windows_are_all_or_nothing(bad, mode):
    gradients = [float(2**k) for k in range(12)]
    for index in bad:
        gradients[index] = INF
    optimizer, variables = make(), make_variables((1,))
    seen = train(optimizer, variables, gradients, mode)
    np.testing.assert_allclose(seen, expected(gradients), rtol=1e-6)
    assert optimizer.skipped_steps == len(bad)
    assert optimizer.attempted_steps == 12
    assert float(optimizer.loss_scale) == 4.0 / 2 ** len(bad)


def test_it_survives_a_config_and_keras_knows_the_config_without():
    config = make().get_config()
    assert config["discard_window"] is True
    assert LossScaleOptimizer.from_config(config).window is not None
    assert "discard_window" not in LossScaleOptimizer("sgd").get_config()


def test_it_survives_a_file_in_the_middle_of_a_window(tmp_path):
    def build():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(make(), "mse")
        return model

    model = build()
    x, y = np.ones((2, 1)), np.ones((2, 1))
    for value in (1.0, np.inf):  # One is left to be discarded.
        model.train_on_batch(x * value, y)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    before = loaded.get_weights()
    for _ in range(STEPS):
        loaded.train_on_batch(x, y)
    np.testing.assert_array_equal(loaded.get_weights()[0], before[0])
    loaded.train_on_batch(x, y)
    assert not np.array_equal(loaded.get_weights()[0], before[0])


def test_there_must_be_a_window():
    with pytest.raises(ValueError, match="accumulates gradients.*Received"):
        LossScaleOptimizer("sgd", discard_window=True)
