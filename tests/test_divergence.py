"""A run that diverges is told from one that 16 bits fail."""

import keras
import numpy as np
import pytest
from keras import layers
from monitor_models import BACKEND, monitor, told
from scale_use_models import Step, compiled
from tuner_models import chain, fit, tuner

import keras_mixprec as kmp

FEATURES, ROWS, STEPS = 8, 16, 12


class Jump(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that is right for four steps."""

    def __call__(self, step):
        return keras.ops.where(keras.ops.cast(step, "int32") < 4, 1e-3, 1e3)


def dense(depth=2, **last):
    inner = [
        layers.Dense(16, "relu", kernel_initializer="he_normal")
        for _ in range(depth)
    ]
    return [*inner, layers.Dense(4, dtype="float32", **last)]


def images():
    return [
        layers.Reshape((4, 2, 1)),
        layers.Conv2D(8, 2, activation="relu"),
        layers.Flatten(),
        *dense(),
    ]


SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# Layers, optimizer, loss and the rate that the advice is about.
RUNS = {
    "images": (images, lambda: SGD(1000.0), LOGITS, 1000.0),
    "slower": (images, lambda: SGD(100.0), LOGITS, 100.0),
    "adam": (images, lambda: ADAM(10.0), LOGITS, 10.0),
    "jump": (dense, lambda: SGD(Jump()), LOGITS, 1000.0),
    "regression": (dense, lambda: SGD(10.0), "mse", 10.0),
    # Its weights are hardly larger after a step, its loss is.
    "deep": (lambda: dense(12), lambda: ADAM(1.0), LOGITS, 1.0),
    # A probability is clipped, so that the loss stays below 17.
    "bounded": (
        lambda: dense(3, activation="softmax"),
        lambda: SGD(1e5),
        "sparse_categorical_crossentropy",
        1e5,
    ),
}


def diverging(name, callbacks, batch_size=ROWS, epochs=1, **options):
    """Trains; the loss is fine at the first step and not after it."""
    make, optimizer, loss, _ = RUNS[name]
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS * STEPS, FEATURES)).astype("float32")
    y = np.argmax(x[:, :4], 1).astype("int32")
    if loss == "mse":
        y = x[:, :4] * 3
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((FEATURES,)), *make()])
    model.compile(
        kmp.LossScaleOptimizer(optimizer()),
        loss=loss,
        jit_compile=BACKEND == "jax",
    )
    sizes = {"batch_size": batch_size, "epochs": epochs}
    model.fit(x, y, **sizes, **options, verbose=0, callbacks=callbacks)


@pytest.mark.parametrize("tuned", [False, True], ids=["alone", "tuned"])
@pytest.mark.parametrize("name", RUNS)
def test_no_layer_is_blamed_for_a_learning_rate(tmp_path, name, tuned):
    watcher, callback = monitor(tmp_path, update_freq=2), tuner()
    diverging(name, [watcher, callback][: 1 + tuned])
    (verdict,) = watcher.verdicts
    assert (verdict.kind, verdict.layer) == ("divergence", None)
    assert verdict.numbers["learning_rate"] == pytest.approx(RUNS[name][-1])
    assert f"learning rate of {RUNS[name][-1]:g}" in verdict.advice
    assert verdict.numbers["loss_at_first"] < 40
    assert callback.history == []
    assert "repair" not in str(kmp.load_report(tmp_path)).lower()


@pytest.mark.parametrize("tuned", [False, True], ids=["alone", "tuned"])
def test_validation_blames_no_layer_for_it_either(tmp_path, tuned):
    watcher, callback = monitor(tmp_path), tuner()
    callbacks = [watcher, callback][: 1 + tuned]
    diverging("images", callbacks, epochs=3, validation_split=0.25)
    (verdict,) = watcher.verdicts
    assert (verdict.kind, verdict.layer) == ("divergence", None)
    assert callback.history == []
    for event in told(tmp_path, "validation_not_finite"):
        assert "has diverged" in event["message"]


def test_a_run_of_one_batch_an_epoch_diverges_as_well(tmp_path):
    watcher = monitor(tmp_path, update_freq=2)
    diverging("images", [watcher], batch_size=ROWS * STEPS, epochs=8)
    (verdict,) = watcher.verdicts
    assert (verdict.kind, verdict.layer) == ("divergence", None)


@pytest.mark.parametrize("probe_every", [0, 100])
def test_an_outlier_is_no_divergence(tmp_path, probe_every):
    """Its loss is a million times the first one, and so it would be then."""
    watcher = monitor(tmp_path, update_freq=2, probe_every=probe_every)
    fit(chain(), [1.0] * 4 + [1000.0] * 12, watcher)
    kinds = {verdict.kind: verdict.layer for verdict in watcher.verdicts}
    assert kinds["forward_overflow"] == "big"
    assert "divergence" not in kinds


@pytest.mark.parametrize("tuned", [False, True], ids=["alone", "tuned"])
def test_a_first_loss_that_16_bits_make_infinite_is_no_divergence(
    tmp_path, tuned
):
    watcher, callback = monitor(tmp_path, update_freq=2), tuner()
    fit(chain(), [1000.0] * 12, *[watcher, callback][: 1 + tuned])
    kinds = {verdict.kind: verdict.layer for verdict in watcher.verdicts}
    assert kinds["forward_overflow"] == "big"
    assert "divergence" not in kinds


class Root(keras.layers.Layer):
    """The gradient of a square root at 0 is infinite."""

    def call(self, x):
        return keras.ops.sqrt(x * x)


def test_what_is_not_finite_in_float32_is_named():
    dead = keras.layers.Dense(2, kernel_initializer="zeros", name="dead")
    model = keras.Sequential(
        [keras.Input((2,)), dead, Root(), keras.layers.Dense(1)]
    )
    kmp.apply_policy(model, "mixed_float16")
    model.compile("sgd", "mse", jit_compile=BACKEND == "jax")
    x = np.ones((8, 2), "float32")
    [verdict] = kmp.diagnose(model, x, x[:, :1])
    assert verdict.kind == "divergence"
    assert verdict.numbers["not_finite"] == "gradients"
    assert "loss of this batch is finite" in verdict.advice
    [verdict] = kmp.diagnose(model, x, np.full((8, 1), 1e30))
    assert verdict.numbers["not_finite"] == "loss"


def seconds(rows):
    """Times since 1970, and another column, as of a log."""
    time = 1.7e9 + 3e5 * np.arange(rows)
    return np.stack([time, np.cos(time)], 1).astype("float32")


class Power(keras.layers.Layer):
    def call(self, x):
        return x**5


@pytest.mark.parametrize("make", [keras.layers.Dense, None])
def test_an_input_that_is_too_large_is_named(make):
    inputs = keras.Input((2,), name="log")
    layer = make(4, name="layer") if make else Power(name="layer")
    outputs = keras.layers.Dense(1, dtype="float32")(layer(inputs))
    model = keras.Model({"log": inputs}, outputs)
    kmp.apply_policy(model, "mixed_float16")
    model.compile("sgd", "mse", jit_compile=BACKEND == "jax")
    x = seconds(16)
    [verdict] = kmp.diagnose(model, {"log": x}, x[:, 1:])
    # The fifth power is too large for float32 as well.
    kinds = ("cast_overflow", "layer"), ("divergence", None)
    assert (verdict.kind, verdict.layer) == kinds[make is None]
    assert verdict.numbers["input"] == "x['log']"
    assert verdict.numbers["largest_input"] == x.max()
    for said in ("x['log']", "1.7", "Normalize it", "Normalization"):
        assert said in verdict.advice


def test_a_run_that_diverges_on_its_inputs_says_so(tmp_path):
    watcher = monitor(tmp_path, update_freq=2, probe_every=0)
    x = seconds(ROWS * STEPS)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4)])
    model.compile(SGD(0.1), "mse", jit_compile=BACKEND == "jax")
    kmp.apply_policy(model, "mixed_float16")
    y = np.concatenate([x, x], 1)
    model.fit(x, y, ROWS, verbose=0, callbacks=[watcher])
    assert watcher.verdicts
    for verdict in watcher.verdicts:
        if verdict.kind in ("divergence", "cast_overflow"):
            assert "Normalize it" in verdict.advice


class Twice(Step):
    def scaled(self, model, loss):
        return super().scaled(model, super().scaled(model, loss))


@pytest.mark.parametrize("scaled", [False, True])
def test_a_loss_that_nothing_logs_leaves_the_weights_to_tell(tmp_path, scaled):
    watcher = monitor(tmp_path, update_freq=2)
    x = np.random.default_rng(0).normal(size=(ROWS * STEPS, FEATURES))
    x = x.astype("float32")
    model = keras.Sequential([keras.Input((FEATURES,)), *dense()])
    kmp.apply_policy(model, "mixed_float16")
    optimizer = kmp.LossScaleOptimizer(SGD(1000.0))
    compiled(model, Step() if scaled else Twice(), optimizer)
    model.fit(x, x[:, :4], ROWS, verbose=0, callbacks=[watcher])
    (verdict,) = watcher.verdicts
    kind = "divergence" if scaled else "loss_scale_ignored"
    assert (verdict.kind, verdict.layer) == (kind, None)
    assert verdict.numbers.get("largest_weight", 1e9) > 1000
