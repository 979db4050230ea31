"""A KerasHub decoder in 16 bits makes the same tokens, also after loading."""

import keras
import numpy as np
import pytest

pytest.importorskip("keras_hub")

from hub_models import LENGTH, generate, inputs, made

import keras_mixprec as kmp

# On CPUs JAX has no attention in float16.
LOW = "bfloat16" if keras.backend.backend() == "jax" else "float16"

# KerasHub's own layers warn.
pytestmark = pytest.mark.filterwarnings("ignore")


def converted(model):
    return kmp.convert_for_inference(model, LOW, calibration=inputs())


def stored(model):
    return {v.dtype for v in model.weights if len(v.shape) > 1}


@pytest.mark.long
def test_a_task_generates_the_same_also_from_a_file(tmp_path):
    model, x = made(), inputs()
    small, report = converted(model)
    assert stored(small) == {LOW}
    tokens = generate(small, x)
    np.testing.assert_array_equal(tokens[0], np.arange(1, LENGTH + 1))
    small.save(tmp_path / "small.keras")
    loaded = keras.saving.load_model(tmp_path / "small.keras")
    if report.notes:
        assert "apply_policy" in report.notes[0]
        kmp.apply_policy(loaded, report.plan)
    np.testing.assert_array_equal(generate(loaded, x), tokens)
    np.testing.assert_array_equal(generate(model, x), tokens)
