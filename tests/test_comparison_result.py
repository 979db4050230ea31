"""What a comparison says: text, page, picture, files, TensorBoard's HParams.

Of records that are written down, from which what is shown must follow.
"""

import html
import json
import os
import re
import sys

import keras
import numpy as np
import pytest
from comparison_records import arm, record
from reporting_readers import get, poll, tensorboard

from keras_mixprec.analysis.comparison import sign_off
from keras_mixprec.analysis.comparison.result import ComparisonResult
from keras_mixprec.analysis.comparison.run import compare_precisions

MIB = 2**20


def memory(mib, **more):
    return {
        "peak_bytes": mib * MIB,
        "measured_by": "process",
        "weights_bytes": None,
        "slots_bytes": None,
        "activations_bytes": None,
    } | more


def four_arms():
    """A gain, a loss of accuracy, one that is slower, one that failed."""
    base = 0.925, 0.930, 0.921
    slow = arm("mixed_float16", base, steps=[1.0] * 6, losses=[2.0, 0.9])
    slow["seeds"][0] |= {"skipped_steps": 4, "seconds_lost": 4.0}
    return [
        arm("float32", base, steps=[0.1] * 6, memory=memory(800)),
        arm(
            "mixed_bfloat16",
            (0.926, 0.930, 0.921),
            steps=[0.05, 0.05, 0.04, 0.0625, 0.04, 0.0625],
            losses=[2.1, 1.1],
            memory=memory(600, weights_bytes=3 * MIB),
            share_of_flops_16bit=0.98,
        ),
        arm("bad", (0.8, 0.81, 0.79), steps=[0.02] * 6, losses=[2.5, 2.4]),
        slow,
        arm("broken", [], status="failed", error="ValueError: <no> memory"),
    ]


@pytest.fixture
def result():
    return ComparisonResult(record(four_arms()))


def line(text, name):
    return next(row for row in text.splitlines() if row.startswith(name))


def test_the_text_is_a_table_of_one_screen(result):
    text = str(result)
    assert max(map(len, text.splitlines())) <= 100
    fast = line(text, "mixed_bfloat16").split()
    assert fast[1:5] == ["50", "ms", "2.00", "(1.60-2.50)"]
    assert fast[5:8] == ["600", "MiB", "98%"]
    assert fast[-2:] == ["within", "tolerance"]
    assert line(text, "bad").endswith("  worse")
    assert line(text, "broken").endswith("  failed")
    assert "Slower than float32: mixed_float16." in text
    assert "broken: failed: ValueError: <no> memory." in text
    assert "mixed_float16: 4 steps skipped, 4 s lost to them." in text
    assert "Memory of mixed_bfloat16: weights 3 MiB." in text


def test_a_long_name_is_whole_on_a_line_of_its_own():
    names = ["float32", "x" * 90 + "y", "x" * 90 + "z"]
    text = str(ComparisonResult(record(arm(n, [0.9, 0.9]) for n in names)))
    table = text.split("\n\n")[1].splitlines()
    assert max(map(len, table)) <= 100
    assert table[2] == names[1]
    assert table[3].endswith("  within tolerance")
    assert table[4] == names[2]


@pytest.mark.parametrize(("pairs", "told"), [(2, False), (5, False), (6, True)])
def test_fewer_than_six_pairs_of_blocks_do_not_tell_which_is_faster(
    pairs, told
):
    arms = [
        arm(name, [0.9], steps=[seconds] * pairs)
        for name, seconds in (("float32", 2.0), ("fast", 1.0), ("slow", 4.0))
    ]
    result = ComparisonResult(record(arms))
    assert (result.best().policy == "fast") is told
    assert ("Slower than float32: slow." in str(result)) is told
    assert ("takes six pairs of timed blocks" in str(result)) is not told


def test_the_best_is_the_fastest_within_tolerance(result):
    policy, reason = result.best(under="tolerance")
    assert policy == "mixed_bfloat16"
    assert "2.00 (1.60-2.50) times float32's speed" in reason
    assert "25% less memory (600 MiB)" in reason
    assert "within 0.2% of float32's with 3 seeds" in reason
    assert result.best(under=0.5).policy == "bad"


def test_where_16_bits_are_slower_float32_stays():
    arms = four_arms()
    policy, reason = ComparisonResult(record([arms[0], arms[3]])).best()
    assert policy == "float32"
    assert "mixed_float16 is slower, 0.10 times float32's speed" in reason


def test_what_is_a_little_slower_is_not_shown_as_equal():
    arms = [
        arm("float32", [0.9], steps=[0.1] * 6),
        arm("mixed_bfloat16", [0.9], steps=[0.1, 0.1003] * 3),
    ]
    text = str(ComparisonResult(record(arms)))
    assert line(text, "mixed_bfloat16").split()[3:5] == [
        "0.999",
        "(0.997-1.000)",
    ]


