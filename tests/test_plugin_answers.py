"""The page answers with a plan, and says what is left to do."""

import json

import keras
import numpy as np
import pytest
from plugin_runs import tiny_transformer, train

import keras_mixprec as kmp

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def overview_of(log_dir):
    (run,) = kmp.load_report(log_dir).to_dict().values()
    return run


# The plan.


@pytest.fixture(scope="module")
def tuned(trained):
    """The ranges of a real run, and the page of it."""
    path = trained / "report.html"
    kmp.load_report(trained).save_html(path)
    return path


def test_a_plan_from_ranges_is_one_that_models_follow(page, tuned, tmp_path):
    page.open_file(tuned, run="tuned/mixprec")
    (address,) = page.values("#what-if a", "href")
    plan = page.run("return fetch(arguments[0]).then((x) => x.text())", address)
    assert address.startswith("data:application/json")
    path = tmp_path / "plan.json"
    assert (
        json.loads(plan)
        == kmp.load_report(tuned.parent).plan(run="tuned/mixprec")["file"]
    )
    path.write_text(plan)
    plan = kmp.PrecisionPlan.load(path)
    wide = [p for p, policy in plan.items() if policy == "float32"]
    assert "overflowing" in wide
    assert len(wide) < 4
    train(tmp_path / "again", policy=plan, epochs=1)
    assert overview_of(tmp_path / "again")["skipped"] == 0


# Two runs.


# The graph of the model.


def test_the_log_has_the_graph_of_a_model(tuned):
    run = kmp.load_report(tuned.parent).to_dict()["tuned/mixprec"]
    fed_by = {layer["path"]: layer["fed_by"] for layer in run["layers"]}
    assert fed_by["embed"] == []
    assert fed_by["overflowing"] == ["in_1"]
    assert sorted(fed_by["add_2"]) == ["add_1", "out_2"]
    model = tiny_transformer()
    links = sum(len(node.input_tensors) for x in model.layers
                for node in x._inbound_nodes)  # fmt: skip
    # All but the one from the input.
    assert sum(map(len, fed_by.values())) == links - 1


# Findings, repairs, and what is left to do.


def test_a_repair_of_what_a_loss_scale_cures_leads_to_that(page, tmp_path):
    """No rule keeps layers in float32 for good."""
    keras.config.set_dtype_policy("mixed_float16")
    parts = keras.layers.Dense(8, name="first"), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((4,)), *parts])
    optimizer = kmp.LossScaleOptimizer("adam", kmp.FixedLossScale(1.0))

    def loss(y, p):
        return 1e-10 * keras.ops.mean(keras.ops.square(y - p))

    optimizer.inner_optimizer.epsilon = 1e-14
    model.compile(optimizer, loss, jit_compile=False)
    x = np.random.default_rng(0).normal(size=(64, 4))
    watching = kmp.MixPrecMonitor(tmp_path, verbose=0)
    callbacks = [watching, kmp.PrecisionTuner(verbose=0)]
    model.fit(x, x[:, :1], verbose=0, callbacks=callbacks)
    bits = watching.verdicts[0].numbers["advised_bits"]
    headline = page.show(tmp_path).text("#headline")
    assert f"raised to 2{str(bits).translate(RAISED)}" in headline
    assert "that loss scale" in page.text("#headline .next")
