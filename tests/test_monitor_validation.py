"""Evaluations in `fit` and by `evaluate`: what is wrong, and where."""

import keras
import numpy as np
import pytest
from keras import ops
from monitor_models import each_jit, told

import keras_mixprec as kmp

RNG = np.random.default_rng(0)


class Energy(keras.layers.Layer):
    """Its squares overflow float16 for rows of about 200."""

    def call(self, x):
        return x / ops.sqrt(ops.sum(x * x, -1, keepdims=True)), ops.log(
            ops.sum(x * x, -1, keepdims=True) + 1.0
        )


@keras.saving.register_keras_serializable("tests")
class SumOfSquares(keras.metrics.Metric):
    """Adds squares up in the dtype of the predictions."""

    def __init__(self, name="squares", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        squares = ops.sum(ops.square(y_pred))
        self.total.assign(ops.cast(squares, "float32"))

    def result(self):
        return self.total / 2.0**20


def energies(jit):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((16,))
    x = keras.layers.Concatenate()(Energy(name="energy")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1, name="out")(x))
    rules = [kmp.PrecisionRule("out")]
    kmp.apply_policy(model, "mixed_float16", rules=rules)
    model.compile(kmp.LossScaleOptimizer("sgd"), "mse", jit_compile=jit)
    return model


def rows(count, bright=()):
    x = RNG.normal(size=(count, 16)).astype("float32") * 10
    x[list(bright)] = 200.0
    return x, np.ones((count, 1), "float32")


def fit(model, monitor, *more, validation, **options):
    return model.fit(
        *rows(32),
        batch_size=8,
        epochs=2,
        verbose=0,
        validation_data=validation,
        callbacks=[monitor, *more],
        **options,
    ).history


@each_jit
def test_a_layer_that_overflows_in_validation_alone_is_named(tmp_path, jit):
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0)
    history = fit(energies(jit), monitor, validation=rows(40, (3, 37)))
    assert np.isfinite(history["loss"]).all()
    assert not np.isfinite(history["val_loss"]).any()
    (verdict,) = monitor.verdicts
    assert (verdict.kind, verdict.layer) == ("forward_overflow", "energy")
    assert verdict.numbers["rows_of_validation"] == [3, 37]
    (event,) = told(tmp_path, "validation_not_finite")
    assert event["metrics"].keys() == {"loss"}
    assert "energy" in event["message"]


def test_the_tuner_repairs_it(tmp_path):
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0)
    tuner = kmp.PrecisionTuner(verbose=0, bfloat16=False)
    history = fit(energies(False), monitor, tuner, validation=rows(40, (3, 37)))
    assert np.isfinite(history["val_loss"][1])
    assert tuner.plan["energy"] == "float32"


@each_jit
def test_rows_that_are_not_finite_are_bad_data(tmp_path, jit):
    x, y = rows(24)
    x[5, 2] = np.nan
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0)
    fit(energies(jit), monitor, validation=(x, y))
    assert [v.kind for v in monitor.verdicts] == ["bad_data"]
    assert monitor.verdicts[0].numbers["rows_of_validation"] == [5]


def outputs(jit, metric=None):
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(1, kernel_initializer="ones", name="out"),
        ]
    )
    kmp.apply_policy(model, "mixed_float16", rules=[])
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(0.0))
    metrics = [metric or SumOfSquares(), "mae"]
    model.compile(optimizer, "mse", metrics=metrics, jit_compile=jit)
    return model


@each_jit
@pytest.mark.parametrize("count", [8, 512])
def test_a_metric_that_overflows_in_validation_is_named(tmp_path, jit, count):
    x = np.full((count, 1), 16.0, "float32")
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0)
    fit_on = {"validation_data": (x, x), "validation_batch_size": count}
    outputs(jit).fit(x[:8], x[:8], verbose=0, callbacks=[monitor], **fit_on)
    found = [(v.kind, v.layer) for v in monitor.verdicts]
    # 512 * 16**2 is 131,072, twice what float16 holds.
    assert found == [("metric_error", None)] * (count == 512)
    for verdict in monitor.verdicts:
        assert verdict.numbers["metric"] == "squares"
        assert verdict.numbers["in_float32"] == 512 * 16.0**2 / 2**20


@each_jit
def test_evaluate_is_watched(tmp_path, jit):
    model, monitor = energies(jit), kmp.MixPrecMonitor(tmp_path, verbose=0)
    loss = model.evaluate(*rows(40, (35,)), verbose=0, callbacks=[monitor])
    assert not np.isfinite(loss)
    (verdict,) = monitor.verdicts
    assert verdict.layer == "energy"
    assert verdict.numbers["rows_of_evaluation"] == [35]
    assert told(tmp_path, "verdict")[0]["layer"] == "energy"


@each_jit
def test_a_sound_validation_says_nothing_and_changes_nothing(tmp_path, jit):
    def run(callbacks):
        keras.utils.set_random_seed(0)
        model = energies(jit)
        return fit_plain(model, callbacks), model.get_weights()

    def fit_plain(model, callbacks):
        x, y = np.ones((16, 16), "float32"), np.ones((16, 1), "float32")
        data = {"validation_data": (2 * x, y), "epochs": 2, "verbose": 0}
        return model.fit(x, y, 4, callbacks=callbacks, **data).history

    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0)
    (watched, weights), (plain, unwatched) = run([monitor]), run([])
    assert not monitor.verdicts
    assert watched == plain
    for one, other in zip(weights, unwatched, strict=True):
        np.testing.assert_array_equal(one, other)


class Counted(SumOfSquares):
    """Adds numbers one by one: float16 stays at 2,048."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        total = ops.zeros((), y_pred.dtype)
        for value in ops.unstack(ops.reshape(y_pred, (-1,)), 64):
            total = total + value
        self.total.assign(ops.cast(total, "float32"))


def test_a_metric_that_is_finite_but_wrong_is_named(tmp_path):
    x = np.full((512, 1), 0.9, "float32")
    x[0] = 2048.0
    y = np.zeros((512, 1), "float32")
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0)
    model = outputs(False, Counted("counted"))
    fit_on = {"validation_data": (x[:64], y[:64]), "validation_batch_size": 64}
    model.fit(x[64:128], y[:64], 64, verbose=0, callbacks=[monitor], **fit_on)
    # 0.9 is less than half of the distance between 2,048 and the next number.
    (verdict,) = monitor.verdicts
    assert verdict.numbers["metric"] == "counted"
