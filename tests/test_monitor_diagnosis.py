"""The monitor names the layer, in the middle of `fit`."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from monitor_models import (
    BACKEND,
    DEFAULTS,
    compiling,
    dense,
    each_jit,
    every_backend,
    monitor,
    not_torch,
    one_backend,
    only_tensorflow,
    told,
    watched,
)
from zoo.own_step import OwnStep

import keras_mixprec as kmp
from keras_mixprec.reporting.run import Run
from keras_mixprec.reporting.run_files import RunFiles

pytestmark = one_backend

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(160, 8)).astype("float32")
Y = RANDOM.integers(0, 3, 160)


class Large(layers.Layer):
    """Overflows in float16 where the input exceeds 255 / 300."""

    def call(self, x):
        return ops.sqrt(ops.square(x * 300.0) + 1.0)


def model_with(*middle, jit=None, **compiling):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    wide = {"inputs": 8, "outputs": 3, "optimizer": "adam", "loss": loss}
    return dense(*middle, jit=jit, **wide, **compiling)


def overflowing(jit=None, **compiling):
    middle = layers.Dense(8), Large(name="large")
    return model_with(*middle, jit=jit, **compiling)


def run(folder, model, *others, data=(X, Y), **arguments):
    usual = {"update_freq": 1, "batch_size": 8, "epochs": 2}
    return watched(folder, data, model, *others, **usual | arguments)


def found(run):
    return [(v.kind, v.layer) for v in run.verdicts]


LARGE = [("forward_overflow", "large")]


@pytest.mark.long
@each_jit
def test_a_layer_that_overflows_is_named(tmp_path, jit, capsys):
    # With 2% nothing would be measured in so short a run.
    done = run(tmp_path, overflowing(jit), max_overhead=0.5, verbose=1)
    assert found(done) == LARGE
    [event] = done.told("verdict")
    assert (event["verdict"], event["layer"]) == LARGE[0]
    assert event["step"] == done.verdicts[0].step < 40
    assert capsys.readouterr().out.count("forward_overflow in") == 1
    assert "ops.sqrt(ops.square" in str(kmp.load_report(tmp_path))


@every_backend
@pytest.mark.parametrize("tuned", [False, True])
def test_a_run_that_ends_in_nan_is_no_healthy_one(tuned, tmp_path):
    model = model_with(layers.Dense(8))
    kmp.apply_policy(model, "mixed_bfloat16")
    model.compile("adam", "mse")
    y = np.where(np.arange(480) == 470, np.nan, 1.0).reshape(160, 3)
    others = [kmp.PrecisionTuner(verbose=0)] * tuned
    usual = {"epochs": 1, "probe_every": 100, "max_overhead": 0.02}
    done = run(tmp_path, model, *others, data=(X, y), **usual)
    # The arrays of `fit` show why.
    assert found(done) == [("bad_data", None), ("weights_lost", None)]
    assert done.verdicts[0].numbers["samples_of_y"] == [156]


@pytest.mark.parametrize("seconds", [0.0, 3600.0])
@pytest.mark.parametrize(
    ("steps", "found_at"), [pytest.param(8, 8, marks=every_backend), (60, 50)]
)
def test_a_failing_run_is_diagnosed_on_any_machine(
    steps, found_at, seconds, tmp_path, clock
):
    """Be it that time stands still, or that each look at it takes an hour."""
    data = [np.repeat(a, 8, axis=0)[: 8 * steps] for a in (X, Y)]
    options = DEFAULTS | {"update_freq": 50, "epochs": 1}
    with clock.each_look_takes(seconds):
        done = run(tmp_path, overflowing(), data=tuple(data), **options)
    assert done.model.optimizer.skipped_steps > 0.9 * steps
    assert found(done) == LARGE
    assert done.verdicts[0].step == found_at


def compared(log_dir):
    """The steps that were compared with float32."""
    log = Run("run", RunFiles(str(log_dir / "mixprec")))
    name = "forward_error_against_float32"
    if name not in [m["name"] for m in log.metrics]:
        return []
    return log.grid(name, 100).last.tolist()


@every_backend
@only_tensorflow
def test_the_step_is_not_traced_again(tmp_path):
    import tensorflow as tf

    traces = []

    class Counting(keras.Sequential):
        def train_step(self, data):
            if tf.inside_function():
                traces.append(1)
            return super().train_step(data)

    model = model_with(layers.Dense(8), kind=Counting, jit=False)
    run(tmp_path / "a", model, max_overhead=0)  # Its guards are traced once.
    before = len(traces)
    run(tmp_path / "b", model)
    assert compared(tmp_path / "b")
    assert len(traces) == before


class Fragile(layers.Layer):
    """Refuses to run again once told to, as a layer with own state may."""

    broken = False

    def call(self, x):
        if self.broken:
            raise RuntimeError("only once")
        return ops.sqrt(ops.square(x * 300.0) + 1.0)


class Break(keras.callbacks.Callback):
    """After the step was traced; op by op it would raise itself."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.get_layer("fragile").broken = batch > 1