def test_what_is_not_known_to_be_faster_is_not_best():
    steps = [0.09, 0.11, 0.09, 0.11, 0.09, 0.09]
    arms = [
        arm("float32", [0.9] * 3, steps=[0.1] * 6),
        arm("mixed_bfloat16", [0.9] * 3, steps=steps, losses=[3.0]),
    ]
    policy, reason = ComparisonResult(record(arms)).best()
    assert policy == "float32"
    assert "mixed_bfloat16 is not known to be faster" in reason


def test_speeds_are_of_blocks_of_the_same_turn():
    """A machine that slows down for a while slows both of a pair."""
    slow = np.array([1, 1, 30, 1, 50, 1])
    arms = [
        arm("float32", [0.9], steps=0.2 * slow),
        arm("mixed_bfloat16", [0.9], steps=0.1 * slow),
    ]
    speed = ComparisonResult(record(arms)).rows[1]["speed"]
    assert (speed["estimate"], speed["low"], speed["high"]) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("times", [0, 1, 2, 3])
def test_a_file_has_all_of_it(result, tmp_path, times):
    path = tmp_path / "result.json"
    save = [result.save, result.sign_off][times % 2]
    save(path)
    loaded = ComparisonResult.load(path)
    assert str(loaded) == str(result)
    assert loaded.to_dict() == result.to_dict()
    assert str(ComparisonResult.from_dict(result.to_dict())) == str(result)


def test_what_is_not_finite_survives_a_file(tmp_path):
    arms = [arm("float32", [0.9]), arm("mixed_float16", [float("nan")])]
    arms[1]["seeds"][0]["losses"] = [float("inf"), float("nan")]
    result = ComparisonResult(record(arms))
    result.save(tmp_path / "x.json")
    loaded = ComparisonResult.load(tmp_path / "x.json")
    assert str(loaded) == str(result)
    assert "worse: not finite with 1 of 1 seeds" in str(loaded)
    json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail)
    assert "<svg" in loaded.to_html()
    assert loaded.plot()


WRONG = {
    "not JSON": ("{", "not JSON"),
    "no record": ("[]", "not a record"),
    "another file": ('{"format": "keras_mixprec.plan"}', "not a record"),
    "newer": (
        '{"format": "keras_mixprec.comparison", "version": 9}',
        "another keras_mixprec",
    ),
    "cut": (
        '{"format": "keras_mixprec.comparison", "version": 1}',
        "The record lacks arms",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_named(name, tmp_path):
    text, expected = WRONG[name]
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=expected):
        ComparisonResult.load(path)
    with pytest.raises(ValueError, match="not JSON|does not write|writes"):
        sign_off.read(path)


@pytest.mark.parametrize(
    ("under", "error"),
    [("speed", ValueError), (-1.0, ValueError), (None, TypeError)],
)
def test_wrong_conditions_are_refused(result, under, error):
    with pytest.raises(error, match="`under`"):
        result.best(under=under)


def test_the_page_needs_nothing_else_and_escapes_names():
    arms = [arm("float32", [0.9]), arm("<b>&", [0.9])]
    page = ComparisonResult(record(arms)).to_html()
    assert "<b>&<" not in page
    assert html.escape("<b>&") in page
    assert not re.search(r"(?:src|href)=", page)
    assert page.count("<polyline") == 2
    assert "keras 3.15.1" in page


def test_a_notebook_shows_the_table_and_the_curves(result):
    shown = result._repr_html_()
    assert shown.startswith("<div>")
    assert shown.count("<tr>") == 6
    # The one that failed has no curve.
    assert shown.count("<polyline") == 4
    assert "<b>Best:</b> mixed_bfloat16" in shown


def test_a_diverging_curve_does_not_flatten_the_others():
    arms = [arm("float32", [0.9]), arm("wild", [0.9], losses=[1e30, 1e35])]
    page = ComparisonResult(record(arms)).to_html()
    first = re.search(r'<polyline points="([^"]+)"', page)[1]
    heights = [float(p.partition(",")[2]) for p in first.split()]
    assert max(heights) - min(heights) > 50


def test_the_picture(result, tmp_path, monkeypatch):
    result.save_png(tmp_path / "new" / "x.png")
    assert (tmp_path / "new" / "x.png").read_bytes()[:4] == b"\x89PNG"
    speed, metric, curves = result.plot().get_axes()
    assert [t.get_text() for t in speed.get_yticklabels()][4] == "broken"
    assert len(curves.get_lines()) == 4
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError):
        result.plot()


def test_a_sign_off_can_be_checked(result, tmp_path):
    path = tmp_path / "signed.json"
    result.sign_off(path)
    signed = sign_off.read(path)
    assert sign_off.problems(signed) == []
    assert signed["check"] == "keras-mixprec compare --check signed.json"
    assert signed["rerun"] == "keras-mixprec compare --rerun signed.json"
    verdicts = {row["name"]: row["verdict"] for row in signed["verdicts"]}
    assert verdicts["bad"] == "worse"
    assert any("0.2% of float32's" in text for text in signed["statement"])


