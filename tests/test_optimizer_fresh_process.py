"""A `.keras` file with our optimizer, opened by a new process."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from optimizer_models import BACKEND

from keras_mixprec import LossScaleOptimizer

LOAD = """
import sys
import keras
{extra}
optimizer = keras.saving.load_model(sys.argv[1]).optimizer
print(type(optimizer).__module__)
print(int(optimizer.iterations), optimizer.skipped_steps)
print(float(optimizer.loss_scale))
"""


@pytest.fixture
def path(tmp_path):
    x = np.ones((8, 1), "float32")
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    jit = {} if BACKEND == "jax" else {"jit_compile": False}
    model.compile(
        LossScaleOptimizer("adam", initial_scale=64.0), loss="mse", **jit
    )
    y = np.concatenate([x[:4], np.full((4, 1), np.nan, "float32")])
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    return tmp_path / "model.keras"


def load(path, extra):
    return run(path, LOAD.format(extra=extra))


def run(path, code):
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code, path],
        env=os.environ | {"KERAS_BACKEND": BACKEND},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "extra",
    ["from keras_mixprec import LossScaleOptimizer", "import keras_mixprec"],
)
def test_it_loads_with_its_state_under_another_policy(path, extra):
    result = load(path, extra)
    assert result.returncode == 0, result.stderr[-3000:]
    expected = "keras_mixprec.loss_scaling.optimizer\n1 1\n32.0\n"
    assert result.stdout == expected


def test_without_the_library_keras_says_what_is_missing(path):
    result = load(path, "")
    assert result.returncode == 1
    error = result.stderr.splitlines()[-1]
    assert "Could not locate class 'LossScaleOptimizer'" in error
    assert "'module': 'keras_mixprec.loss_scaling.optimizer'" in error


def test_without_the_optimizer_the_model_needs_keras_alone(path):
    code = (
        "import sys, keras;"
        "model = keras.saving.load_model(sys.argv[1], compile=False);"
        "print(model.count_params(), 'keras_mixprec' in sys.modules)"
    )
    result = run(path, code)
    assert result.stdout == "2 False\n", result.stderr[-3000:]
