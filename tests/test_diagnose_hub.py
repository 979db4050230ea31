"""`diagnose_call` with KerasHub's `generate`."""

import keras
import numpy as np
import pytest

pytest.importorskip("keras_hub")

from hub_models import BLOCK, LENGTH, generate, inputs, made, made_large

import keras_mixprec as kmp

# KerasHub's own layers warn.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _in_float16():
    keras.config.set_dtype_policy("mixed_float16")


@pytest.mark.long
def test_a_sound_one_has_no_verdicts_and_generates_as_before():
    model, x = made(), inputs()
    before = generate(model, x)
    np.testing.assert_array_equal(before[0], np.arange(1, LENGTH + 1))
    assert kmp.diagnose_call(model, generate, model, x) == []
    np.testing.assert_array_equal(generate(model, x), before)


@pytest.mark.long
def test_what_overflows_at_the_third_step():
    model = made_large()
    found = kmp.diagnose_call(model, generate, model, inputs())
    assert {v.numbers["call"] for v in found} == {3}
    # The block, or the product in it, and nothing else.
    assert all(BLOCK in v.layer for v in found)
    assert "forward_overflow" in {v.kind for v in found}
