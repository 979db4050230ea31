"""Probed steps of a `fit`: when there are any, and what is written of them."""

import gc
import json
import warnings
import weakref

import keras
import numpy as np
import pytest
from keras import layers
from monitor_models import JITS, monitor, scalars, tags, told
from optimizer_models import only_tensorflow
from reporting_readers import read_events, read_tag

import keras_mixprec as kmp
from keras_mixprec.metrics import PROBED
from keras_mixprec.monitoring import audits as examiner
from keras_mixprec.monitoring import probe_schedule as prober
from keras_mixprec.numerics import collector as collector_module
from keras_mixprec.numerics import probed_step as probe_module

JIT = next(iter(JITS))
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(160, 8)).astype("float32")
Y = RANDOM.normal(size=(160, 3)).astype("float32")


@pytest.fixture(autouse=True)
def _no_diagnoses(monkeypatch):
    monkeypatch.setattr(examiner, "_COST", 1e9)


def model_with(*middle, scale=None, **compiling):
    model = keras.Sequential(
        [keras.Input((8,)), *middle, layers.Dense(3, name="head")]
    )
    kmp.apply_policy(model, "mixed_float16")
    model.compile(
        kmp.LossScaleOptimizer("adam", initial_scale=scale),
        loss="mse",
        jit_compile=JIT,
        **compiling,
    )
    return model


def run(model, log_dir, epochs=2, **arguments):
    arguments = {"update_freq": 1, "probe_every": 4} | arguments
    watcher = monitor(log_dir, **arguments)
    history = model.fit(
        X,
        Y,
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[watcher],
    )
    return watcher, history.history["loss"]


def heat(log_dir):
    return read_tag(str(log_dir / "mixprec"), "mixprec/heat/00000")


@pytest.mark.parametrize("update_freq", [1, 1000])
def test_steps_are_probed_every_so_often(tmp_path, update_freq):
    # At this scale no step is skipped, after which one would be probed.
    model = model_with(layers.Dense(8, name="first"), scale=2.0**8)
    run(model, tmp_path, update_freq=update_freq)
    steps = list(heat(tmp_path))
    assert len(steps) >= 5
    # The last is measured after training.
    assert set(np.diff([s for s in steps if 4 < s < 40])) <= {4, 5}
    [table] = {t.shape for t in heat(tmp_path).values()}
    assert table == (2, len(PROBED))
    bits = scalars(tmp_path, "mixprec_ranges/activation_headroom_bits")
    assert list(bits) == steps
    found = scalars(tmp_path, "mixprec_ranges/nonfinite_layers")
    assert set(found.values()) == {0}


def test_lost_updates_are_met_where_gradients_accumulate(tmp_path):
    model = model_with()
    adam = keras.optimizers.Adam(gradient_accumulation_steps=4)
    model.compile(
        kmp.LossScaleOptimizer(adam, initial_scale=2.0**8),
        loss="mse",
        jit_compile=JIT,
    )
    run(model, tmp_path)
    column = [*PROBED].index("lost_updates")
    found = [table[0, column] for table in heat(tmp_path).values()]
    assert 0 < np.isfinite(found).sum() < len(found)


def test_the_heat_names_its_rows_and_columns(tmp_path):
    run(model_with(layers.Dense(8, name="first")), tmp_path)
    contents = [
        json.loads(value.metadata.plugin_data.content)
        for event in read_events(str(tmp_path / "mixprec"))
        for value in event.summary.value
        if value.tag == "mixprec/heat/00000"
        and value.metadata.plugin_data.content
    ]
    assert contents[0]["layers"] == ["first", "head"]
    assert contents[0]["metrics"] == PROBED


def test_histograms_are_written_at_the_end_of_an_epoch(tmp_path):
    run(model_with(layers.Dense(8, name="first")), tmp_path)
    expected = {
        f"mixprec_{part}_exponent/{path}"
        for part in ("activation", "gradient")
        for path in ("first", "head")
    }
    assert {t for t in tags(tmp_path) if "exponent" in t} == expected
    tag = "mixprec_activation_exponent/first"
    bins = read_tag(str(tmp_path / "mixprec"), tag)
    # Those of the first steps are measured beside training.
    assert {20, 40} <= set(bins) <= {1, 2, 4, 20, 40}
    assert all(b[:, 2].sum() <= 64 for b in bins.values())


def test_histograms_are_not_counted_in_probed_steps(tmp_path):
    run(model_with(layers.Dense(8, name="first")), tmp_path, 5, probe_every=1)
    bins = read_tag(
        str(tmp_path / "mixprec"), "mixprec_activation_exponent/first"
    )
    # Of 100 steps, nearly all of them probed: after the first, after epochs
    # that end with twice as many steps as before, and after the last.
    assert len(heat(tmp_path)) > 80
    assert set(bins) - {2, 4} == {1, 20, 40, 80, 100}


