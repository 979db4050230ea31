"""Gradient norms against NumPy's in float64, whatever is stacked with what."""

import numpy as np
import pytest
from optimizer_models import BACKEND, each_mode, make_apply, make_variables

from keras_mixprec import LossScaleOptimizer

SCALE = 2.0**15
# 2**16 elements and fewer are stacked by shape, larger ones are not.
SHAPES = {
    "scalars": [(), ()],
    "one": [(5,)],
    "equal": [(3, 4)] * 5,
    "unequal": [(3, 4), (4,), (), (4, 3), (2, 1, 3), (1,)],
    "interleaved": [(4,), (3, 4), (4,), (3, 4), (), (4,)],
    "around the limit": [(256, 256), (65537,), (256, 256), (300, 300), (7,)],
    "odd and large": [(70_001,), (2**17,), (3 * 2**15, 2), (70_001,)],
    "empty": [(0, 3), (2, 2)],
}


def random_gradients(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [
        np.asarray(
            rng.normal(size=s) * SCALE * 10.0 ** rng.integers(-3, 3)
        ).astype("float32")
        for s in shapes
    ]


def make(shapes):
    variables = make_variables(*shapes)
    optimizer = LossScaleOptimizer("sgd")
    optimizer.build(variables)
    return optimizer, variables


def expected(gradients):
    return [np.linalg.norm(g.astype("float64")) / SCALE for g in gradients]


@each_mode
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_norms(shapes, mode):
    optimizer, variables = make(shapes)
    gradients = random_gradients(shapes)
    make_apply(optimizer, variables, mode)(gradients)
    norms = list(optimizer.gradient_norms().values())
    np.testing.assert_allclose(norms, expected(gradients), rtol=2e-6)


@each_mode
def test_order_and_subsets_of_variables(mode):
    optimizer, variables = make(SHAPES["unequal"])
    gradients = random_gradients(SHAPES["unequal"])
    chosen = [4, 0, 2]
    if BACKEND == "jax":
        mode = "eager"
    apply = make_apply(optimizer, [variables[i] for i in chosen], mode)
    apply([gradients[i] for i in chosen])
    norms = list(optimizer.gradient_norms().values())
    true = expected(gradients)
    wanted = [true[i] if i in chosen else 0 for i in range(6)]
    np.testing.assert_allclose(norms, wanted, rtol=2e-6)
    bad = [gradients[4], np.full((3, 4), np.nan, "float32"), gradients[2]]
    apply(bad)
    assert list(optimizer.overflow_counts().values()) == [1, 0, 0, 0, 0, 0]


@each_mode
def test_one_huge_gradient_does_not_hide_the_others(mode):
    optimizer, variables = make([(2,), (2,), (3,)])
    gradients = [
        np.array(row, "float32") for row in ([1e30, 0], [3, 4], [2e30, 1, 0])
    ]
    make_apply(optimizer, variables, mode)(gradients)
    norms = list(optimizer.gradient_norms().values())
    np.testing.assert_allclose(norms, expected(gradients), rtol=2e-6)


@pytest.mark.parametrize("value", [np.inf, np.nan])
@each_mode
def test_the_offending_variables_are_named(value, mode):
    optimizer, variables = make(SHAPES["interleaved"])
    gradients = random_gradients(SHAPES["interleaved"])
    for index in (1, 4):
        gradients[index][...] = value
    make_apply(optimizer, variables, mode)(gradients)
    paths = [v.path for v in variables]
    (step,) = optimizer.nonfinite_steps()
    assert step[:3] == (1, SCALE, [paths[1], paths[4]])
    assert optimizer.overflow_counts() == {
        path: int(index in (1, 4)) for index, path in enumerate(paths)
    }
    norms = list(optimizer.gradient_norms().values())
    finite = [n for i, n in enumerate(norms) if i not in (1, 4)]
    true = expected([g for i, g in enumerate(gradients) if i not in (1, 4)])
    np.testing.assert_allclose(finite, true, rtol=2e-6)
