"""Every layer's ranges, from a run's first steps and its last, at defaults."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from monitor_models import BACKEND, JITS, each_jit, told
from optimizer_models import numbers

import keras_mixprec as kmp
from keras_mixprec import _clock
from keras_mixprec.monitoring import range_schedule as range_reader
from keras_mixprec.reporting.file_source import FileSource
from keras_mixprec.reporting.run_data import RunData

JIT = next(iter(JITS))
RANDOM = np.random.default_rng(0)
LAYERS = ["first", "middle", "head"]


def data(rows):
    x = RANDOM.normal(size=(rows, 8)).astype("float32")
    return x, RANDOM.normal(size=(rows, 3)).astype("float32")


def compiled(model, jit=JIT, **optimizer):
    kmp.apply_policy(model, "mixed_float16")
    inner = keras.optimizers.Adam(0.01, **optimizer)
    inner = kmp.LossScaleOptimizer(inner, initial_scale=2.0**8)
    model.compile(inner, loss="mse", jit_compile=jit)
    return model


def sequential(jit=JIT, **optimizer):
    model = keras.Sequential([keras.Input((8,)), *parts()])
    return compiled(model, jit, **optimizer)


def parts():
    return [
        layers.Dense(6, activation="relu", name="first"),
        layers.BatchNormalization(name="middle"),
        layers.Dense(3, name="head"),
    ]


def watched(model, log_dir, *batches, epochs=1, callbacks=(), **arguments):
    """Trains with a monitor as it comes; returns it."""
    monitor = kmp.MixPrecMonitor(log_dir, verbose=0)
    model.fit(
        *batches,
        epochs=epochs,
        verbose=0,
        callbacks=[monitor, *callbacks],
        **arguments,
    )
    return monitor


def ranges(log_dir):
    """Dict from a part to its steps and headroom by layer and step."""
    run = RunData("run", FileSource(str(log_dir / "mixprec")))
    found = {}
    for part in "activation", "gradient", "weight":
        grid = run.grid(f"{part}_headroom_bits", 1000)
        found[part] = grid.last.tolist(), grid.layers, grid.worst
    return found


def assert_complete(model, log_dir, last, names=LAYERS):
    for steps, paths, bits in ranges(log_dir).values():
        assert paths == names
        assert steps[0] == 1
        assert steps[-1] == last
        assert np.isfinite(bits).all()
    weights = ranges(log_dir)["weight"][2][:, -1]
    expected = [least_headroom(model.get_layer(name)) for name in names]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def least_headroom(layer):
    values = numbers(layer.trainable_variables)
    return np.log2(65504 / max(np.abs(v.astype("f8")).max() for v in values))


# 20 full batches of 32 rows and one of 5.
@each_jit
@pytest.mark.parametrize(
    ("rows", "epochs", "steps"), [(32, 1, 1), (64, 1, 2), (645, 1, 21)]
)
def test_runs_of_one_epoch(jit, rows, epochs, steps, tmp_path):
    model = sequential(jit)
    watched(model, tmp_path, *data(rows), epochs=epochs, batch_size=32)
    assert_complete(model, tmp_path, last=steps)


@each_jit
def test_135_steps_have_ranges_in_between_and_histograms(jit, tmp_path):
    model = sequential(jit)
    watched(model, tmp_path, *data(1437), epochs=3, batch_size=32)
    assert_complete(model, tmp_path, last=135)
    steps, _, _ = ranges(tmp_path)["activation"]
    assert len(steps) >= 3
    run = RunData("run", FileSource(str(tmp_path / "mixprec")))
    for part in "activation", "gradient":
        for name in LAYERS:
            drawn = run.histogram(name, part)["steps"]
            assert drawn[0] == 1
            assert drawn[-1] == 135


@pytest.mark.parametrize("seconds", [0.0, 3600.0])
@pytest.mark.parametrize("arguments", [{}, {"max_overhead": 1e-9}])
def test_the_first_and_the_last_are_read_on_any_machine(
    seconds, arguments, tmp_path, clock
):
    """Be it that time stands still, or that each look at it takes an hour."""

    def read():
        clock.wait(seconds)
        return clock.now

    model = sequential()
    with _clock.set_to(read):
        monitor = kmp.MixPrecMonitor(tmp_path, verbose=0, **arguments)
        model.fit(*data(645), epochs=2, verbose=0, callbacks=[monitor])
    assert_complete(model, tmp_path, last=42)
    assert not told(tmp_path, "ranges_withheld")


def test_readings_in_between_take_a_share_of_the_time(
    tmp_path, monkeypatch, clock
):
    read = range_reader.read_ranges

    def reading(*arguments):
        clock.wait(1.0)
        return read(*arguments)

    def step(batch, logs=None):
        clock.wait(1.0)

    monkeypatch.setattr(range_reader, "read_ranges", reading)
    steps = keras.callbacks.LambdaCallback(on_train_batch_begin=step)
    arguments = {"batch_size": 2, "epochs": 2, "callbacks": [steps]}
    watched(sequential(), tmp_path, *data(128), **arguments)
    (measured,) = told(tmp_path, "ranges_measured")
    assert measured["steps"] == [1, 8, 32, 64, 128]
    assert measured["seconds"] == 5.0


def test_activations_and_gradients_are_those_of_numpy(tmp_path):
    model = sequential()
    x, y = data(16)
    before = numbers(model.trainable_variables)
    watched(model, tmp_path, x, y, batch_size=16, shuffle=False)
    after = numbers(model.trainable_variables)
    assert any((a != b).any() for a, b in zip(after, before, strict=True))
    kernel, bias = (v.astype("f8") for v in after[:2])
    hidden = np.maximum(x @ kernel + bias, 0)
    gamma, beta, kernel, bias = (v.astype("f8") for v in after[2:])
    mean, variance = hidden.mean(axis=0), hidden.var(axis=0)
    normal = (hidden - mean) / np.sqrt(variance + 1e-3) * gamma + beta
    outputs = normal @ kernel + bias
    cotangents = 2.0**8 * 2 * (outputs - y) / outputs.size
    found = ranges(tmp_path)
    for part, values in ("activation", outputs), ("gradient", cotangents):
        expected = np.log2(65504 / np.abs(values).max())
        assert found[part][2][-1, -1] == pytest.approx(expected, abs=0.01)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_an_epoch_of_unknown_length(tmp_path):
    def batches():
        for rows in (32,) * 6 + (5,):
            yield data(rows)

    model = sequential()
    watched(model, tmp_path, batches(), shuffle=False)
    assert_complete(model, tmp_path, last=7)


def test_an_early_stop(tmp_path):
    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training |= batch == 5

    model = sequential()
    watched(model, tmp_path, *data(640), callbacks=[Stops()])
    assert_complete(model, tmp_path, last=6)


def test_an_exception_leaves_ranges_that_are_not_old(tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 12:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watched(sequential(), tmp_path, *data(640), callbacks=[Fails()])
    for steps, _, bits in ranges(tmp_path).values():
        assert steps[0] == 1
        assert steps[-1] >= 2
        assert np.isfinite(bits).all()


def test_a_loop_of_fits(tmp_path):
    model = sequential()
    for epoch in range(3):
        watched(model, tmp_path / str(epoch), *data(96), batch_size=32)
        assert_complete(model, tmp_path / str(epoch), last=3)
        assert len(told(tmp_path / str(epoch), "ranges_measured")) == 1


def test_gradient_accumulation(tmp_path):
    model = sequential(gradient_accumulation_steps=4)
    watched(model, tmp_path, *data(320), batch_size=32)
    assert_complete(model, tmp_path, last=10)


@keras.saving.register_keras_serializable("test_monitor_ranges")
class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.parts = parts()

    def call(self, inputs, training=None):
        x = ops.concatenate([inputs["left"], inputs["right"]], axis=-1)
        for part in self.parts:
            x = part(x)
        return x

    def get_layer(self, name):
        return next(part for part in self.parts if part.name == name)


@each_jit
def test_a_subclassed_model_of_dictionaries(jit, tmp_path):
    model = compiled(Subclassed(), jit)
    x, y = data(96)
    inputs = {"left": x[:, :3], "right": x[:, 3:]}
    watched(model, tmp_path, inputs, y, batch_size=32)
    assert_complete(model, tmp_path, last=3)


@pytest.mark.parametrize(
    "arguments", [{"probe_every": 0}, {"max_overhead": 0.0}]
)
def test_none_are_measured_and_the_argument_is_named(arguments, tmp_path):
    (name,) = arguments
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0, **arguments)
    sequential().fit(*data(64), verbose=0, callbacks=[monitor])
    overview = monitor.report.to_dict()["mixprec"]
    assert overview["heat"] is None
    assert f"`{name}=0`" in overview["withheld"]
    assert f"`{name}=0`" in str(monitor.report)
    [event] = told(tmp_path, "ranges_withheld")
    assert event["message"] == overview["withheld"]


@each_jit
@pytest.mark.parametrize("sequences", [False, True])
def test_a_cell_has_the_numbers_of_its_layer(sequences, jit, tmp_path):
    gru = layers.GRU(6, return_sequences=sequences, name="gru")
    parts = [keras.Input((5, 8)), gru, layers.Flatten(), layers.Dense(3)]
    model = compiled(keras.Sequential(parts), jit)
    x = RANDOM.normal(size=(32, 5, 8)).astype("float32")
    watched(model, tmp_path, x, data(32)[1], batch_size=32)
    for part in "activation", "gradient":
        _, paths, bits = ranges(tmp_path)[part]
        own, cell = (bits[paths.index(p)] for p in ("gru", "gru/gru_cell"))
        assert np.isfinite(own).all()
        np.testing.assert_array_equal(own, cell)


def test_no_step(tmp_path):
    monitor = watched(sequential(), tmp_path, *data(32), epochs=0)
    assert "no step was taken" in monitor.summary.ranges


@pytest.mark.usefixtures("training_goes_on")
def test_what_cannot_be_measured_is_logged_and_training_goes_on(
    tmp_path, monkeypatch
):
    def broken(*args):
        raise RuntimeError("not of this model")

    monkeypatch.setattr(range_reader, "read_ranges", broken)
    with pytest.warns(UserWarning, match="cannot measure.*not of this model"):
        monitor = watched(sequential(), tmp_path, *data(96), batch_size=32)
    assert "not of this model" in monitor.summary.ranges
    assert ranges(tmp_path)["weight"][0] == [1, 2, 3]


@pytest.mark.skipif(BACKEND != "torch", reason="Tensors of torch have graphs.")
def test_data_that_require_gradients_are_measured(tmp_path):
    import torch

    x = torch.rand(8, 4, requires_grad=True)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    kmp.apply_policy(model, "mixed_float16")
    model.compile("adam", "mse", jit_compile=False)
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0)
    model.fit(x, torch.ones(8, 1), batch_size=4, verbose=0, callbacks=[monitor])
    (run,) = monitor.report.to_dict().values()
    (layer,) = run["layers"]
    assert layer["least_headroom"] is not None
