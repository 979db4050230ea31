"""Text, page and files of comparisons whose records are written down here.

Files in `golden` hold the exact words.
"""

import json
import re

import keras
import numpy as np
import pytest
from comparison_records import arm, four_arms, record
from diagnosis_models import Direction
from test_golden import markup

from keras_mixprec.analysis.comparison.result import ComparisonResult
from keras_mixprec.analysis.comparison.run import compare_precisions
from keras_mixprec.policies.plan import PrecisionPlan

pytestmark = pytest.mark.one_backend


def result_of(*arms, **more):
    return ComparisonResult(record(arms, **more))


@pytest.fixture
def result():
    return result_of(*four_arms())


def near_ties():
    """Arms a little slower, of another name, not known to be faster."""
    unsure = [0.09, 0.11, 0.09, 0.11, 0.09, 0.09]
    return [
        arm("float32", [0.9] * 3, steps=[0.1] * 6),
        arm("x" * 90 + "y", [0.9] * 3, steps=[0.1, 0.1003] * 3),
        arm("x" * 90 + "z", [0.9] * 3, steps=unsure, losses=[3.0]),
        arm("lost", [float("nan")] * 3, losses=[float("inf"), float("nan")]),
    ]


def test_what_is_said(result, golden):
    near = result_of(*near_ties())
    golden(
        "comparison",
        text=str(result),
        best=result.best().reason,
        near_ties=str(near),
        best_of_them=near.best().reason,
        page=markup(result.to_html()),
    )
    for text in map(str, (result, near)):
        assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(("pairs", "told"), [(5, False), (6, True)])
def test_fewer_than_six_pairs_of_blocks_do_not_tell_which_is_faster(
    pairs, told
):
    arms = [
        arm(name, [0.9], steps=[seconds] * pairs)
        for name, seconds in (("float32", 2.0), ("fast", 1.0), ("slow", 4.0))
    ]
    result = result_of(*arms)
    assert (result.best().policy == "fast") is told
    assert ("Slower than float32" in str(result)) is told
    assert ("takes six pairs" in str(result)) is not told


def test_the_best_is_the_fastest_within_tolerance(result):
    assert result.best(under="tolerance").policy == "mixed_bfloat16"
    assert result.best(under=0.5).policy == "bad"


def test_speeds_are_of_blocks_of_the_same_turn():
    """A machine that slows down for a while slows both of a pair."""
    slow = np.array([1, 1, 30, 1, 50, 1])
    arms = [
        arm("float32", [0.9], steps=0.2 * slow),
        arm("mixed_bfloat16", [0.9], steps=0.1 * slow),
    ]
    speed = result_of(*arms).rows[1]["speed"]
    assert (speed["estimate"], speed["low"], speed["high"]) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("arms", [four_arms, near_ties])
def test_a_file_has_all_of_it(arms, tmp_path):
    path, result = tmp_path / "result.json", result_of(*arms())
    result.save(path)
    json.loads(path.read_text(), parse_constant=pytest.fail)
    loaded = ComparisonResult.load(path)
    np.testing.assert_equal(loaded.to_dict(), result.to_dict())
    assert str(loaded) == str(result)
    assert loaded._repr_html_() == result._repr_html_()


WRONG = {
    "not JSON": ("{", "not JSON"),
    "newer": (
        '{"format": "keras_mixprec.comparison", "version": 9, "arms": []}',
        "another version",
    ),
    "cut": (
        '{"format": "keras_mixprec.comparison", "version": 1}',
        "not a record",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_named(name, tmp_path):
    text, expected = WRONG[name]
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=expected):
        ComparisonResult.load(path)


def build():
    inputs = keras.Input((4,))
    x = Direction(name="direction")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, name="head")(x))
    model.compile(keras.optimizers.SGD(0.3), "mse", metrics=["mae"])
    return model


def test_a_real_comparison_finds_the_worse_plan(tmp_path):
    """The same policy twice, a plan that suits the model, and one that not."""
    x = 400 * np.random.default_rng(0).normal(size=(32, 4))
    data = x, x[:, :1] / np.linalg.norm(x, axis=1, keepdims=True)
    wide, narrow = "float32", "mixed_float16"
    good = {"direction": wide, "head": narrow}
    policies = {
        "float32": "float32",
        "again": "float32",
        "good": PrecisionPlan(good, default=narrow),
        "bad": PrecisionPlan(
            {"direction": narrow, "head": wide}, default=narrow
        ),
    }
    result = compare_precisions(
        build, data, policies, metric="mae", tolerance=0.1, seeds=3,
        steps=16, blocks=4, batch_size=8, verbose=0,
    )  # fmt: skip
    verdicts = [row["verdict"] for row in result.rows]
    within = "within tolerance"
    assert verdicts == ["reference", within, within, "worse"]
    assert re.search("^again:.* same losses", str(result), re.M)
    # Noise may show one of the right ones as faster, never the worse one.
    policy, reason = result.best()
    assert policy == "float32" or dict(policy) == good
    assert "bad trains at" not in reason
    result.save(tmp_path / "result.json")
    loaded = ComparisonResult.load(tmp_path / "result.json")
    assert str(loaded) == str(result)
