"""Metrics of every kind beside a skipped step."""

import keras
import numpy as np
import pytest
from monitor_models import (
    BAD,
    ROWS,
    compiling,
    each_jit,
    fit,
    good,
    monitor,
    one_backend,
    one_weight,
    stream,
    with_bad,
)

import keras_mixprec as kmp

METRICS = [
    keras.metrics.MeanSquaredError,
    keras.metrics.RootMeanSquaredError,
    keras.metrics.LogCoshError,
    keras.metrics.R2Score,
    keras.metrics.PearsonCorrelation,
    keras.metrics.CosineSimilarity,
    lambda: keras.metrics.AUC(num_thresholds=5),
    lambda: "accuracy",
    lambda: keras.metrics.F1Score(threshold=0.5),
    keras.metrics.FalsePositives,
    keras.metrics.Precision,
    lambda: keras.metrics.BinaryIoU(threshold=0.15),
]
# The second of three batches is bad.
X = np.repeat([1 / 8, BAD, 1 / 4], 4)[:, None]
BATCHES = {"batch_size": 4, "shuffle": False, "verbose": 0}


def labeled(values):
    """Batches whose targets are not all the same."""
    for x, _ in stream(values):
        yield x, np.arange(ROWS)[:, None] % 2 * 1.0


# Keras' metrics of float16 predictions, without a monitor as well.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@each_jit
def test_metrics_leave_the_bad_batches_out(jit, tmp_path):
    def run(values, callbacks):
        keras.backend.clear_session()
        model = one_weight(
            metrics=[make() for make in METRICS],
            weighted_metrics=[keras.metrics.MeanAbsoluteError(name="weighted")],
            jit=jit,
        )
        steps = {"steps_per_epoch": len(values), "callbacks": callbacks}
        data = labeled(values)
        return model.fit(data, shuffle=False, verbose=0, **steps).history

    values = good(4, start=7)
    expected = run(values, [])
    bad = [BAD, *values[:2], BAD, *values[2:]]
    shown = run(bad, [monitor(tmp_path)])
    assert shown.keys() == expected.keys()
    for name, value in shown.items():
        # XLA may add up in another order.
        np.testing.assert_allclose(value, expected[name], rtol=1e-5)


@one_backend
@pytest.mark.parametrize("weights", [None, np.zeros(8)])
def test_what_is_zero_stays_zero(weights, tmp_path):
    wrong = keras.metrics.FalsePositives(name="wrong")
    model = one_weight(metrics=[wrong], weighted_metrics=["mse"])
    x = np.zeros((8, 1)) if weights is None else np.ones((8, 1))
    watching = {"verbose": 0, "callbacks": [monitor(tmp_path)]}
    history = model.fit(x, x, sample_weight=weights, **watching).history
    assert history == {"loss": [0.0], "wrong": [0.0], "mse": [0.0]}


@one_backend
def test_sample_weights(tmp_path):
    model = one_weight(weighted_metrics=["mse"])
    weights = {"sample_weight": np.repeat([3.0, 1.0, 1.0], 4)}
    watching = {"callbacks": [monitor(tmp_path)]}
    history = model.fit(X, 0 * X, **weights, **watching, **BATCHES).history
    np.testing.assert_allclose(history["loss"], [(3 / 64 + 1 / 16) / 2])
    np.testing.assert_allclose(history["mse"], [(3 / 64 + 1 / 16) / 4])


@each_jit
@pytest.mark.parametrize(
    "epoch", ["first", pytest.param("second", marks=one_backend)]
)
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
    losses = {"a": "mse", "b": "mae"}
    metrics = {"a": ["mse"], "b": ["mae"]}
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, losses, metrics=metrics, jit_compile=jit)
    y = {"a": np.zeros_like(X), "b": np.zeros_like(X)}
    if epoch == "second":
        model.fit(X, y, **BATCHES)
    logs = model.fit(X, y, callbacks=[monitor(tmp_path)], **BATCHES).history
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
def test_a_tracker_of_the_models_own(jit, tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = OwnTracker([keras.Input((1,)), layer])
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=jit)
    history = fit(model, [1 / 8, BAD, 1 / 4], [monitor(tmp_path)])
    np.testing.assert_allclose(history["outputs_mean"], [3 / 16])


@one_backend
def test_sparse_targets(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    head = keras.layers.Dense(3, use_bias=False, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((1,)), head])
    model.compile(
        kmp.LossScaleOptimizer(keras.optimizers.SGD(0.0)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[
            keras.metrics.SparseCategoricalCrossentropy("own", from_logits=True)
        ],
        **compiling(None),
    )
    history = fit(model, with_bad(good(4), 0), [monitor(tmp_path)])
    for name in "loss", "own":
        np.testing.assert_allclose(history[name], [np.log(3)], rtol=1e-4)


@one_backend
def test_nothing_but_bad_batches(tmp_path):
    model = one_weight(metrics=["mse", keras.metrics.R2Score(name="r2")])
    history = fit(model, [BAD, BAD], [monitor(tmp_path)])
    assert history.keys() == {"loss", "mse", "r2"}
    assert np.isnan(list(history.values())).all()
