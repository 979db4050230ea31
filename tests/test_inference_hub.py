"""Decoders of KerasHub in 16 bits: the same tokens, and what a file keeps."""

import keras
import numpy as np
import pytest

pytest.importorskip("keras_hub")

import keras_hub
from hub_models import DECODERS, LENGTH, generate, inputs

import keras_mixprec as kmp

# On CPUs JAX has no attention in float16.
LOW = "bfloat16" if keras.backend.backend() == "jax" else "float16"

# What KerasHub's own layers warn of.
pytestmark = pytest.mark.filterwarnings("ignore")


def converted(model, name):
    return kmp.convert_for_inference(model, LOW, calibration=inputs(name))


def stored(model):
    return {v.dtype for v in model.weights if len(v.shape) > 1}


def on(backend):
    """Torch runs all decoders, by default the others run one each."""
    slow = keras.backend.backend() not in (backend, "torch")
    return [pytest.mark.slow] * slow


BACKENDS = {"gpt2": "tensorflow", "llama": "jax"}
EACH = [pytest.param(name, marks=on(BACKENDS.get(name))) for name in DECODERS]


@pytest.mark.parametrize("name", EACH)
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
@pytest.mark.parametrize("name", [n for n, d in DECODERS.items() if d.task])
def test_a_backbone_makes_a_task_that_generates_the_same(name):
    model = DECODERS[name].made()
    small, report = converted(model.backbone, name)
    task = getattr(keras_hub.models, DECODERS[name].task)(backbone=small)
    tokens = generate(task, inputs(name))
    np.testing.assert_array_equal(tokens[0], np.arange(1, LENGTH + 1))


@pytest.mark.one_backend
def test_random_weights_drift_little():
    settings = DECODERS["gpt2"].settings
    model = keras_hub.models.GPT2Backbone(**settings)
    small, report = converted(model, "gpt2")
    # An eighth of an ulp of the format for each of a few roundings.
    largest = 2e-3 if LOW == "float16" else 2e-2
    assert 0 < report.drift[0]["relative"] < largest
