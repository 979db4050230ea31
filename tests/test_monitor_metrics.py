"""Metrics of every kind beside a skipped step."""

import keras
import numpy as np
import pytest
from monitor_models import (
    BAD,
    ROWS,
    each_jit,
    fit,
    good,
    monitor,
    one_weight,
    stream,
    with_bad,
)

import keras_mixprec as kmp

METRICS = {
    "MeanSquaredError": keras.metrics.MeanSquaredError,
    "RootMeanSquaredError": keras.metrics.RootMeanSquaredError,
    "LogCoshError": keras.metrics.LogCoshError,
    "R2Score": keras.metrics.R2Score,
    "PearsonCorrelation": keras.metrics.PearsonCorrelation,
    "CosineSimilarity": keras.metrics.CosineSimilarity,
    "AUC": lambda: keras.metrics.AUC(num_thresholds=5),
    "accuracy": lambda: "accuracy",
    "F1Score": lambda: keras.metrics.F1Score(threshold=0.5),
    "FalsePositives": keras.metrics.FalsePositives,
    "Precision": keras.metrics.Precision,
    "MeanIoU": lambda: keras.metrics.BinaryIoU(threshold=0.15),
}


def labeled(values):
    """Batches whose targets are not all the same."""
    for x, _ in stream(values):
        yield x, np.arange(ROWS)[:, None] % 2 * 1.0


def run(values, jit, callbacks):
    keras.backend.clear_session()
    model = one_weight(
        metrics=[make() for make in METRICS.values()],
        weighted_metrics=[keras.metrics.MeanAbsoluteError(name="weighted")],
        jit_compile=jit,
    )
    return model.fit(
        labeled(values),
        steps_per_epoch=len(values),
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    ).history


# Keras' metrics of float16 predictions, without a monitor as well.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@each_jit
def test_metrics_leave_the_bad_batches_out(jit, tmp_path):
    values = good(4, start=7)
    expected = run(values, jit, [])
    bad = [BAD, *values[:2], BAD, *values[2:]]
    shown = run(bad, jit, [monitor(tmp_path)])
    assert shown.keys() == expected.keys()
    for name, value in shown.items():
        # XLA may add up in another order.
        np.testing.assert_allclose(value, expected[name], rtol=1e-5)


def test_metric_that_is_zero_stays_zero(tmp_path):
    model = one_weight(metrics=[keras.metrics.FalsePositives(name="wrong")])
    history = model.fit(
        *(np.zeros((8, 1)),) * 2, verbose=0, callbacks=[monitor(tmp_path)]
    ).history
    assert history == {"loss": [0.0], "wrong": [0.0]}


def test_weights_of_zero_are_no_bad_batches(tmp_path):
    model = one_weight(weighted_metrics=["mse"])
    x = np.ones((8, 1))
    history = model.fit(
        x,
        x,
        sample_weight=np.zeros(8),
        verbose=0,
        callbacks=[monitor(tmp_path)],
    ).history
    assert history == {"loss": [0.0], "mse": [0.0]}


def test_sample_weights(tmp_path):
    model = one_weight(weighted_metrics=["mse"])
    x = np.repeat([1 / 8, BAD, 1 / 4], 4)[:, None]
    history = model.fit(
        x,
        np.zeros_like(x),
        sample_weight=np.repeat([3.0, 1.0, 1.0], 4),
        batch_size=4,
        shuffle=False,
        verbose=0,
        callbacks=[monitor(tmp_path)],
    ).history
    np.testing.assert_allclose(history["loss"], [(3 / 64 + 1 / 16) / 2])
    np.testing.assert_allclose(history["mse"], [(3 / 64 + 1 / 16) / 4])


@each_jit
@pytest.mark.parametrize("epoch", ["first", "second"])
def test_losses_of_several_outputs(jit, epoch, tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((1,))
    dense = {
        name: keras.layers.Dense(
            1, use_bias=False, kernel_initializer="ones", name=name
        )
        for name in "ab"
    }
    model = keras.Model(inputs, {n: d(inputs) for n, d in dense.items()})
    model.compile(
        kmp.LossScaleOptimizer(keras.optimizers.SGD(0.0)),
        {"a": "mse", "b": "mae"},
        metrics={"a": ["mse"], "b": ["mae"]},
        jit_compile=jit,
    )
    x = np.repeat([1 / 8, BAD, 1 / 4], 4)[:, None]
    y = {"a": np.zeros_like(x), "b": np.zeros_like(x)}
    kept = {"batch_size": 4, "shuffle": False, "verbose": 0}
    if epoch == "second":
        model.fit(x, y, **kept)
    logs = model.fit(x, y, callbacks=[monitor(tmp_path)], **kept).history
    a, b = 5 / 128, 3 / 16
    shown = [logs[n][0] for n in ("loss", "a_loss", "b_loss", "a_mse", "b_mae")]
    np.testing.assert_allclose(shown, [a + b, a, b, a, b], rtol=1e-6)


class OwnTracker(keras.Sequential):
    """A model with a metric of its own, as Keras' guides write it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.outputs_mean = keras.metrics.Mean(name="outputs_mean")

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        self.outputs_mean.update_state(y_pred)
        return super().compute_loss(x, y, y_pred, *args, **kwargs)


@each_jit
def test_tracker_of_a_model_of_its_own(jit, tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = OwnTracker([keras.Input((1,)), layer])
    model.compile("sgd", "mse", jit_compile=jit)
    model.optimizer.learning_rate = 0.0
    history = fit(model, [1 / 8, BAD, 1 / 4], [monitor(tmp_path)])
    np.testing.assert_allclose(history["outputs_mean"], [3 / 16])


@each_jit
def test_sparse_targets(jit, tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(3, use_bias=False, kernel_initializer="ones"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metric = keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        kmp.LossScaleOptimizer(keras.optimizers.SGD(0.0)),
        loss,
        metrics=[metric, "accuracy"],
        jit_compile=jit,
    )
    history = fit(model, with_bad(good(4), 0), [monitor(tmp_path)])
    np.testing.assert_allclose(history["loss"], [np.log(3)], rtol=1e-4)
    np.testing.assert_allclose(history[metric.name], [np.log(3)], rtol=1e-4)


def test_nothing_but_bad_batches(tmp_path):
    accuracy = keras.metrics.R2Score(name="r2")
    model = one_weight(metrics=["mse", accuracy])
    history = fit(model, [BAD, BAD], [monitor(tmp_path)])
    assert history.keys() == {"loss", "mse", "r2"}
    assert np.isnan(list(history.values())).all()
