"""`diagnose_call` of KerasHub's `generate`."""

import keras
import numpy as np
import pytest

pytest.importorskip("keras_hub")

from hub_models import DECODERS, LENGTH, generate, inputs

import keras_mixprec as kmp

BACKEND = keras.backend.backend()

# What KerasHub's own layers warn of.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _in_float16():
    keras.config.set_dtype_policy("mixed_float16")


# T5 multiplies 0 by -1e9, which is -inf in float16, but not on torch.
_SOUND = [n for n in DECODERS if n != "t5" or BACKEND == "torch"]


@pytest.mark.parametrize("name", _SOUND)
def test_a_sound_one_has_no_verdicts_and_generates_as_before(name):
    model, x = DECODERS[name].made(), inputs(name)
    before = generate(model, x)
    np.testing.assert_array_equal(before[0], np.arange(1, LENGTH + 1))
    assert kmp.diagnose_call(model, generate, model, x) == []
    np.testing.assert_array_equal(generate(model, x), before)


@pytest.mark.parametrize(
    "name",
    [
        # It takes a minute on one core.
        pytest.param(n, marks=[pytest.mark.slow] * (n == "t5"))
        for n in _SOUND
    ],
)
def test_what_overflows_at_the_third_step(name):
    decoder = DECODERS[name]
    model = decoder.made_large()
    found = kmp.diagnose_call(model, generate, model, inputs(name))
    assert {v.numbers["call"] for v in found} == {3}
    # The block, or the product in it, and nothing else.
    assert all(decoder.block in v.layer for v in found)
    assert "forward_overflow" in {v.kind for v in found}
