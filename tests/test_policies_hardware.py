"""The recommendation follows from what the device can do."""

import dataclasses

import keras
import pytest

from keras_mixprec import recommend_policy
from keras_mixprec.policies.hardware import judge, slow_because


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
def test_judgement(kind, capability, policy):
    recommendation = judge(found(kind, capability))
    assert recommendation.policy == policy
    assert recommendation.device == f"some {kind}"
    assert recommendation.reason


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
    assert judge(capabilities) == recommendation
    with pytest.raises(dataclasses.FrozenInstanceError):
        recommendation.policy = "float16"
