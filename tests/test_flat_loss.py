"""A loss that does not fall is said to be that, and no other one is."""

import math

import keras
import numpy as np
import pytest
from monitor_models import BACKEND

import keras_mixprec as kmp
from keras_mixprec.reporting.flat_loss import flat_loss
from keras_mixprec.reporting.what_next import what_next

STEPS = 50 * np.arange(1, 41)
CHANCE = math.log(10)


def noise(share):
    return 1 + share * np.random.default_rng(0).normal(size=len(STEPS))


def said(values, steps=STEPS, **changed):
    layer = {"path": "a", "compute_dtype": "float16"}
    overview = {"events": [], "layers": [layer], "skipped": 0}
    overview |= {"headline": {"state": "healthy"}, "last_step": int(steps[-1])}
    course = {"steps": steps.tolist(), "values": np.asarray(values).tolist()}
    return flat_loss(overview | {"loss": course} | changed)


DEMOTED = [{"kind": "demote", "step": 1900, "layers": {}}]


@pytest.mark.parametrize("spread", [0, 1e-3, 0.03])
def test_a_loss_at_chance_did_not_fall(spread):
    text = said(CHANCE * noise(spread))
    assert text.startswith("The loss did not fall: 2.")
    assert " at step 250, 2." in text
    assert " at step 2,000. The same run in float32 shows" in text


@pytest.mark.parametrize(
    ("values", "changed"),
    [
        (CHANCE * noise(1e-3) * np.linspace(1, 0.99, 40), {}),
        (np.r_[2 * CHANCE, CHANCE * noise(1e-3)[1:]], {}),
        (0.3 * noise(1e-3), {}),
        (CHANCE * noise(0.3), {}),
        (CHANCE * noise(0), {"events": DEMOTED}),
        (CHANCE * noise(0), {"skipped": 1000}),
        (CHANCE * noise(0), {"headline": {"state": "failing"}}),
        (np.full(40, math.nan), {}),
    ],
    ids=[
        "falls slowly",
        "fell at first",
        "is low, as of trained weights",
        "varies, as what is learnt does",
        "has just been repaired",
        "is of steps that were skipped",
        "is of a run that fails",
        "was never finite",
    ],
)
def test_nothing_is_said_of_a_loss_that(values, changed):
    assert said(values, **changed) is None


def told_of_repair(values, changed_at):
    """What is left to do where a repair was made at a step."""
    change = {"before": "mixed_float16", "after": "float32"}
    layer = {"path": "a", "compute_dtype": "float32", "share_of_flops": 1.0}
    found = {"kind": "verdict", "verdict": "forward_overflow", "layer": "a"}
    demoted = {"kind": "demote", "step": changed_at, "layers": {"a": change}}
    steps = list(range(50, 50 * len(values) + 1, 50))
    overview = {
        "events": [found | {"step": 1}, demoted],
        "layers": [layer],
        "loss": {"steps": steps, "values": list(values)},
        "finding": {"event": 0, "repaired": True},
        "flat_loss": None,
    }
    return what_next(overview)["text"]


@pytest.mark.parametrize(
    ("values", "changed_at", "expected"),
    [
        ([2.0, 2.0, 1.0, 0.5], 100, "Nothing else is left to do"),
        # The fault hid a part of it.
        ([0.1, 0.1, 2.0, 0.5], 100, "Nothing else is left to do"),
        (
            [2.0, 2.0, 2.0, 2.0],
            100,
            "has not fallen since the repair: 2 before",
        ),
        (
            [2.0, 2.0, 2.5, 2.6],
            100,
            "has not fallen since the repair: 2 before",
        ),
        ([0.2] * 8, 0, "has not fallen since the repair: 0.2 at step 50"),
        ([2.0, 2.0], 100, "no loss is known from after the repair"),
    ],
)
def test_a_repair_is_not_enough_where_the_loss_does_not_fall(
    values, changed_at, expected
):
    text = told_of_repair(values, changed_at)
    assert expected in text
    assert ("left to do" in text) == ("left to do" in expected)


def test_nothing_is_said_of_a_short_run():
    assert said([CHANCE] * 5, STEPS[:5]) is None
    assert said([CHANCE] * 40, np.arange(1, 41)) is None


def test_without_a_layer_in_16_bits_no_comparison_is_asked_for():
    layers = [{"path": "a", "compute_dtype": "float32"}]
    assert said([CHANCE] * 40, layers=layers).endswith("no layer in 16 bits.")


def test_a_model_of_zeros_is_said_to_learn_nothing(tmp_path):
    zeros = {"kernel_initializer": "zeros", "use_bias": False}
    model = keras.Sequential([keras.Input((4,))])
    model.add(keras.layers.Dense(4, "relu", **zeros))
    model.add(keras.layers.Dense(2, **zeros))
    kmp.apply_policy(model, "mixed_float16")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    sgd = kmp.LossScaleOptimizer("sgd")
    model.compile(sgd, loss, jit_compile=BACKEND == "jax")
    monitor = kmp.MixPrecMonitor(tmp_path, 8, max_overhead=1, verbose=0)
    x = np.random.default_rng(0).normal(size=(320, 4))
    model.fit(x, np.arange(320) % 2, 4, verbose=0, callbacks=[monitor])
    text = "The loss did not fall: 0.693 at step 16, 0.693 at step 80."
    assert text in " ".join(str(monitor.report).split())
