"""Divergence is not confused with a fault of 16 bits."""

import keras
import numpy as np
import pytest
import scale_use_models
from diagnosis_models import LOGITS, compiled, model_of
from keras import layers
from monitor_models import BACKEND, JIT, monitor, told
from scale_use_models import Step
from tuner_models import chain, fit, tuner
from zoo.parts import dense

import keras_mixprec as kmp
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.monitoring.forecasts import Trend

FEATURES, ROWS, STEPS = 8, 16, 12


class Jump(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that is right for four steps."""

    def __call__(self, step):
        return keras.ops.where(keras.ops.cast(step, "int32") < 4, 1e-3, 1e3)


def hidden(depth=2, activation=None):
    inner = dense(16, "relu", kernel_initializer="he_normal")
    return [*[inner] * depth, dense(4, activation, dtype="float32")]


def images():
    first = layers.Reshape((4, 2, 1)), layers.Conv2D(8, 2, activation="relu")
    return [*first, layers.Flatten(), *hidden()]


SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam
SPARSE = "sparse_categorical_crossentropy"
# Layers, optimizer, loss and the rate that the advice is about.
RUNS = {
    "images": (images, lambda: SGD(1000.0), LOGITS, 1000.0),
    "adam": (images, lambda: ADAM(10.0), LOGITS, 10.0),
    "jump": (hidden, lambda: SGD(Jump()), LOGITS, 1000.0),
    # Its weights are hardly larger after a step, its loss is.
    "deep": (lambda: hidden(12), lambda: ADAM(1.0), LOGITS, 1.0),
    # A probability is clipped, so that the loss stays below 17.
    "bounded": (lambda: hidden(3, "softmax"), lambda: SGD(1e5), SPARSE, 1e5),
}
# Each with or without a tuner, pairwise; a few of them elsewhere.
CASES = [(name, bool(n % 2)) for n, name in enumerate(RUNS)]
CASES += [("images", True), ("deep", False), ("bounded", True)]
if BACKEND != "torch":
    CASES = [("images", True), ("deep", False)]


def diverging(name, callbacks, batch_size=ROWS, epochs=1, **options):
    """Trains; the loss is fine at the first step and not after it."""
    make, optimizer, loss, _ = RUNS[name]
    x = np.random.default_rng(0).normal(size=(ROWS * STEPS, FEATURES))
    y = np.argmax(x[:, :4], 1)
    keras.config.set_dtype_policy("mixed_float16")
    model = model_of(*make(), policy="mixed_float16")
    compiled(model, loss, optimizer(), JIT)
    sizes = {"batch_size": batch_size, "epochs": epochs}
    model.fit(x, y, **sizes, **options, verbose=0, callbacks=callbacks)


def check_diverged(watcher):
    (verdict,) = watcher.verdicts
    assert (verdict.kind, verdict.layer) == ("divergence", None)
    return verdict


@pytest.mark.long
@pytest.mark.parametrize(("name", "tuned"), CASES)
def test_no_layer_is_blamed_for_a_learning_rate(tmp_path, name, tuned):
    watcher, callback = monitor(tmp_path, update_freq=2), tuner()
    diverging(name, [watcher, callback][: 1 + tuned])
    verdict, rate = check_diverged(watcher), RUNS[name][-1]
    assert verdict.numbers["learning_rate"] == pytest.approx(rate)
    # Only steps that were taken again show what the cause is.
    assert verdict.numbers["cause"] == "learning_rate"
    assert verdict.numbers["holds"] < rate
    assert f": {rate:g} is too large" in verdict.advice
    assert verdict.numbers["loss_at_first"] < 40
    assert callback.history == []
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    assert run["headline"]["state"] == "failing"


@pytest.mark.long
@pytest.mark.parametrize("tuned", [False, True], ids=["alone", "tuned"])
@pytest.mark.parametrize("rows", [ROWS, ROWS * STEPS])
def test_validation_blames_no_layer_for_it_either(tmp_path, rows, tuned):
    watcher, callback = monitor(tmp_path, update_freq=2), tuner()
    callbacks = [watcher, callback][: 1 + tuned]
    options = {"epochs": 8, "validation_split": 0.25}
    diverging("images", callbacks, rows, **options)
    check_diverged(watcher)
    assert callback.history == []
    for event in told(tmp_path, "validation_not_finite"):
        assert "has diverged" in event["message"]


OUTLIER = [1.0] * 4 + [1000.0] * 12
FIRST = [1000.0] * 12


@pytest.mark.long
@pytest.mark.parametrize(
    ("values", "probe_every", "tuned"),
    [
        # Its loss is a million times the first one, and so it would be then.
        (OUTLIER, 0, False),
        (OUTLIER, 100, False),
        # 16 bits make the first loss infinite.
        (FIRST, 0, False),
        (FIRST, 0, True),
    ],
)
def test_an_outlier_is_no_divergence(tmp_path, values, probe_every, tuned):
    watcher = monitor(tmp_path, update_freq=2, probe_every=probe_every)
    fit(chain(), values, *[watcher, tuner()][: 1 + tuned])
    kinds = {verdict.kind: verdict.layer for verdict in watcher.verdicts}
    assert kinds["forward_overflow"] == "big"
    assert "divergence" not in kinds


def test_what_is_not_finite_in_float32_is_named():
    # The gradient of a square root at 0 is infinite.
    root = layers.Lambda(lambda x: keras.ops.sqrt(x * x))
    dead = dense(2, kernel_initializer="zeros", name="dead")
    model = compiled(model_of(dead, root, dense(1), shape=(2,)), jit=JIT)
    x = np.ones((8, 2), "float32")
    [verdict] = kmp.diagnose(model, x, x[:, :1])
    assert verdict.kind == "divergence"
    assert verdict.numbers["not_finite"] == "gradients"
    [verdict] = kmp.diagnose(model, x, np.full((8, 1), 1e30))
    assert verdict.numbers["not_finite"] == "loss"


def seconds(rows):
    """Times since 1970, and another column, as of a log."""
    time = 1.7e9 + 3e5 * np.arange(rows)
    return np.stack([time, np.cos(time)], 1).astype("float32")


@pytest.mark.parametrize("fits", [True, False])
def test_an_input_that_is_too_large_is_named(fits):
    inputs = keras.Input((2,), name="log")
    # The fifth power is too large for float32 as well.
    power = layers.Lambda(lambda x: x**5, name="layer")
    layer = layers.Dense(4, name="layer") if fits else power
    outputs = layers.Dense(1, dtype="float32")(layer(inputs))
    model = keras.Model({"log": inputs}, outputs)
    kmp.apply_policy(model, "mixed_float16")
    model.compile("sgd", "mse", jit_compile=JIT)
    x = seconds(16)
    [verdict] = kmp.diagnose(model, {"log": x}, x[:, 1:])
    kinds = ("divergence", None), ("cast_overflow", "layer")
    assert (verdict.kind, verdict.layer) == kinds[fits]
    assert verdict.numbers["input"] == "x['log']"
    assert verdict.numbers["largest_input"] == x.max()
    for said in ("x['log']", "1.7", "Normalize it"):
        assert said in verdict.advice


class Twice(Step):
    def scaled(self, model, loss):
        return super().scaled(model, super().scaled(model, loss))


@pytest.mark.long
@pytest.mark.parametrize(
    ("step", "kind"), [(Step(), "divergence"), (Twice(), "loss_scale_ignored")]
)
def test_a_loss_that_nothing_logs_leaves_the_weights_to_tell(
    tmp_path, step, kind
):
    watcher = monitor(tmp_path, update_freq=2)
    x = np.random.default_rng(0).normal(size=(ROWS * STEPS, FEATURES))
    x, optimizer = x.astype("float32"), kmp.LossScaleOptimizer(SGD(1000.0))
    model = scale_use_models.compiled(model_of(*hidden()), step, optimizer)
    model.fit(x, x[:, :4], ROWS, verbose=0, callbacks=[watcher])
    (verdict,) = watcher.verdicts
    assert (verdict.kind, verdict.layer) == (kind, None)
    assert verdict.numbers.get("largest_weight", 1e9) > 1000


# Forecasts of overflows.


def forecasts(headrooms):
    trend = Trend()
    return [trend.add(100 * n, bits) for n, bits in enumerate(headrooms)]


@pytest.mark.one_backend
def test_a_steady_fall_is_predicted():
    # One bit in 100 steps, and three bits left at the end.
    answers = forecasts(np.arange(12, 2, -1.0))
    assert answers[: thresholds.TREND_POINTS - 1] == [None] * 7
    assert answers[-1] == pytest.approx(300)
    # A layer that overflows already has no steps left.
    assert forecasts(np.arange(6, -4, -1.0))[-1] == 0


@pytest.mark.one_backend
def test_no_reason_to_worry():
    noise = np.random.default_rng(0).normal(6.0, 0.5, size=(50, 10))
    level = [np.full(10, bits) for bits in (5.0, np.inf, np.nan)]
    too_far_ahead = np.linspace(14, 13, 10)
    for headrooms in [np.arange(2.0, 12.0), too_far_ahead, *level, *noise]:
        assert forecasts(headrooms) == [None] * 10
