"""What a file to resume from has to have in common with the call."""

import functools
import pathlib
import subprocess
import sys
import types

import comparison_models as models
import keras
import numpy as np
import pytest

import keras_mixprec as kmp
from keras_mixprec.analysis.resume import fingerprint


def wide(units=8):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units)])
    model.compile("sgd", "mse")
    return model


def closure(units, table=None):
    def build():
        return wide(units if table is None else table["units"])

    return build


class Builder:
    """Builds by what it has been given."""

    def __init__(self, units, array=None):
        self.units, self.array = units, array

    def __call__(self):
        return wide(self.units)

    def method(self):
        return self()


def module(text):
    made = types.ModuleType("made")
    exec(text, vars(made))
    return made.build


HELPED = """
UNITS = {}
def helper():
    return UNITS
def build():
    return helper()
"""
TABLES = {"units": 8}, {"units": 9}


OTHERS = {
    "code": (lambda: wide(8), lambda: wide(9)),
    "a closure": (closure(8), closure(9)),
    "a table in a closure": tuple(closure(8, t) for t in TABLES),
    "a partial": (functools.partial(wide, 8), functools.partial(wide, 9)),
    "a default": (lambda units=8: wide(units), lambda units=9: wide(units)),
    "an object": (Builder(8), Builder(9)),
    "a method": (Builder(8).method, Builder(9).method),
    "an array": (Builder(8, np.ones(3)), Builder(8, np.ones(4))),
    "a global of a helper": (
        module(HELPED.format(8)),
        module(HELPED.format(9)),
    ),
    "a class": (type("A", (), {"units": 8}), type("A", (), {"units": 9})),
    "a schedule": (
        keras.optimizers.schedules.ExponentialDecay(1.0, 2, 0.5),
        keras.optimizers.schedules.ExponentialDecay(1.0, 2, 0.6),
    ),
    "functions of NumPy": (np.tanh, np.sin),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_things_have_another_fingerprint(name):
    one, other = OTHERS[name]
    assert fingerprint(one) == fingerprint(one) != fingerprint(other)


def test_the_same_is_the_same_in_another_process():
    code = (
        "import test_resume as t; from keras_mixprec.analysis.resume import *;"
        "print(fingerprint({'a', 'b'}, t.Builder, t.models.dense, t.wide))"
    )
    here = pathlib.Path(__file__).parent
    found = {
        subprocess.check_output(
            [sys.executable, "-c", code], cwd=here, text=True
        ).split()[-1]
        for _ in range(2)
    }
    mine = fingerprint({"a", "b"}, Builder, models.dense, wide)
    assert found == {mine}


@pytest.fixture
def compare(tmp_path):
    return functools.partial(
        kmp.compare_precisions,
        policies=["float32", "mixed_bfloat16"],
        steps=4,
        blocks=2,
        seeds=1,
        verbose=0,
        resume=tmp_path / "record.json",
    )


def mean_of_weights(model):
    return float(np.mean(model.get_weights()[0]))


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"build": closure(9)}, "build"),
        ({"data": (np.ones((32, 6)), np.zeros((32, 8)))}, "batches_digest"),
        ({"validation_data": (np.ones((8, 6)), np.ones((8, 8)))}, "validation"),
        ({"metric": mean_of_weights, "mode": "min"}, "metric"),
        ({"callbacks": lambda: []}, "callbacks"),
    ],
)
def test_a_comparison_of_something_else_is_refused(compare, asked, named):
    given = {"build": closure(8), "data": (np.ones((32, 6)), np.ones((32, 8)))}
    first = compare(**given).rows[0]["metric"]
    assert compare(**given).rows[0]["metric"] == first
    with pytest.raises(ValueError, match=f"differs in .*{named}.*Received: re"):
        compare(**{**given, **asked})
