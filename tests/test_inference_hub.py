"""Backbones of KerasHub in 16 bits: the same tokens, and what a file keeps."""

import keras
import numpy as np
import pytest

import keras_mixprec as kmp

keras_hub = pytest.importorskip("keras_hub")

# On CPUs JAX has no attention in float16.
LOW = "bfloat16" if keras.backend.backend() == "jax" else "float16"

# What KerasHub's own layers warn of.
pytestmark = pytest.mark.filterwarnings("ignore")


def task():
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=40,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        max_sequence_length=8,
    )
    return with_backbone(backbone)


def with_backbone(backbone):
    found = keras_hub.models.GPT2CausalLM(backbone=backbone)
    found.compile(sampler="greedy")
    return found


def prompt():
    ids = np.zeros((2, 8), "int32")
    ids[:, :3] = [[5, 6, 7], [8, 9, 10]]
    return {"token_ids": ids, "padding_mask": (ids > 0).astype("int32")}


def test_tokens_are_the_same_and_a_file_is_right_with_the_plan(tmp_path):
    model, x = task(), prompt()
    small, report = kmp.convert_for_inference(
        model.backbone, LOW, calibration=x
    )
    tokens = [
        m.generate(prompt(), stop_token_ids=None)["token_ids"]
        for m in (model, with_backbone(small))
    ]
    if LOW == "float16":
        np.testing.assert_array_equal(*map(np.asarray, tokens))
        assert report.drift[0]["relative"] < 2e-3
    assert "apply_policy" in report.notes[0]
    small.save(tmp_path / "small.keras")
    report.plan.save(tmp_path / "plan.json")
    loaded = keras.saving.load_model(tmp_path / "small.keras")
    plan = kmp.PrecisionPlan.load(tmp_path / "plan.json")
    kmp.apply_policy(loaded, plan)
    y = np.asarray(small.predict(x, verbose=0), "float32")
    found = np.asarray(loaded.predict(x, verbose=0), "float32")
    np.testing.assert_allclose(found, y, atol=1e-3 * np.abs(y).max())