def test_the_summary_says_where_headroom_is_least(tmp_path):
    big, small = layers.Rescaling(2.0**8, name="big"), layers.Rescaling(2.0**-8)
    model = model_with(big, small)
    kmp.apply_policy(model, "mixed_float16", rules=[])
    watcher, _ = run(model, tmp_path)
    path, bits = watcher.summary.headroom["activation"]
    assert path == "big"
    assert 4 < bits < 8  # 2**16 / (2**8 * largest of 64 normal numbers).


def test_a_skipped_step_is_followed_by_a_probe(tmp_path):
    model = model_with(layers.Dense(8), scale=2.0**30)
    run(model, tmp_path, probe_every=15)
    first = 2 + 15  # The first step is never one.
    probed = [step for step in heat(tmp_path) if step < first]
    assert probed, "Nothing was probed while steps were skipped."
    assert told(tmp_path, "skipped_step")


@pytest.mark.parametrize("arguments", [{"probe_every": 0}, {"max_overhead": 0}])
def test_none(tmp_path, arguments):
    run(model_with(), tmp_path, **arguments)
    assert heat(tmp_path) == {}


def test_the_probed_step_is_compiled_after_so_many_steps(tmp_path, clock):
    clock.wait(1e9)
    run(model_with(layers.Dense(8)), tmp_path / "few", max_overhead=0.001)
    assert told(tmp_path / "few", "probe_compiled") == []
    model = model_with(layers.Dense(8))
    run(model, tmp_path / "many", 2, probe_every=5, max_overhead=0.5)
    (event,) = told(tmp_path / "many", "probe_compiled")
    assert event["step"] == 21


def test_a_second_fit_need_not_compile_it_again(tmp_path, monkeypatch):
    made = []
    original = probe_module.Probe

    def probe(model):
        made.append(model)
        return original(model)

    monkeypatch.setattr(prober, "Probe", probe)
    model = model_with(layers.Dense(8))
    run(model, tmp_path / "a")
    run(model, tmp_path / "b")
    assert heat(tmp_path / "b")
    assert len(made) == 1
    kmp.apply_policy(model, "mixed_bfloat16")
    run(model, tmp_path / "c")
    assert len(made) == 2


def test_a_probed_model_can_be_let_go(tmp_path):
    model = model_with(layers.Dense(8))
    run(model, tmp_path)
    assert heat(tmp_path)
    path = tmp_path / "model.keras"
    model.save(path)
    assert keras.saving.load_model(path).count_params() == model.count_params()
    alive = weakref.ref(model)
    del model
    keras.backend.clear_session()
    gc.collect()
    assert alive() is None


def test_a_fall_is_reported_once(tmp_path, capsys):
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
            return keras.ops.clip(x, -1, 1) * keras.ops.cast(
                self.factor, x.dtype
            )

    model = model_with(Grows(name="grows"))
    run(model, tmp_path, probe_every=2, verbose=1)
    events = {e["layer"]: e for e in told(tmp_path, "trend")}
    event = events["grows"]
    # 1.25 to the power of 50 is 2**16.
    assert event["step"] + event["overflows_in_steps"] == pytest.approx(50, 0.1)
    printed = capsys.readouterr().out
    assert printed.count("The activations of 'grows' have") == 1
    assert printed.count("overflow in about") == len(events)


@pytest.mark.usefixtures("training_goes_on")
def test_training_goes_on_where_no_step_can_be_probed(tmp_path, monkeypatch):
    def broken(model):
        raise RuntimeError("no probe of this")

    plain = model_with(layers.Dense(8))
    keras.utils.set_random_seed(1)
    expected = plain.fit(X, Y, 8, epochs=2, shuffle=False, verbose=0)
    monkeypatch.setattr(prober, "Probe", broken)
    keras.utils.set_random_seed(0)
    model = model_with(layers.Dense(8))
    for a, b in zip(model.weights, plain.weights, strict=True):
        assert a.shape == b.shape
    with pytest.warns(UserWarning, match="cannot probe.*no probe of this"):
        run(model, tmp_path)
    [event] = told(tmp_path, "probe_failed")
    assert "no probe of this" in event["reason"]
    assert model.optimizer.attempted_steps == 40 == len(expected.epoch) * 20


@pytest.mark.usefixtures("training_goes_on")
def test_a_layer_that_cannot_be_measured_is_named_once(tmp_path, monkeypatch):
    def picky(tensor, limits):
        if tensor.shape[-1] == 5:
            raise TypeError("no fives")
        return original(tensor, limits)

    original = collector_module.measure
    monkeypatch.setattr(collector_module, "measure", picky)
    model = model_with(layers.Dense(5, name="five"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(model, tmp_path)
    told_of = [w for w in caught if "cannot measure 'five'" in str(w.message)]
    assert len(told_of) == 1
    assert len(told(tmp_path, "probe_failed")) == 1
    assert heat(tmp_path)


@only_tensorflow
def test_several_steps_per_call(tmp_path):
    model = model_with(layers.Dense(8), steps_per_execution=3)
    run(model, tmp_path)
    assert heat(tmp_path)
    assert model.optimizer.attempted_steps == 40