@every_backend
@not_torch
@pytest.mark.usefixtures("training_goes_on")
@pytest.mark.parametrize("who", ["monitor", "tuner"])
def test_what_cannot_be_diagnosed_is_trained_on(who, tmp_path):
    model = model_with(Fragile(name="fragile"), jit=BACKEND == "jax")
    # A tuner audits before the first step, so nothing may overflow there. The
    # next step raises. Three skipped steps are not diagnosed.
    x = X if who == "monitor" else X / 1000
    x = np.concatenate([x[:136], np.full((24, 8), 1e4, "float32")])
    watcher = monitor(tmp_path, update_freq=1)
    tuner = kmp.PrecisionTuner(verbose=0)
    callbacks = [Break(), watcher if who == "monitor" else tuner]
    with pytest.warns(UserWarning, match="cannot diagnose") as warned:
        model.fit(x, Y, 8, verbose=0, callbacks=callbacks, shuffle=False)
    assert model.optimizer.attempted_steps == 20
    lines = [str(w.message) for w in warned if w.category is UserWarning]
    if who == "monitor":
        [event] = told(tmp_path, "diagnosis_failed")
        assert "in call\n" in event["details"]
        assert "\x1b" not in event["details"]
        lines.append(event["reason"])
        assert all("only once" in line for line in lines)
    else:
        [line] = [line for line in lines if "cannot diagnose" in line]
        assert line.startswith("PrecisionTuner")
    for line in lines:
        assert len(line) < 300
        assert not {"\n", "\x1b"} & {*line}


class Wrapper(OwnStep):
    """Builds what it wraps in its first `train_step`."""

    def __init__(self):
        super().__init__()
        keras.config.set_dtype_policy("mixed_float16")
        self.inner = keras.Sequential(
            [layers.Dense(8), Large(name="large"), layers.Dense(3)]
        )
        self.compile(kmp.LossScaleOptimizer("adam"), jit_compile=False)

    def loss_of(self, x, y):
        return ops.mean(ops.square(ops.cast(self.inner(x), "float32") - 1))


class Uncallable(Wrapper):
    def call(self, x):
        raise TypeError("not like this")


each_wrapper = pytest.mark.parametrize("kind", [Wrapper, Uncallable])


# Elsewhere Keras has to build it.
@pytest.mark.long
@every_backend
@only_tensorflow
@each_wrapper
def test_a_model_that_its_first_step_builds_is_diagnosed_later(kind, tmp_path):
    model, tuner = kind(), kmp.PrecisionTuner(verbose=0)
    callbacks = [monitor(tmp_path), tuner]
    with pytest.warns(UserWarning, match="its first step") as warned:
        model.fit(X * 100, Y, 8, epochs=3, verbose=0, callbacks=callbacks)
    [line] = [str(w.message) for w in warned if w.category is UserWarning]
    assert "\n" not in line
    [event] = told(tmp_path, "diagnosis_failed")
    assert "is not built" in event["reason"]
    assert model.inner.get_layer("large").compute_dtype == "float32"


