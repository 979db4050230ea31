"""The loss by step, in the log and in what reads it."""

import keras
import numpy as np
from keras import layers

import keras_mixprec as kmp
from keras_mixprec.reporting.run_log import RunLog

ROWS, BATCH = 48, 4


class Losses(keras.callbacks.Callback):
    """The mean loss that Keras shows after each step."""

    def __init__(self):
        super().__init__()
        self.means = []

    def on_train_batch_end(self, batch, logs=None):
        self.means.append(float(logs["loss"]))


def fit(
    log_dir,
    x,
    epochs=2,
    max_overhead=1.0,
    model=None,
    validation_of=None,
    **options,
):
    """Trains with a reading every second step; returns the loss logged."""
    keras.utils.set_random_seed(0)
    own, model = model, keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model = own(model.inputs[0], model.outputs[0]) if own else model
    kmp.apply_policy(model, "mixed_float16")
    model.compile(
        kmp.LossScaleOptimizer("sgd"), "mse", jit_compile=False, **options
    )
    monitor = kmp.MixPrecMonitor(
        log_dir, update_freq=2, max_overhead=max_overhead, verbose=0
    )
    losses = Losses()
    data = {}
    if validation_of is not None:
        data["validation_data"] = x, np.full(len(x), validation_of)
    model.fit(
        *(x, np.ones(len(x)), BATCH),
        **{"epochs": epochs, "shuffle": False, "verbose": 0},
        callbacks=[monitor, losses],
        **data,
    )
    told = kmp.load_report(log_dir).to_dict()["mixprec"]["loss"]
    return told, np.reshape(losses.means, (epochs, -1))


def inputs():
    return np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")


def test_epochs_that_no_budget_lets_read_have_a_mean_each(tmp_path):
    told, means = fit(tmp_path, inputs(), epochs=4, max_overhead=0.0)
    per_epoch = means.shape[1]
    assert told["steps"] == [per_epoch * n for n in range(1, 5)]
    np.testing.assert_allclose(told["values"], means[:, -1], rtol=1e-6)


def test_it_is_the_mean_of_the_steps_since_the_last(tmp_path):
    told, means = fit(tmp_path, inputs())
    steps = np.arange(1, means.shape[1] + 1)
    losses = np.diff(means * steps, axis=1, prepend=0).ravel()
    read = [0, *told["steps"]]
    wanted = [losses[a:b].mean() for a, b in zip(read, read[1:], strict=False)]
    # A stretch over the end of an epoch is of the steps behind it alone.
    per_epoch = means.shape[1]
    inside = [
        n
        for n, (a, b) in enumerate(zip(read, read[1:], strict=False))
        if a // per_epoch == (b - 1) // per_epoch
    ]
    assert len(inside) >= 10
    # Differences of float32 sums of up to 12 losses of about 1.
    np.testing.assert_allclose(
        np.take(told["values"], inside), np.take(wanted, inside), rtol=1e-5
    )


def test_each_epoch_begins_anew(tmp_path):
    # As many steps an epoch as between two readings, or one more.
    for name, rows in ("equal", 8), ("more", 12):
        told, means = fit(tmp_path / name, inputs()[:rows], epochs=4)
        ends = np.arange(1, 5) * means.shape[1]
        assert set(ends) <= set(told["steps"])
        losses = dict(zip(told["steps"], told["values"], strict=True))
        steps = np.arange(1, means.shape[1] + 1)
        single = np.diff(means * steps, axis=1, prepend=0).ravel()
        assert min(losses.values()) >= single.min() * (1 - 1e-5)
        assert max(losses.values()) <= single.max() * (1 + 1e-5)


def test_a_batch_that_is_not_finite_is_in_no_mean(tmp_path):
    x = inputs()
    x[20:24] = np.inf
    told, _ = fit(tmp_path, x)
    assert np.isfinite(told["values"]).all()
    assert len(told["values"]) >= 10


def test_where_no_batch_is_finite_there_is_a_gap(tmp_path):
    x = inputs()
    x[16:32] = np.inf  # Steps 5 to 8 of 12.
    told, _ = fit(tmp_path, x)
    values = dict(zip(told["steps"], told["values"], strict=True))
    missing = {s % 12 for s, value in values.items() if np.isnan(value)}
    assert {6, 8} <= missing <= {5, 6, 7, 8}
    assert np.isfinite([values[4], values[12]]).all()


def test_a_log_without_it_says_so(tmp_path):
    with RunLog(tmp_path) as log:
        log.event(0, {"kind": "train_begin", "fit": 1})
    assert kmp.load_report(tmp_path).to_dict()["mixprec"]["loss"] is None


class OwnTracker(keras.Model):
    """Keeps its loss in a metric of its own, as guides have it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = keras.ops.mean(keras.ops.square(y - y_pred))
        self.tracker.update_state(loss)
        return loss


def test_the_loss_is_not_that_of_a_validation(tmp_path):
    told, means = fit(tmp_path, inputs(), validation_of=100.0)
    assert max(told["values"]) < 50.0
    np.testing.assert_allclose(told["steps"][-1], means.size)


def test_a_metric_of_the_models_own_is_read(tmp_path):
    told, means = fit(tmp_path, inputs(), model=OwnTracker)
    assert np.isfinite(told["values"]).all()
    np.testing.assert_allclose(told["values"][0], means[0, 1], rtol=1e-3)


def test_a_loop_by_hand_has_the_losses_that_it_reports(tmp_path):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    kmp.apply_policy(model, "mixed_float16")
    model.compile(kmp.LossScaleOptimizer("sgd"), "mse", jit_compile=False)
    monitor = kmp.MixPrecMonitor(tmp_path, update_freq=2, verbose=0)
    callbacks = keras.callbacks.CallbackList([monitor], model=model)
    callbacks.on_train_begin()
    for epoch, loss in enumerate([0.5, 0.25]):
        callbacks.on_epoch_begin(epoch)
        for step in range(6):
            callbacks.on_train_batch_begin(step)
        callbacks.on_epoch_end(epoch, {"loss": loss})
    callbacks.on_train_end()
    told = kmp.load_report(tmp_path).to_dict()["mixprec"]["loss"]
    assert told["values"] == [0.5, 0.25]
