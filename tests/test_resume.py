"""A call resumes from a file only if both agree."""

import json
import os
import signal
import subprocess
import sys
import types

import compared_training
import keras
import numpy as np
import pytest

import keras_mixprec as kmp
from keras_mixprec.analysis.resume import fingerprint

pytestmark = pytest.mark.one_backend


def wide(units=8):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units)])
    model.compile("sgd", "mse")
    return model


def closure(units):
    def build():
        return wide(units)

    return build


class Builder:
    """Builds by what it has been given."""

    def __init__(self, units, array=None):
        self.units, self.array = units, array

    def __call__(self):
        return wide(self.units)


def global_of_a_helper(value):
    made = types.ModuleType("made")
    lines = f"UNITS = {value}", "def helper():", " return UNITS"
    lines += "def build():", " return helper()"
    exec("\n".join(lines), vars(made))
    return made.build


def schedule(rate):
    return keras.optimizers.schedules.ExponentialDecay(1.0, 2, rate)


OTHERS = {
    "code": (lambda: wide(8), lambda: wide(9)),
    "a closure": (closure(8), closure(9)),
    "a default": (lambda units=8: wide(units), lambda units=9: wide(units)),
    "an object": (Builder(8), Builder(9)),
    "weights": (Builder(8, wide()), Builder(8, wide())),
    "an array": (Builder(8, np.ones(3)), Builder(8, np.ones(4))),
    "a global": (global_of_a_helper(8), global_of_a_helper(9)),
    "a schedule": (schedule(0.5), schedule(0.6)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_things_have_another_fingerprint(name):
    one, other = OTHERS[name]
    assert fingerprint(one) == fingerprint(one) != fingerprint(other)


def mean_of_weights(model):
    return float(np.mean(model.get_weights()[0]))


ONES, X = np.ones((32, 8)), np.ones((32, 6))
COMPARED = {
    "build": {"build": closure(9)},
    "data": {"data": (X, 0 * ONES)},
    "metric": {"metric": mean_of_weights, "mode": "min"},
    "steps": {"steps": 6},
    "device": {},
}


@pytest.mark.parametrize("differs", COMPARED)
def test_a_comparison_of_something_else_is_refused(
    differs, tmp_path, another_device
):
    given = {"build": closure(8), "data": (X, ONES), "policies": ["float32"]}
    given |= {"steps": 4, "blocks": 2, "seeds": 1, "verbose": 0}
    given |= {"resume": tmp_path / "record.json"}
    first = kmp.compare_precisions(**given).rows[0]["metric"]
    assert kmp.compare_precisions(**given).rows[0]["metric"] == first
    if not COMPARED[differs]:
        another_device()
    with pytest.raises(ValueError, match=f"{differs}.*Received: resume="):
        kmp.compare_precisions(**given | COMPARED[differs])


# A comparison that is killed.


def killed(path, *arguments):
    done = subprocess.run(
        [sys.executable, compared_training.__file__, path, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return json.loads(path.read_text())["found"]["arms"]


def measured(record):
    """What is no time."""
    return [
        [arm["name"], arm["status"], arm["notes"], arm["share_of_flops_16bit"]]
        + [(s["seed"], s["losses"], s["metric"]) for s in arm["seeds"]]
        for arm in record["arms"]
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "record.json"
    return compared_training.compare(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "done"),
    [
        (("mixed_bfloat16", "1"), 1),
        (("mixed_bfloat16", "0", "isolate"), 0),
    ],
)
def test_killed_at_any_stage_it_comes_to_the_same(whole, tmp_path, where, done):
    path = tmp_path / "record.json"
    before = killed(path, *where)
    assert [len(arm["seeds"]) for arm in before] == [done, done]
    resumed = compared_training.compare(path, isolate="isolate" in where)
    assert measured(resumed) == measured(whole)
    # Finished trainings are not repeated, so their times are the same.
    for arm, known in zip(resumed["arms"], before, strict=True):
        assert arm["seeds"][:done] == known["seeds"]