# Layers that get gradients of exactly zero: vanished, or zero by design.

LOST = ["first", "lost"]


def in_metres(jit=None):
    """A head in SI units, and another one that keeps the loss scale low."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(8, name="first")(inputs)
    metres = layers.Dense(1, name="lost")(hidden)
    metres = layers.Rescaling(1e-7, name="metres")(metres)
    large = layers.Dense(1, name="large")(inputs)
    model = keras.Model(inputs, [metres, large])
    kmp.apply_policy(model, "mixed_float16")
    adam = keras.optimizers.Adam(1e-3, epsilon=1e-16)
    optimizer = kmp.LossScaleOptimizer(adam)
    model.compile(optimizer, loss=["mse", "mse"], **compiling(jit))
    return model


def trained(folder, model, steps=40, **arguments):
    x = np.random.default_rng(0).normal(size=(8 * steps, 4)).astype("float32")
    y = [2e-7 * x[:, :1], x[:, :1]][: len(model.outputs)]
    arguments = DEFAULTS | {"batch_size": 8} | arguments
    return watched(folder, (x, y), model, **arguments)


@pytest.mark.long
@each_jit
def test_gradients_that_vanish_at_every_step_are_found(jit, tmp_path):
    model = in_metres(jit)
    before = [model.get_layer(name).get_weights()[0] for name in LOST]
    done = trained(tmp_path, model, update_freq=50)
    after = [model.get_layer(name).get_weights()[0] for name in LOST]
    assert all(map(np.array_equal, before, after))
    (verdict,) = done.verdicts
    assert verdict.kind == "scale_too_low"
    assert verdict.numbers["first"] == "first"
    assert done.summary.headline["state"] == "warning"
    (step,) = compared(tmp_path)
    assert 32 <= step <= 40


class Gate(layers.Layer):
    """Lets nothing back into what is before it, in float32 neither."""

    def call(self, x):
        return x + 0.0 * ops.cast(ops.sign(x), x.dtype) - x


@pytest.mark.long
@pytest.mark.parametrize(
    "policy",
    [pytest.param("mixed_float16", marks=every_backend), "mixed_bfloat16"],
)
def test_gradients_that_are_zero_in_float32_are_no_finding(policy, tmp_path):
    inputs = keras.Input((4,))
    dead = Gate(name="gate")(layers.Dense(1, name="dead")(inputs))
    live = layers.Dense(1, name="live")(inputs)
    model = keras.Model(inputs, layers.Add()([dead, live]))
    kmp.apply_policy(model, policy)
    model.compile("sgd", "mse", **compiling(None))
    done = trained(tmp_path, model, 80, update_freq=4)
    assert done.verdicts == []
    assert done.summary.headline["state"] == "healthy"
    assert len(compared(tmp_path)) == 1


@pytest.mark.long
@every_backend
def test_what_is_all_zero_is_no_share_of_what_vanishes(tmp_path):
    trained(tmp_path, in_metres(), 31)
    log = Run("run", RunFiles(str(tmp_path / "mixprec")))
    for metric in "weight_gradient_below", "weight_gradient_subnormal":
        grid = log.grid(metric, 100)
        rows = dict(zip(grid.layers, grid.worst, strict=True))
        assert np.all(np.isinf(rows["lost"]))
        assert np.all(np.isfinite(rows["large"]))


class Ratio(layers.Layer):
    """0 / 0 for a row of zeros, in any dtype."""

    def call(self, x):
        return x / keras.ops.sum(keras.ops.abs(x), axis=-1, keepdims=True)


@every_backend
def test_the_batch_that_fails_is_found_among_those_that_do_not(tmp_path):
    model = model_with(Ratio(name="ratio"))
    x = np.array(X)
    x[::24] = 0.0
    done = run(tmp_path, model, data=(x, Y), epochs=4, update_freq=9)
    assert [kind for kind, _ in found(done)][:1] == ["divergence"]
    assert done.verdicts[0].numbers["in_layer"] == "ratio"
    assert done.verdicts[0].numbers["operation"] == "0 / 0"