def test_a_sign_off_that_was_changed_is_found(result, tmp_path):
    path = tmp_path / "signed.json"
    result.sign_off(path)
    signed = sign_off.read(path)
    signed["verdicts"][2]["verdict"] = "within tolerance"
    (found,) = sign_off.problems(signed)
    assert found == "bad: signed as 'within tolerance', now 'worse'"
    for seed in signed["record"]["arms"][2]["seeds"]:
        seed["metric"] = 0.95
    found = sign_off.problems(signed)
    assert found[0] == "the measurements are not those that were signed"
    assert found[1].startswith("best is not 'mixed_bfloat16': bad trains at")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("__main__:build", "defined in a script or a notebook"),
        ("digits:test.<locals>.build", "no function at the top of a module"),
        ("builtins.tuple", "handed over as an object, of type builtins.tuple"),
    ],
)
def test_what_no_command_can_run_again_says_so(source, why, tmp_path):
    sources = {"build": source, "data": "digits:data"}
    result = ComparisonResult(record(four_arms(), sources=sources))
    result.sign_off(tmp_path / "signed.json")
    signed = sign_off.read(tmp_path / "signed.json")
    assert signed["rerun"] is None
    assert why in signed["why_no_rerun"]
    with pytest.raises(ValueError, match=re.escape(why)):
        sign_off.arguments(signed["record"])


def test_the_arguments_of_a_comparison_follow_from_its_record():
    plan = {"default": "mixed_float16", "layers": {"dense": "float32"}}
    arms = [
        arm("float32+tf32", [0.9], policy="float32", settings=["tf32"]),
        arm("tuned, loss scale torch", [0.9], policy=plan),
        arm("tuned, loss scale 128", [0.9], policy=plan),
    ]
    found = sign_off.arguments(record(arms))
    assert list(found["policies"]) == ["float32+tf32", "tuned"]
    assert found["policies"]["float32+tf32"] == ("float32", "tf32")
    (tuned,) = found["policies"]["tuned"]
    assert (dict(tuned), tuned.default) == (plan["layers"], plan["default"])
    assert found["loss_scales"] == ["torch", "128"]
    assert (found["mode"], found["seeds"]) == ("max", [0, 1, 2])


def test_the_best_plan_is_a_plan():
    plan = {"default": "mixed_float16", "layers": {"dense": "float32"}}
    arms = [
        arm("float32", [0.9], steps=[0.1] * 6),
        arm("tuned", [0.9], steps=[0.05] * 6, policy=plan),
    ]
    best = ComparisonResult(record(arms)).best().policy
    assert (dict(best), best.default) == (plan["layers"], plan["default"])


def test_tensorboard_shows_a_run_per_policy(result, tmp_path):
    log_dir = str(tmp_path / "hparams")
    result.log_hparams(log_dir)
    assert len(os.listdir(log_dir)) == 5
    ask = {"allowedStatuses": ["STATUS_UNKNOWN"], "sliceSize": 9}
    with tensorboard(log_dir) as url:
        assert poll(lambda: len(get(url, "plugin/scalars/tags")) == 5)
        groups = get(
            url, "plugin/hparams/session_groups", request=json.dumps(ask)
        )["sessionGroups"]
        curve = get(
            url,
            "plugin/scalars/scalars",
            tag="loss",
            run="1_mixed_bfloat16",
        )
    policies = {g["hparams"]["policy"] for g in groups}
    assert policies == {a["name"] for a in four_arms()}
    (fast,) = [g for g in groups if g["hparams"]["policy"] == "mixed_bfloat16"]
    values = {m["name"]["tag"]: m["value"] for m in fast["metricValues"]}
    assert values["comparison/speed"] == 2.0
    assert values["comparison/accuracy"] == pytest.approx(0.9257, abs=1e-4)
    points = np.array(curve)[:, 1:]
    np.testing.assert_allclose(points, [[2, 2.1], [4, 1.1]], rtol=1e-6)


def regression():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def test_of_20_real_pairs_of_one_policy_at_most_one_is_called_worse():
    """Other initial weights in both halves of a pair: real spread."""
    x = np.random.default_rng(0).normal(size=(32, 4))
    trained = compare_precisions(
        regression, (x, x[:, :1]), ["float32"], metric="mae", seeds=80,
        steps=4, blocks=2, batch_size=8, verbose=0,
    ).record["arms"][0]["seeds"]  # fmt: skip
    metrics = np.array([seed["metric"] for seed in trained]).reshape(20, 2, 2)
    assert metrics.std() > 0.01
    records = [
        record([arm("float32", a), arm("again", b, losses=[9.0])])
        for a, b in metrics
    ]
    found = [ComparisonResult(r).rows[1]["verdict"] for r in records]
    assert found.count("worse") <= 1
