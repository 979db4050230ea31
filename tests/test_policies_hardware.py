"""The recommendation follows from what the device can do."""

import dataclasses

import keras
import pytest

from keras_mixprec import recommend_policy
from keras_mixprec.policies.hardware import recommend, slow_because


def found(kind, capability=None):
    return {
        "backend": "torch",
        "kind": kind,
        "devices": [f"some {kind}", f"some {kind}"],
        "compute_capability": capability,
    }


@pytest.mark.parametrize(
    ("kind", "capability", "policy"),
    [
        ("cuda", (10, 0), "mixed_bfloat16"),
        ("cuda", (9, 0), "mixed_bfloat16"),
        ("cuda", (8, 0), "mixed_bfloat16"),
        ("cuda", (7, 5), "mixed_float16"),
        ("cuda", (7, 0), "mixed_float16"),
        ("cuda", (6, 1), "float32"),
        ("tpu", None, "mixed_bfloat16"),
        ("xpu", None, "mixed_bfloat16"),
        ("cpu", None, "float32"),
        ("mps", None, "float32"),
        ("rocm", None, "float32"),
        ("abacus", None, "float32"),
    ],
)
def test_what_a_device_is_recommended(kind, capability, policy):
    recommendation = recommend(found(kind, capability))
    assert recommendation.policy == policy
    assert recommendation.device == f"some {kind}"
    assert recommendation.reason


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("NVIDIA GeForce GTX 1650", "float32"),
        ("NVIDIA GeForce GTX 1660 Ti with Max-Q Design", "float32"),
        ("NVIDIA GeForce MX450", "float32"),
        ("Quadro T1000", "float32"),
        ("NVIDIA T400 4GB", "float32"),
        ("NVIDIA T1200 Laptop GPU", "float32"),
        ("Tesla T4", "mixed_float16"),
        ("NVIDIA GeForce RTX 2060 SUPER", "mixed_float16"),
        ("Quadro RTX 4000", "mixed_float16"),
        ("NVIDIA TITAN RTX", "mixed_float16"),
    ],
)
def test_turing_without_tensor_cores(name, policy):
    others = found("cuda", (7, 5)) | {"devices": ["Tesla T4", name]}
    recommendation = recommend(others)
    assert recommendation.policy == policy
    assert (name in recommendation.reason) is (policy == "float32")
    assert bool(slow_because("mixed_float16", others)) is (policy == "float32")


@pytest.mark.parametrize(
    ("policy", "kind", "capability", "slow"),
    [
        ("float32", "cpu", None, False),
        ("mixed_float16", "cpu", None, True),
        ("mixed_bfloat16", "cpu", None, True),
        ("mixed_float16", "cuda", (6, 1), True),
        ("mixed_float16", "cuda", (7, 0), False),
        ("mixed_bfloat16", "cuda", (7, 5), True),
        ("mixed_bfloat16", "cuda", (8, 0), False),
        ("bfloat16", "cuda", (7, 5), True),
        ("mixed_float16", "rocm", None, False),
        ("mixed_bfloat16", "tpu", None, False),
    ],
)
def test_who_gets_a_warning(policy, kind, capability, slow):
    assert bool(slow_because(policy, found(kind, capability))) is slow


def test_the_real_devices():
    recommendation = recommend_policy()
    capabilities = recommendation.capabilities
    assert capabilities["backend"] == keras.backend.backend()
    assert len(capabilities["devices"]) >= 1
    assert recommend(capabilities) == recommendation
    with pytest.raises(dataclasses.FrozenInstanceError):
        recommendation.policy = "float16"
