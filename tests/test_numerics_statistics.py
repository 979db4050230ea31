"""Statistics of a tensor against NumPy in float64."""

import ml_dtypes
import numpy as np
import pytest
from keras import ops
from monitor_models import only_jax

from keras_mixprec.formats import get_format
from keras_mixprec.numerics.statistics import (
    Statistics,
    measure,
    statistics_of,
)

FLOAT16 = get_format("float16")
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -2.0, 65504.0, 2.0**-24]


def numbers(dtype):
    """Magnitudes over the whole range of a format, and what is special."""
    limits = get_format(dtype)
    low, high = np.log2([limits.smallest_subnormal, limits.maximum])
    random = np.random.default_rng(0)
    # Below 2**-126 float32 arithmetic may flush to zero.
    values = 2.0 ** random.uniform(max(low, -125.0), high - 0.01, size=500)
    values *= random.choice([-1.0, 1.0], size=500)
    return np.concatenate([values, SPECIAL]).astype(
        getattr(ml_dtypes, dtype, dtype)
    )


def measured(array, compiled=False):
    run = measure
    if compiled:
        import jax

        run = jax.jit(run)
    tensor = ops.convert_to_tensor(array.astype("float32"))
    found = run(ops.cast(tensor, str(array.dtype)))
    return Statistics.from_row(ops.convert_to_numpy(found))


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=only_jax)]
)
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_against_numpy(dtype, on_host, compiled):
    values = numbers(dtype).reshape(-1, 1)
    found = statistics_of(values) if on_host else measured(values, compiled)
    exact = values.astype("float64").ravel()
    finite = exact[np.isfinite(exact)]
    assert found.size == len(exact)
    assert (found.nonfinite, found.nan, found.infinite) == (3, 1, 2)
    assert found.largest == np.abs(finite).max()
    assert found.zero == np.mean(exact == 0)
    limits = FLOAT16
    small = np.abs(exact)
    below = (small > 0) & (small < limits.smallest_subnormal)
    subnormal = (small >= limits.smallest_subnormal) & (
        small < limits.smallest_normal
    )
    assert found.below(limits) == pytest.approx(below.mean(), rel=1e-12)
    assert found.subnormal(limits) == pytest.approx(subnormal.mean(), rel=1e-12)
    bits = np.log2(65504.0 / np.abs(finite).max())
    assert found.headroom_bits(limits) == pytest.approx(bits, abs=1e-12)
    bins = found.bins()
    assert bins[-1].tolist() == [128, 129, 3]
    bins = bins[bins[:, 0] < 128]
    _, exponents = np.frexp(np.abs(finite[finite != 0]))
    expected = np.unique(exponents - 1, return_counts=True)
    used = bins[bins[:, 2] > 0]
    np.testing.assert_array_equal(used[:, 0], expected[0])
    np.testing.assert_array_equal(used[:, 2], expected[1])
    np.testing.assert_array_equal(bins[1:, 0], bins[:-1, 1])


@pytest.mark.long
def test_together_is_of_all_elements():
    parts = [numbers("float16"), numbers("float32"), np.zeros(7, "float32")]
    parts.append(np.array(2.0, "float32"))
    whole = np.concatenate([p.astype("float32").reshape(-1) for p in parts])
    found = Statistics.together([measured(p) for p in parts])
    expected = statistics_of(whole)
    np.testing.assert_array_equal(found.cumulative, expected.cumulative)
    assert (found.largest, found.nan) == (expected.largest, expected.nan)


@pytest.mark.long
def test_counts_add_up_beyond_float32():
    # A float32 sum of ones stops at 2**24.
    found = measured(np.ones(2**24 + 8, "float16"))
    assert found.size == 2**24 + 8
