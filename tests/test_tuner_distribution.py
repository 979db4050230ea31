"""All workers change the same layers at the same step."""

import numpy as np
import pytest
from tuner_models import CURE
from workers import run_two_workers


@pytest.mark.slow
def test_two_workers():
    first, second = run_two_workers("tuned")
    for case in set(first) - {"untuned", "again"}:
        chief, other = first[case], second[case]
        assert (chief.pop("wrote"), other.pop("wrote")) == (True, False)
        reasons = chief.pop("reasons"), other.pop("reasons")
        assert chief == other, case
        if case in ("at_first", "later"):
            assert chief["demoted"] == CURE
            told_here, told_there = (r[0]["big"] for r in reasons)
            assert "another worker" in told_here
            assert "largest_input=1000" in told_there
    assert first["at_first"]["changes"] == [["demote", 0]]
    assert first["at_first"]["applied"] == 6
    ((_, step),) = first["later"]["changes"]
    assert 20 < step <= 32
    assert first["later"]["applied"] == 40 - (step - 20)
    assert first["quiet"]["demoted"] == CURE
    assert first["quiet"]["changes"] == [["demote", 0]]
    assert first["validated"]["demoted"]["big"] == "float32"
    kinds = [kind for kind, _ in first["validated"]["changes"]]
    assert kinds == ["demote", "sign_off"]
    kinds = [kind for kind, _ in first["diverging"]["changes"]]
    assert kinds == ["demote", "undo"]
    assert first["diverging"]["demoted"] == {}
    assert np.abs(first["diverging"]["weights"][0]).max() < 2
    for worker in first, second:
        assert worker["again"] == CURE
        assert worker["healthy"]["changes"] == []
        assert worker["healthy"]["weights"] == worker["untuned"]
