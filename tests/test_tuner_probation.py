"""A demotion that lets outliers through is taken back."""

import keras
import numpy as np
import pytest
from monitor_models import BACKEND, monitor
from tuner_models import demoted, done, fit, regression, tuner
from zoo import cases

from keras_mixprec.numerics.layer_hooks import with_sublayers

OUTLIER = 1000.0
VALUES = [0.5] * 20 + ([OUTLIER] + [0.5] * 9) * 20


def bounded(weights):
    """A constraint that no weight gets past."""
    return keras.ops.clip(weights, -50.0, 50.0)


@pytest.mark.parametrize("with_monitor", [True, False])
def test_a_demotion_that_makes_training_diverge_is_undone(
    with_monitor, tmp_path
):
    model, callback = regression(0.1), tuner(tmp_path / "plan.json")
    watcher = monitor(tmp_path)
    callbacks = [watcher, callback] if with_monitor else [callback]
    fit(model, VALUES, *callbacks)
    assert done(callback, "demote")
    assert len(done(callback, "undo")) == 1
    assert demoted(model) == {}
    assert max(np.abs(w).max() for w in model.get_weights()) < 2
    # None but the outliers, and those between demotion and undoing.
    assert model.optimizer.skipped_steps < 45
    assert float(model.optimizer.loss_scale) > 2.0**-8
    if with_monitor:
        said = watcher.summary.headline
        assert (
            "a demotion made training diverge and was undone at step"
            in said["text"]
        )
        assert said["state"] == "severe"


def test_a_demotion_that_makes_the_loss_alone_diverge_is_undone():
    model = regression(0.1, use_bias=False, kernel_constraint=bounded)
    callback = tuner()
    fit(model, VALUES, callback)
    assert len(done(callback, "undo")) == 1
    (undone,) = [e for e in callback.history if e["kind"] == "undo"]
    assert "with it the float32 loss of one batch grew" in undone["message"]
    assert demoted(model) == {}
    assert np.abs(model.get_weights()[0]).max() < 2


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
    dtypes = {
        layer.compute_dtype for layer in with_sublayers(model.get_layer("rnn"))
    }
    assert dtypes == {"float32"}
