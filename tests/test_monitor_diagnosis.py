"""The monitor names the layer, in the middle of `fit`."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from monitor_models import (
    BACKEND,
    JITS,
    each_jit,
    monitor,
    not_torch,
    told,
)

import keras_mixprec as kmp
from keras_mixprec import _clock

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(160, 8)).astype("float32")
Y = RANDOM.integers(0, 3, 160)
JIT = next(iter(JITS))


class Squares(layers.Layer):
    """Overflows in float16 where the input exceeds 255."""

    def call(self, x):
        return ops.sqrt(ops.square(x * 300.0) + 1.0)


@each_jit
def test_a_run_that_ends_in_skips_is_diagnosed_at_its_end(jit, tmp_path):
    model = model_with(Squares(name="bad"), jit=jit)
    watcher = kmp.MixPrecMonitor(tmp_path, verbose=0)
    model.fit(X, Y, batch_size=20, verbose=0, callbacks=[watcher])
    assert model.optimizer.skipped_steps == 8
    assert {v.layer for v in watcher.verdicts} == {"bad"}
    assert {v.step for v in watcher.verdicts} == {8}
    assert "bad overflowed" in str(watcher.report)


def model_with(*middle, jit=JIT, kind=keras.Sequential, **compiling):
    model = kind([keras.Input((8,)), *middle, layers.Dense(3, name="head")])
    kmp.apply_policy(model, "mixed_float16")
    model.compile(
        kmp.LossScaleOptimizer("adam"),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit,
        **compiling,
    )
    return model


def run(model, tmp_path, callbacks=(), **arguments):
    watcher = monitor(tmp_path, update_freq=1, **arguments)
    history = model.fit(
        X,
        Y,
        batch_size=8,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[watcher, *callbacks],
    )
    return watcher, history.history["loss"]


def found(watcher):
    return [(v.kind, v.layer) for v in watcher.verdicts]


@each_jit
def test_a_layer_that_overflows_is_named(tmp_path, jit, capsys):
    model = model_with(layers.Dense(8), Squares(name="squares"), jit=jit)
    # At 2% nobody looks in a run as short as this.
    watcher, _ = run(model, tmp_path, max_overhead=0.5, verbose=1)
    assert found(watcher) == [("forward_overflow", "squares")]
    [event] = told(tmp_path, "verdict")
    assert event["verdict"] == "forward_overflow"
    assert event["layer"] == "squares"
    assert event["step"] == watcher.verdicts[0].step < 40
    printed = capsys.readouterr().out
    assert printed.count("forward_overflow in 'squares'") == 1


@pytest.mark.parametrize("seconds", [0.0, 3600.0])
@pytest.mark.parametrize("steps", [8, 60])
def test_a_failing_run_is_diagnosed_on_any_machine(
    steps, seconds, tmp_path, clock
):
    """Be it that time stands still, or that each look at it takes an hour."""

    def read():
        clock.wait(seconds)
        return clock.now

    model = model_with(layers.Dense(8), Squares(name="squares"))
    watcher = kmp.MixPrecMonitor(tmp_path, verbose=0)
    x, y = (np.repeat(a, 8, axis=0)[: 8 * steps] for a in (X, Y))
    with _clock.set_to(read):
        model.fit(x, y, 8, 2, 0, shuffle=False, callbacks=[watcher])
    assert found(watcher) == [("forward_overflow", "squares")]
    assert watcher.verdicts[0].step in (8, 50)


@each_jit
def test_a_healthy_run_trains_on_as_if_nothing_had_been(tmp_path, jit):
    def losses(watched):
        keras.utils.set_random_seed(3)
        model = model_with(layers.Dense(8), layers.Dropout(0.3), jit=jit)
        if not watched:
            history = model.fit(
                X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0
            )
            return history.history["loss"]
        watcher, losses = run(model, tmp_path)
        assert watcher.verdicts == []
        assert watcher._session.examiner.schedule.cost is not None
        return losses

    plain, diagnosed = losses(False), losses(True)
    if BACKEND == "torch" or not jit:
        assert diagnosed == plain
    else:
        np.testing.assert_allclose(diagnosed, plain, rtol=1e-3)


@not_torch
def test_several_steps_per_execution(tmp_path):
    model = model_with(
        layers.Dense(8), Squares(name="squares"), steps_per_execution=4
    )
    watcher, _ = run(model, tmp_path)
    assert model.optimizer.attempted_steps == 40
    if watcher.verdicts:
        assert found(watcher) == [("forward_overflow", "squares")]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="It counts its traces.")
def test_the_step_is_not_traced_again(tmp_path):
    import tensorflow as tf

    traces = []

    class Counting(keras.Sequential):
        def train_step(self, data):
            if tf.inside_function():
                traces.append(1)
            return super().train_step(data)

    model = model_with(layers.Dense(8), kind=Counting)
    run(model, tmp_path, max_overhead=0)  # Its guards are traced once.
    before = len(traces)
    watcher, _ = run(model, tmp_path)
    assert watcher._session.examiner.schedule.cost is not None
    assert len(traces) == before


def test_bad_data_is_no_layers_fault(tmp_path):
    model = model_with(layers.Dense(8))
    x = X.copy()
    x[40:] = np.nan
    watcher = monitor(tmp_path, update_freq=1)
    model.fit(x, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[watcher])
    assert found(watcher) == [("bad_data", None)]


class Fragile(layers.Layer):
    """Refuses to run again once told to, as a layer with own state may."""

    broken = False

    def call(self, x):
        if self.broken:
            raise RuntimeError("only once")
        return ops.sqrt(ops.square(x * 300.0) + 1.0)


class Break(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        # After the step was traced, or for torch after two.
        self.model.get_layer("fragile").broken = batch > 1


@pytest.mark.skipif(BACKEND == "torch", reason="The step itself would fail.")
@pytest.mark.usefixtures("training_goes_on")
def test_what_cannot_be_diagnosed_is_trained_on(tmp_path):
    model = model_with(Fragile(name="fragile"))
    x = X.copy()
    x[16:] = 1e4
    watcher = monitor(tmp_path, update_freq=1)
    with pytest.warns(
        UserWarning, match="cannot diagnose.*only once"
    ) as warned:
        model.fit(x, Y, batch_size=8, verbose=0, callbacks=[watcher, Break()])
    assert model.optimizer.attempted_steps == 20
    [event] = told(tmp_path, "diagnosis_failed")
    assert "in call\n" in event["details"]
    lines = [str(w.message) for w in warned if w.category is UserWarning]
    for line in [*lines, event["reason"]]:
        assert len(line) < 300
        assert not {"\n", "\x1b"} & {*line}
    assert "\x1b" not in event["details"]


@pytest.mark.skipif(BACKEND == "torch", reason="The step itself would fail.")
@pytest.mark.usefixtures("training_goes_on")
@pytest.mark.parametrize("beside_a_monitor", [False, True])
def test_the_callback_that_asked_is_named(tmp_path, beside_a_monitor):
    model = model_with(Fragile(name="fragile"))
    callbacks = [kmp.PrecisionTuner(verbose=0), Break()]
    if beside_a_monitor:
        callbacks.append(monitor(tmp_path))
    # Small enough for the audit before the first step; the next one raises,
    # and the three steps that are skipped after it are not diagnosed.
    x = X / 1000
    x[136:] = 1e4
    with pytest.warns(UserWarning, match="cannot diagnose") as warned:
        model.fit(x, Y, 8, verbose=0, callbacks=callbacks, shuffle=False)
    lines = [str(w.message) for w in warned if w.category is UserWarning]
    [line] = [line for line in lines if "cannot diagnose" in line]
    assert line.startswith("PrecisionTuner cannot diagnose")


@not_torch
def test_nothing_is_left_behind_by_an_epoch_that_ends(tmp_path):
    def batches():
        for start in range(0, 32, 8):
            yield X[start : start + 8], Y[start : start + 8]

    model = model_with(layers.Dense(8))
    model.fit(X[:8], Y[:8], verbose=0)
    # Of a generator Keras asks for one batch more than there are.
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(
            batches(),
            steps_per_epoch=5,
            shuffle=False,
            verbose=0,
            callbacks=[monitor(tmp_path, update_freq=4)],
        )
    assert model.train_function.__name__ != "train"
    model.fit(X[:8], Y[:8], verbose=0)


class Wrapper(keras.Model):
    """Builds what it wraps in its first `train_step`."""

    def __init__(self):
        super().__init__()
        keras.config.set_dtype_policy("mixed_float16")
        self.inner = keras.Sequential(
            [layers.Dense(8), Squares(name="squares"), layers.Dense(3)]
        )
        self.compile(kmp.LossScaleOptimizer("adam"), jit_compile=False)

    def train_step(self, data):
        import tensorflow as tf

        x, _ = data
        with tf.GradientTape() as tape:
            wrong = ops.square(ops.cast(self.inner(x), "float32") - 1)
            loss = ops.mean(wrong)
            scaled = self.optimizer.scale_loss(loss)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(scaled, weights), weights)
        return {"loss": loss}


class Uncallable(Wrapper):
    def call(self, x):
        raise TypeError("not like this")


each_wrapper = pytest.mark.parametrize("kind", [Wrapper, Uncallable])


@each_wrapper
def test_a_model_that_cannot_be_built_stays_unbuilt(kind):
    model = kind()
    with pytest.raises(ValueError, match="The model '.*' is not built, and"):
        kmp.diagnose(model, X[:8], Y[:8])
    assert not any(part.built for part in [model, model.inner])


@pytest.mark.skipif(BACKEND != "tensorflow", reason="Keras has to build it.")
@each_wrapper
def test_a_model_that_its_first_step_builds_is_diagnosed_later(kind, tmp_path):
    model, tuner = kind(), kmp.PrecisionTuner(verbose=0)
    callbacks = [monitor(tmp_path), tuner]
    with pytest.warns(UserWarning, match="before its first step") as warned:
        model.fit(X * 100, Y, 8, epochs=3, verbose=0, callbacks=callbacks)
    lines = [str(w.message) for w in warned if w.category is UserWarning]
    assert len(lines) == 1
    assert "\n" not in lines[0]
    [event] = told(tmp_path, "diagnosis_failed")
    assert "is not built" in event["reason"]
    assert model.inner.get_layer("squares").compute_dtype == "float32"
