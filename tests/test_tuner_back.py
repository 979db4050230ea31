"""Taking a demotion back: one that does harm, one that is needed no more."""

import keras
import numpy as np
import pytest
from monitor_models import BACKEND, monitor
from tuner_models import (
    BIG,
    CURE,
    GOOD,
    chain,
    demoted,
    done,
    entries,
    fit,
    regression,
    tuner,
)
from zoo import cases

from keras_mixprec.numerics.layer_hooks import with_sublayers

OUTLIER = 1000.0
VALUES = [0.5] * 20 + ([OUTLIER] + [0.5] * 9) * 20


def bounded(weights):
    """A constraint that no weight gets past."""
    return keras.ops.clip(weights, -50.0, 50.0)


@pytest.mark.parametrize(
    ("of_weights", "beside"),
    [
        ({}, True),
        ({}, False),
        # Its weights are bounded: the loss alone diverges.
        ({"use_bias": False, "kernel_constraint": bounded}, False),
    ],
    ids=["monitor", "alone", "loss"],
)
def test_a_demotion_that_makes_training_diverge_is_undone(
    of_weights, beside, tmp_path
):
    model, callback = regression(0.1, **of_weights), tuner(tmp_path / "plan")
    watcher = monitor(tmp_path)
    fit(model, VALUES, *[watcher] * beside, callback)
    assert done(callback, "demote")
    (undone,) = entries(callback, "undo")
    assert ("loss" in undone["message"]) == bool(of_weights)
    assert demoted(model) == {}
    assert max(np.abs(w).max() for w in model.get_weights()) < 2
    # None but the outliers, and those between demotion and undoing.
    assert model.optimizer.skipped_steps < 45
    assert float(model.optimizer.loss_scale) > 2.0**-8
    if beside:
        assert watcher.summary.headline["state"] == "severe"
        assert "undone at step" in watcher.summary.headline["text"]


@pytest.mark.parametrize(
    ("rate", "values"),
    [
        (0.0, VALUES),
        # The loss of each batch is another one, a million times as large.
        (1e-14, [0.5, OUTLIER, 0.001, 30.0] * 30),
        # It was not a number before.
        (1e-14, [OUTLIER] * 60),
    ],
    ids=["still", "noisy", "nan"],
)
def test_a_demotion_that_training_bears_stays(rate, values):
    model, callback = regression(rate), tuner()
    fit(model, values, callback)
    assert done(callback, "demote")
    assert not done(callback, "undo")
    assert "squares" in demoted(model)


@pytest.mark.parametrize(
    "name",
    [
        # On JAX it begins with a loss of 2e-5, which ten steps make 0.16.
        "rnn_overflow",
        # Weights off by half an ulp change its loss as much as the fault.
        "rnn_integrator",
    ],
)
def test_a_recurrent_layer_is_demoted_with_its_cell(name):
    (case,) = cases([name])
    model = case.model("mixed_float16", BACKEND == "jax")
    callback = tuner()
    case.fit(model, callbacks=[callback])
    assert not done(callback, "undo")
    layers = with_sublayers(model.get_layer("rnn"))
    assert {layer.compute_dtype for layer in layers} == {"float32"}


def test_the_batch_that_failed_is_remembered():
    model, callback = chain(), tuner(promote_after=50)
    fit(model, [BIG] * 5 + [GOOD] * 150, callback)
    assert demoted(model) == CURE
    assert done(callback, "promote") == []


def test_what_the_weights_have_outgrown_is_promoted():
    model, callback = chain(), tuner(promote_after=50)
    calm = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: (
            epoch == 1 and model.layers[1].kernel.assign([[1.0]])
        )
    )
    fit(model, [BIG] * 40, callback, calm, epochs=4)
    assert demoted(model) == {}
    (entry,) = entries(callback, "promote")
    assert entry["step"] >= 50
    expected = {"before": "float32", "after": "mixed_float16"}
    assert entry["layers"]["big"] == expected


def test_a_fault_that_comes_and_goes_is_resolved():
    """The weight that overflows is large for half of each period."""
    steps, period, model = 325, 60, chain()
    callback = tuner(
        promote_after=10, cooldown=5, max_rebuilds=100, update_freq=10
    )

    def swing(batch, logs):
        large = batch % period < period // 2
        model.layers[1].kernel.assign([[300.0 if large else 1.0]])

    swinging = keras.callbacks.LambdaCallback(on_train_batch_begin=swing)
    fit(model, [BIG] * steps, callback, swinging)
    # The wait doubles each time: 10, 20, ..., 160 is the last that can end.
    assert len(done(callback)) <= 2 * 5
    assert demoted(model) == CURE
