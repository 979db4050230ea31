"""The ranges of every layer, measured during training."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops
from monitor_models import (
    DEFAULTS,
    dense,
    each_jit,
    every_backend,
    one_backend,
    tags,
    told,
    watched,
)
from optimizer_models import numbers
from reporting_readers import read_heat, read_tag
from tuner_models import chain, tuner

from keras_mixprec.metrics import PROBED
from keras_mixprec.monitoring import diagnoses, range_log
from keras_mixprec.numerics import range_reading
from keras_mixprec.reporting.run import Run
from keras_mixprec.reporting.run_files import RunFiles

pytestmark = one_backend

RANDOM = np.random.default_rng(0)
LAYERS = ["first", "middle", "head"]


def data(rows):
    x = RANDOM.normal(size=(rows, 8)).astype("float32")
    return x, RANDOM.normal(size=(rows, 3)).astype("float32")


def sequential(jit=None):
    first = layers.Dense(6, activation="relu", name="first")
    middle = first, layers.BatchNormalization(name="middle")
    adam = keras.optimizers.Adam(0.01)
    wide = {"inputs": 8, "outputs": 3, "optimizer": adam, "scale": 2.0**8}
    return dense(*middle, jit=jit, **wide)


def measured(folder, data, model=None, *others, **arguments):
    """Returns a run whose monitor has the default settings."""
    arguments = DEFAULTS | {"batch_size": 32} | arguments
    return watched(folder, data, model or sequential(), *others, **arguments)


def logged(log_dir):
    return Run("run", RunFiles(str(log_dir / "mixprec")))


def ranges(log_dir):
    """Dict from a part to its steps, layers and headroom by both."""
    found = {}
    for part in "activation", "gradient", "weight":
        grid = logged(log_dir).grid(f"{part}_headroom_bits", 1000)
        found[part] = grid.last.tolist(), grid.layers, grid.worst
    return found


def assert_complete(model, log_dir, last):
    for steps, paths, bits in ranges(log_dir).values():
        assert paths == LAYERS
        assert (steps[0], steps[-1]) == (1, last)
        assert np.isfinite(bits).all()
    weights = ranges(log_dir)["weight"][2][:, -1]
    expected = [least_headroom(model.get_layer(name)) for name in LAYERS]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def least_headroom(layer):
    values = numbers(layer.trainable_variables)
    return np.log2(65504 / max(np.abs(v.astype("f8")).max() for v in values))


@pytest.mark.long
@each_jit
def test_135_steps_have_ranges_in_between_and_histograms(jit, tmp_path):
    model = sequential(jit)
    measured(tmp_path, data(1437), model, epochs=3)
    assert_complete(model, tmp_path, last=135)
    steps, _, _ = ranges(tmp_path)["activation"]
    assert len(steps) >= 3
    for part in "activation", "gradient":
        for name in LAYERS:
            drawn = logged(tmp_path).histogram(name, part)["steps"]
            assert (drawn[0], drawn[-1]) == (1, 135)


def test_a_run_that_ends_in_mid_epoch(tmp_path):
    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training |= batch == 5

    model = sequential()
    measured(tmp_path, data(640), model, Ends())
    assert_complete(model, tmp_path, last=6)


@pytest.mark.long
@every_backend
@pytest.mark.parametrize("seconds", [0.0, 3600.0])
@pytest.mark.parametrize("arguments", [{}, {"max_overhead": 1e-9}])
def test_the_first_and_the_last_are_read_on_any_machine(
    seconds, arguments, tmp_path, clock
):
    """Be it that time stands still, or that each look at it takes an hour."""
    model = sequential()
    with clock.each_look_takes(seconds):
        measured(tmp_path, data(200), model, epochs=2, **arguments)
    assert_complete(model, tmp_path, last=14)
    assert not told(tmp_path, "ranges_withheld")


def test_readings_in_between_take_a_share_of_the_time(
    tmp_path, monkeypatch, clock
):
    read = range_log.read_ranges

    def reading(*arguments):
        clock.wait(1.0)
        return read(*arguments)

    def step(batch, logs=None):
        clock.wait(1.0)

    monkeypatch.setattr(range_log, "read_ranges", reading)
    steps = keras.callbacks.LambdaCallback(on_train_batch_begin=step)
    options = {"batch_size": 2, "epochs": 2}
    run = measured(tmp_path / "usual", data(128), None, steps, **options)
    (event,) = run.told("ranges_measured")
    assert event["steps"] == [1, 8, 64, 128]
    assert event["seconds"] == 4.0
    options |= {"probe_every": 2, "max_overhead": 0.5}
    run = measured(tmp_path / "often", data(128), None, steps, **options)
    (event,) = run.told("ranges_measured")
    # A half of 0.5, less what is not timed: of 128 seconds and their own.
    assert 0.2 < event["seconds"] / (128 + event["seconds"]) < 0.25


@pytest.mark.long
@every_backend
def test_activations_and_gradients_are_those_of_numpy(tmp_path):
    model, (x, y) = sequential(), data(16)
    before = numbers(model.trainable_variables)
    measured(tmp_path, (x, y), model)
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


@pytest.mark.parametrize("name", ["probe_every", "max_overhead"])
def test_none_are_measured_and_the_argument_is_named(name, tmp_path):
    run = measured(tmp_path, data(64), **{name: 0})
    found = run.overview()
    assert found["heat"] is None
    for said in found["withheld"], run.watcher.report:
        assert f"`{name}=0`" in str(said).replace("`0.0`", "`0`")
    [event] = run.told("ranges_withheld")
    assert event["message"] == found["withheld"]


# A repaired run looks repaired: what float32 holds is no finding.

# `big` computes 300,000, which float16 does not hold.
OUTLIERS = {"update_freq": 1, "probe_every": 1}


@pytest.mark.long
@every_backend
def test_a_repaired_layer_is_no_finding(tmp_path):
    values = [1.0] * 3 + [1000.0] * 20
    run = watched(tmp_path, values, chain(), tuner(), **OUTLIERS)
    found = run.overview()
    by_path = {layer["path"]: layer for layer in found["layers"]}
    at = max(layer["demoted_at"] or 0 for layer in by_path.values())
    curve = run.scalars("mixprec_ranges/activation_headroom_bits")
    later = [value for step, value in curve.items() if step > at + 1]
    assert min(later) > 6
    assert all(event["layer"] == "first" for event in run.told("trend"))
    big, first = by_path["big"], by_path["first"]
    assert (big["repaired"], first["repaired"]) == (True, False)


# Readings every so many steps.


@pytest.fixture
def no_diagnoses(monkeypatch):
    monkeypatch.setattr(diagnoses, "_COST", 1e9)


undiagnosed = pytest.mark.usefixtures("no_diagnoses")


def often(folder, *middle, scale=None, model=None, jit=None, **arguments):
    """A run of epochs of 20 steps, two of them by default."""
    usual = {"update_freq": 1, "probe_every": 4, "epochs": 2, "batch_size": 8}
    if model is None:
        wide = {"inputs": 8, "outputs": 3, "optimizer": "adam"}
        model = dense(*middle, scale=scale, jit=jit, **wide)
    return watched(folder, data(160), model, **usual | arguments)


def tables(run):
    return read_heat(str(run.folder / "mixprec"))


@pytest.mark.long
@every_backend
@undiagnosed
@pytest.mark.parametrize("update_freq", [1, 1000])
def test_ranges_are_read_every_so_often(tmp_path, update_freq):
    # At this scale no step is skipped. Skips would cause more readings.
    first = layers.Dense(8, name="first")
    run = often(tmp_path, first, scale=2.0**8, update_freq=update_freq)
    found = tables(run)
    steps = [*found]
    assert len(steps) >= 5
    # The last is measured after training.
    assert {*np.diff([s for s in steps if 4 < s < 40])} <= {4, 5}
    assert {table.shape for table in found.values()} == {(2, len(PROBED))}
    bits = run.scalars("mixprec_ranges/activation_headroom_bits")
    assert [*bits] == steps
    nonfinite = run.scalars("mixprec_ranges/nonfinite_layers")
    assert {*nonfinite.values()} == {0}
    assert {t for t in tags(tmp_path) if "exponent" in t} == {
        f"mixprec_{part}_exponent/{path}"
        for part in ("activation", "gradient")
        for path in ("first", "head")
    }
    folder = str(run.folder / "mixprec")
    bins = read_tag(folder, "mixprec_activation_exponent/first")
    # After twice as many steps as before, and the last.
    assert [*bins] == [1, 5, 13, 29, 40]
    assert all(b[:, 2].sum() <= 64 for b in bins.values())


@undiagnosed
def test_ranges_are_read_after_a_skipped_step(tmp_path):
    run = often(tmp_path, layers.Dense(8), scale=2.0**30, probe_every=15)
    skipped = {event["at_step"] for event in run.told("skipped_step")}
    assert skipped <= {*tables(run)} < {*range(41)}


class Grows(layers.Layer):
    """A quarter larger in every step."""

    def build(self, shape):
        # On torch, assigning an autocast variable changes a copy of it.
        self.factor = self.add_weight(
            (), "ones", trainable=False, autocast=False
        )

    def call(self, x, training=None):
        if training:
            self.factor.assign(self.factor * 1.25)
        return ops.clip(x, -1, 1) * ops.cast(self.factor, x.dtype)


@pytest.mark.long
@every_backend
@undiagnosed
def test_a_fall_is_reported_once(tmp_path, capsys):
    grows = Grows(name="grows")
    run = often(tmp_path, grows, probe_every=2, verbose=1)
    events = {e["layer"]: e for e in run.told("trend")}
    assert len(events) == len(run.told("trend"))
    event = events["grows"]
    # 1.25 to the power of 50 is 2**16.
    assert event["step"] + event["overflows_in_steps"] == pytest.approx(50, 0.1)
    assert capsys.readouterr().out.count("of 'grows' have") == 1


@undiagnosed
@pytest.mark.usefixtures("training_goes_on")
def test_a_layer_that_cannot_be_measured_is_named_once(tmp_path, monkeypatch):
    def picky(array):
        if array.shape[-1] == 5:
            raise TypeError("no fives")
        return original(array)

    original = range_reading.statistics_of
    monkeypatch.setattr(range_reading, "statistics_of", picky)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = often(tmp_path, layers.Dense(5, name="five"))
    said = [w for w in caught if "cannot measure 'five'" in str(w.message)]
    assert len(said) == len(run.told("probe_failed")) == 1
    assert tables(run)
