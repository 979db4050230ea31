"""The code that a finding comes with: it runs, and repairs the fault."""

import keras
import numpy as np
import pytest
from plugin_runs import tiny_transformer, train

import keras_mixprec as kmp
from keras_mixprec.reporting.fixes import add_fixes


@pytest.fixture(scope="module")
def fixes(tmp_path_factory):
    """Of a run whose steps are all skipped: the code of its main finding."""
    folder = tmp_path_factory.mktemp("failing")
    train(folder, epochs=1)
    (run,) = kmp.load_report(folder).to_dict().values()
    assert run["skipped"] > 5
    found = [e for e in run["events"] if e["kind"] == "verdict"]
    return found[0]["fix"]


def test_the_copied_rules_repair_training(fixes):
    model = tiny_transformer()
    kmp.apply_policy(model, "mixed_float16")
    exec(fixes["training"], {"model": model})
    dtypes = {x.name: x.compute_dtype for x in model.layers}
    assert dtypes["overflowing"] == "float32"
    assert dtypes["in_0"] == "float16"
    model.compile(
        kmp.LossScaleOptimizer("adam"),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    x = np.random.default_rng(0).normal(size=(160, 8)).astype("float32")
    model.fit(x, np.arange(160) % 3, 8, verbose=0)
    assert int(model.optimizer.skipped_steps) == 0


def test_the_copied_plan_gives_the_next_model_the_same(
    fixes, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    models = [tiny_transformer(), tiny_transformer()]
    exec(fixes["plan"], {"model": models[0]})
    kmp.apply_policy(models[1], kmp.PrecisionPlan.load("plan.json"))
    for model in models:
        dtypes = {x.name: x.compute_dtype for x in model.layers}
        assert dtypes["overflowing"] == "float32"
        assert dtypes["in_0"] == "float16"


def test_the_copied_conversion_is_right_where_float16_overflows(fixes):
    model = tiny_transformer()
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    names = {"model": model, "x": x}
    exec(fixes["inference"], names)
    wide = {
        layer.name
        for layer in names["converted"].layers
        if layer.compute_dtype == "float32"
    }
    assert "overflowing" in wide
    y, wanted = (
        names["converted"].predict(x, verbose=0),
        model.predict(x, verbose=0),
    )
    np.testing.assert_allclose(y, wanted, atol=0.05 * np.abs(wanted).max())


def verdict(kind, layer=None, **numbers):
    event = {"kind": "verdict", "step": 1, "verdict": kind, "layer": layer}
    return event | {"direction": "backward", "numbers": numbers}


def test_other_findings_have_the_call_that_repairs_them():
    scale, policy = (
        verdict("scale_too_low", needed_bits=20),
        verdict("policy", dtype="float16"),
    )
    data = verdict("bad_data")
    add_fixes([scale, policy, data], [])
    names = {"optimizer": "adam"}
    exec(scale["fix"]["training"], names)
    assert float(names["optimizer"].initial_scale) == 2.0**20
    assert "mixed_float16" in policy["fix"]["training"]
    assert "fix" not in data


def test_rows_that_are_not_finite_are_dropped():
    data = verdict("bad_data", samples_of_x=[1], x="1 of 3 rows not finite")
    add_fixes([data], [])
    names = {"x": np.array([[1.0], [np.nan], [3.0]]), "y": np.arange(3)}
    exec(data["fix"]["data"], names)
    assert names["x"].tolist() == [[1.0], [3.0]]
    assert names["y"].tolist() == [0, 2]


def test_gradients_of_zero_have_the_call_that_compares_them(capsys):
    zero = {"kind": "zero_gradients", "message": "all zero", "step": 1}
    add_fixes([zero], [])
    model = tiny_transformer()
    kmp.apply_policy(model, "mixed_float16")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(True))
    x = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")
    exec(zero["fix"]["diagnosis"], {"model": model, "x": x, "y": np.zeros(8)})
    assert "forward_overflow" in capsys.readouterr().out


def test_a_path_is_matched_as_it_is_written():
    event = verdict("precision_loss", "a[0]*")
    add_fixes([event], [{"path": "a[0]*", "dtypes": [[0, "bfloat16"]]}])
    code = event["fix"]["training"]
    assert "'mixed_bfloat16'" in code
    assert "PrecisionRule('a[[]0][*]', 'float32')" in code
