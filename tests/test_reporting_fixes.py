"""The code in a finding runs and repairs the fault."""

import keras
import numpy as np
import pytest
from plugin_runs import tiny_transformer

import keras_mixprec as kmp
from keras_mixprec.reporting.what_next import fix_of as code_of

pytestmark = pytest.mark.one_backend

X = np.random.default_rng(0).normal(size=(160, 8)).astype("float32")


def fix_of(kind, layer=None, dtype_at_first="float16", **numbers):
    """The code for a finding, by its use."""
    event = {"kind": "verdict", "step": 1, "verdict": kind, "layer": layer}
    event |= {"direction": "forward", "numbers": numbers}
    rows = [{"path": layer, "dtypes": [[0, dtype_at_first]]}] if layer else []
    return code_of(event, [event], rows)


@pytest.fixture(scope="module")
def fixes():
    return fix_of("forward_overflow", "overflowing")


def compiled(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = kmp.LossScaleOptimizer("adam")
    model.compile(optimizer, loss, jit_compile=False)
    return model


def is_repaired(model):
    dtypes = {layer.name: layer.compute_dtype for layer in model.layers}
    return (dtypes["overflowing"], dtypes["in_0"]) == ("float32", "float16")


def test_the_copied_rules_repair_training(fixes):
    model = tiny_transformer()
    kmp.apply_policy(model, "mixed_float16")
    exec(fixes["training"], {"model": model})
    assert is_repaired(model)
    compiled(model).fit(X, np.arange(160) % 3, 8, verbose=0)
    assert int(model.optimizer.skipped_steps) == 0


def test_other_findings_have_the_call_that_repairs_them():
    names = {"optimizer": "adam"}
    exec(fix_of("scale_too_low", needed_bits=20)["training"], names)
    assert float(names["optimizer"].initial_scale) == 2.0**20
    policy = fix_of("policy", dtype="float16")["training"]
    assert "mixed_float16" in policy
    assert fix_of("bad_data") == {}


def test_rows_that_are_not_finite_are_dropped():
    rows = {"x": "1 of 3 rows", "samples_of_x": [1]}
    names = {"x": np.array([[1.0], [np.nan], [3.0]]), "y": np.arange(3)}
    exec(fix_of("bad_data", **rows)["data"], names)
    assert names["x"].tolist() == [[1.0], [3.0]]
    assert names["y"].tolist() == [0, 2]


def test_a_path_is_matched_as_it_is_written():
    code = fix_of("precision_loss", "a[0]*", "bfloat16")["training"]
    assert "'mixed_bfloat16'" in code
    assert "PrecisionRule('a[[]0][*]', 'float32')" in code
