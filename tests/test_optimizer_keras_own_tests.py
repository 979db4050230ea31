"""Keras' own unit tests of its loss scale optimizer, with ours in its place."""

import importlib
import unittest

import pytest

from keras_mixprec import LossScaleOptimizer

tests = importlib.import_module(
    "keras.src.optimizers.loss_scale_optimizer_test"
)
SUITE = {
    case.id().rpartition(".")[2]: case
    for case in unittest.defaultTestLoader.loadTestsFromModule(tests)
    for case in case
    if "test_session" not in case.id()
}


pytestmark = pytest.mark.slow


# Theirs drops the factor without a word, ours with a warning.
@pytest.mark.filterwarnings("ignore:The `loss_scale_factor` of")
@pytest.mark.parametrize("name", SUITE)
def test_with_ours_in_its_place(name, monkeypatch):
    monkeypatch.setattr(tests, "LossScaleOptimizer", LossScaleOptimizer)
    result = unittest.TestResult()
    SUITE[name].run(result)
    problems = result.failures + result.errors
    assert not problems, problems[0][1]
    if result.skipped:
        pytest.skip(result.skipped[0][1])
