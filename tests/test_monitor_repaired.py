"""A repaired run looks repaired: what float32 holds is no finding."""

import numpy as np
import pytest
from monitor_models import monitor, scalars, told
from tuner_models import chain, fit, tuner

import keras_mixprec as kmp

# `big` computes 300,000, which float16 does not hold, in float32.
VALUES = [1.0] * 3 + [1000.0] * 20


def repaired(tmp_path):
    watcher = monitor(tmp_path, update_freq=1, probe_every=1)
    fit(chain(), VALUES, watcher, tuner())
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    return watcher, run


def test_least_headroom_is_that_of_layers_in_16_bits(tmp_path):
    watcher, _ = repaired(tmp_path)
    path, bits = watcher.summary.headroom["activation"]
    assert path == "first"
    assert bits == np.log2(65504 / 1000)


def test_headroom_of_what_is_not_finite_is_none(tmp_path):
    watcher = monitor(tmp_path, update_freq=1, probe_every=1)
    fit(chain(), [1000.0] * 9, watcher)
    assert watcher.summary.headroom["activation"] == ("big", -np.inf)


def test_curves_are_of_layers_in_16_bits(tmp_path):
    watcher, run = repaired(tmp_path)
    at = max(layer["demoted_at"] or 0 for layer in run["layers"])
    bits = scalars(tmp_path, "mixprec_ranges/activation_headroom_bits")
    later = [value for step, value in bits.items() if step > at + 1]
    assert later
    assert min(later) > 6
    assert all(event["layer"] == "first" for event in told(tmp_path, "trend"))


def test_the_data_say_which_layers_are_beyond_and_which_repaired(tmp_path):
    _, run = repaired(tmp_path)
    layers = {layer["path"]: layer for layer in run["layers"]}
    assert layers["big"]["beyond"] == "float16"
    assert layers["big"]["repaired"]
    assert layers["big"]["repaired_verdicts"] == layers["big"]["verdicts"]
    assert layers["first"]["beyond"] is None
    assert not layers["first"]["repaired"]
    assert run["formats"]["float16"] == run["format"]
    assert run["formats"]["float32"] == {
        "name": "float32",
        "maximum_bits": pytest.approx(128),
        "maximum_exponent": 128,
        "normal_exponent": -126,
        "subnormal_exponent": -149,
    }


def test_what_is_not_repaired_stays_a_finding(tmp_path):
    fit(chain(), [1000.0] * 9, monitor(tmp_path, update_freq=1))
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    layers = {layer["path"]: layer for layer in run["layers"]}
    assert layers["big"]["verdicts"] == ["forward_overflow"]
    assert not layers["big"]["repaired"]
