"""Models of KerasHub in 16 bits: the same tokens, and what a file keeps."""

import keras
import numpy as np
import pytest

pytest.importorskip("keras_hub")

import keras_hub
from hub_models import DECODERS, LENGTH, generate, inputs

import keras_mixprec as kmp

# On CPUs JAX has no attention in float16.
BACKEND = keras.backend.backend()
LOW = "bfloat16" if BACKEND == "jax" else "float16"

# What KerasHub's own layers warn of.
pytestmark = pytest.mark.filterwarnings("ignore")


def converted(model, name):
    return kmp.convert_for_inference(model, LOW, calibration=inputs(name))


def stored(model):
    return {v.dtype for v in model.weights if len(v.shape) > 1}


# Torch runs both, by default the others run one.
T5 = pytest.param("t5", marks=[pytest.mark.slow] * (BACKEND != "torch"))


@pytest.mark.parametrize("name", ["gpt2", T5])
def test_a_task_generates_the_same_also_from_a_file(name, tmp_path):
    model, x = DECODERS[name].made(), inputs(name)
    small, report = converted(model, name)
    # T5 multiplies 0 by -1e9, which is -inf in float16, but not on torch.
    assert stored(small) == {LOW} or name == "t5"
    tokens = generate(small, x)
    np.testing.assert_array_equal(tokens[0], np.arange(1, LENGTH + 1))
    small.save(tmp_path / "small.keras")
    loaded = keras.saving.load_model(tmp_path / "small.keras")
    if report.notes:
        assert "apply_policy" in report.notes[0]
        kmp.apply_policy(loaded, report.plan)
    np.testing.assert_array_equal(generate(loaded, x), tokens)
    np.testing.assert_array_equal(generate(model, x), tokens)


@pytest.mark.one_backend
@pytest.mark.parametrize("name", DECODERS)
def test_a_backbone_makes_a_task_that_generates_the_same(name):
    model = DECODERS[name].made()
    small, report = converted(model.backbone, name)
    task = getattr(keras_hub.models, DECODERS[name].task)(backbone=small)
    tokens = generate(task, inputs(name))
    np.testing.assert_array_equal(tokens[0], np.arange(1, LENGTH + 1))
