"""Reports name a loss that does not fall, and no falling one."""

import math

import keras
import numpy as np
import pytest
from diagnosis_models import LOGITS, compiled, in_float16

import keras_mixprec as kmp
from keras_mixprec.reporting.flat_loss import flat_loss

pytestmark = pytest.mark.one_backend

DIVERGED = {"kind": "verdict", "verdict": "divergence", "step": 9}
DEMOTED = {"kind": "demote", "step": 1, "layers": {}}
OWN_STEP = {"kind": "train_begin", "own_step": True, "step": 0}
STEPS = 50 * np.arange(1, 41)
CHANCE = math.log(10)


def noise(share):
    return 1 + share * np.random.default_rng(0).normal(size=len(STEPS))


def course(steps, values):
    return {"steps": list(steps), "values": np.asarray(values).tolist()}


def said(values, steps=STEPS, events=(), dtype="float16"):
    layers = [{"path": "a", "compute_dtype": dtype}]
    return flat_loss(course(steps, values), events, layers)


@pytest.mark.parametrize("spread", [0, 1e-3, 0.03])
def test_a_loss_at_chance_did_not_fall(spread):
    text = said(CHANCE * noise(spread))
    assert " at step 250, 2." in text
    assert " at step 2,000." in text
    assert "float32" in text
    alone = said(CHANCE * noise(spread), dtype="float32")
    assert "no layer" in alone
    assert "float32" not in alone


@pytest.mark.parametrize(
    ("values", "changed"),
    [
        (CHANCE * noise(1e-3) * np.linspace(1, 0.99, 40), {}),
        (np.r_[2 * CHANCE, CHANCE * noise(1e-3)[1:]], {}),
        # As of trained weights.
        (0.3 * noise(1e-3), {}),
        (CHANCE * noise(0), {"events": [DEMOTED | {"step": 1900}, DEMOTED]}),
        (CHANCE * noise(0), {"events": [DIVERGED]}),
        (CHANCE * noise(0), {"events": [OWN_STEP]}),
        # Too short, in readings or in steps.
        ([CHANCE] * 5, {"steps": STEPS[:5]}),
        ([CHANCE] * 40, {"steps": np.arange(1, 41)}),
    ],
    ids=["falls", "fell at first", "low", "repaired"]
    + ["diverged", "own step", "few readings", "few steps"],
)
def test_nothing_is_said_of_a_loss_that(values, changed):
    assert not said(values, **changed)


def test_a_loss_of_chance_is_no_healthy_run(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    compiled(in_float16(model), LOGITS, keras.optimizers.SGD(1e-6))
    monitor = kmp.MixPrecMonitor(tmp_path, 8, max_overhead=1, verbose=0)
    x = np.random.default_rng(0).normal(scale=0.01, size=(320, 4))
    model.fit(x, np.arange(320) % 2, 4, verbose=0, callbacks=[monitor])
    (run,) = monitor.report.to_dict().values()
    (loss,) = (card for card in run["cards"] if card["name"] == "loss")
    assert " at step 80" in loss["sentence"]
    assert "float32" in loss["sentence"]
    assert run["headline"] == monitor.summary.headline
    assert run["headline"]["state"] == "warning"
    assert monitor.verdicts == []


def test_a_model_of_zeros_is_said_to_learn_nothing(tmp_path):
    zeros = {"kernel_initializer": "zeros", "use_bias": False}
    hidden = keras.layers.Dense(4, "relu", **zeros)
    last = keras.layers.Dense(2, **zeros)
    model = keras.Sequential([keras.Input((4,)), hidden, last])
    compiled(in_float16(model), LOGITS, "sgd")
    monitor = kmp.MixPrecMonitor(tmp_path, 8, max_overhead=1, verbose=0)
    x = np.random.default_rng(0).normal(size=(320, 4))
    model.fit(x, np.arange(320) % 2, 4, verbose=0, callbacks=[monitor])
    (run,) = monitor.report.to_dict().values()
    assert [v.kind for v in monitor.verdicts] == ["not_learning"]
