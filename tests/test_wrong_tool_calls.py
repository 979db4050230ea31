"""Wrong calls of the tools: each is refused, with what was received."""

import keras
import numpy as np
import pytest

import keras_mixprec as kmp

pytestmark = pytest.mark.one_backend

X, Y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")


def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def call(function, *arguments, **given):
    return lambda **wrong: function(*arguments, **{**given, **wrong})


def on_model(function, **given):
    return lambda **wrong: function(**{"model": build(), **given, **wrong})


lint = on_model(kmp.lint)
compare = call(kmp.compare_precisions, build=build, data=(X, Y), verbose=0)
largest = call(kmp.largest_batch, build="nowhere:build", data=(X, Y))
minimize = on_model(kmp.minimize_float32, x=X, y=Y)
convert = on_model(kmp.convert_for_inference, calibration=X)
save = on_model(kmp.save_weights, path="small.weights.h5")
called = on_model(kmp.diagnose_call, fn=lambda: None)

WRONG = [
    (kmp.doctor, "backend", ["theano", 3]),
    (kmp.doctor, "quick", ["yes"]),
    (lint, "model", ["model.keras", keras.layers.Dense(1)]),
    (lint, "x", [3, X[:0]]),
    (lint, "policy", ["float17"]),
    (lint, "select", ["KMP101", ["E501"]]),
    (lint, "ignore", [[101]]),
    (lint, "callbacks", [[print]]),
    (compare, "build", [3, "module", build()]),
    (compare, "data", [3, (X[:0], Y[:0]), (X, Y[:7])]),
    (compare, "policies", [[], 3, ["float17"], ["float32", "float32"]]),
    (compare, "metric", [3, "speed"]),
    (compare, "mode", ["best"]),
    (compare, "tolerance", [-1, "1%"]),
    (compare, "seeds", [0, [1, 1], "3"]),
    (compare, "steps", [0, 7, 1.5]),
    (compare, "blocks", [1]),
    (compare, "isolate", ["no"]),
    (compare, "resume", [3]),
    (largest, "build", [3, "nowhere:build"]),
    (largest, "policy", ["float17"]),
    (minimize, "model", [3, keras.Sequential([keras.Input((4,))])]),
    (minimize, "policy", ["float16"]),
    (minimize, "tolerance", [-1]),
    (minimize, "y", [None]),
    (minimize, "validate_fn", [3, (X,)]),
    (minimize, "monitor", ["val_mae"]),
    (convert, "policy", ["mixed_float16"]),
    (convert, "calibration", [X[:0], [X, X]]),
    (convert, "tolerance", [0, None]),
    (convert, "rules", [["dense"]]),
    (save, "path", ["small.h5"]),
    (save, "dtype", ["float8"]),
    (called, "fn", [None, keras.Model]),
    (kmp.ComparisonResult, "record", [{}, []]),
]
CASES = [(c, name, value) for c, name, values in WRONG for value in values]


@pytest.mark.parametrize(("tool", "name", "value"), CASES)
def test_a_wrong_call_is_refused_with_what_was_received(tool, name, value):
    with pytest.raises((TypeError, ValueError), match="Received: "):
        tool(**{name: value})
    assert keras.config.dtype_policy().name == "float32"
