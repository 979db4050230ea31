"""What the monitor writes, read back by TensorBoard's own readers."""

import dataclasses
import math
import shutil

import keras
import numpy as np
import pytest
from lint_cases import compiled, plain_adam, samples, scale_of_a_billionth
from monitor_models import (
    BAD,
    JITS,
    OPTIMIZERS,
    dense,
    every_backend,
    fit,
    good,
    monitor,
    one_backend,
    one_weight,
    overview,
    prose,
    scalars,
    told,
    watched,
    with_bad,
)

import keras_mixprec as kmp
from keras_mixprec.loss_scaling.history import NonfiniteStep
from keras_mixprec.monitoring.counter_log import Skips
from keras_mixprec.monitoring.recorded_steps import Reading
from keras_mixprec.monitoring.scale_curve import Block, ScalePoint
from keras_mixprec.monitoring.summary import OptimizerSummary, TrainingSummary
from keras_mixprec.reporting.run_log import RunLog

pytestmark = one_backend

KERNEL = "model/dense/kernel"
VALUES = with_bad(good(6), 2, 3)
TAGS = {
    "loss_scale",
    "log2_loss_scale",
    "skipped_steps",
    "gradient_norm",
    f"mixprec_gradient_norm_by_variable/{KERNEL}",
    f"mixprec_overflow_count/{KERNEL}",
    "nonfinite_losses/inf",
    "nonfinite_gradients/inf",
    "layers",
    "layer_dtypes",
    "skipped_step",
    "events/00000",
    "scale/00000",
    "loss/00000",
    "epochs/00000",
    "custom_scalars__config__",
    "_hparams_/experiment",
    "_hparams_/session_start_info",
}


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(OPTIMIZERS["ours"], marks=every_backend),
        OPTIMIZERS["keras"],
        OPTIMIZERS["auto"],
    ],
)
def test_a_run_has_curves_texts_and_events(wrap, jit, tmp_path):
    keras.backend.clear_session()
    run = watched(tmp_path, VALUES, one_weight(wrap, jit), update_freq=1)
    # A run that XLA compiles is long enough for a diagnosis.
    found = run.tags() - {"error_against_float32/00000"}
    # Those are in `test_monitor_performance.py`.
    assert {tag for tag in found if "performance/" not in tag} == TAGS
    log2 = [15, 15, 15, 14, 13, 13, 13]
    assert run.scalars("log2_loss_scale") == dict(enumerate(log2))
    scales = [2.0**n for n in log2]
    assert run.scalars("loss_scale") == dict(enumerate(scales))
    assert [*run.scalars("skipped_steps").values()] == [0, 0, 0, 1, 2, 2, 2]
    for tag in "gradient_norm", f"mixprec_gradient_norm_by_variable/{KERNEL}":
        norms = run.scalars(tag)
        for step, value in enumerate(VALUES, start=1):
            if value == BAD:
                assert not math.isfinite(norms[step])
            else:
                assert norms[step] == 2 * value**2
    counts = run.scalars(f"mixprec_overflow_count/{KERNEL}")
    assert counts == {3: 1, 4: 2, 5: 2, 6: 2}
    shown = run.texts("skipped_step")
    assert [*shown] == [3, 4]
    for step, bits in (3, 15), (4, 14):
        row = rf"| {step} | 2\*\*{bits} | inf | {KERNEL} (inf) |"
        assert row in shown[step]
    keys = "at_step", "scale", "variables", "step"
    assert [[e[k] for k in keys] for e in run.told("skipped_step")] == [
        [3, 32768.0, [KERNEL], 3],
        [4, 16384.0, [KERNEL], 4],
    ]
    (event,) = run.told("train_end")
    assert event["summary"] == str(run.summary)


@every_backend
def test_a_gradient_norm_is_that_of_numpy(tmp_path):
    model = dense(inputs=3, outputs=2, rules=[])
    model.train_on_batch(np.ones((4, 3)), np.ones((4, 2)))
    weight, bias = (np.float64(w) for w in model.get_weights())
    x = np.random.default_rng(0).normal(size=(4, 3))
    run = watched(tmp_path, (x, 0 * x[:, :2]), model)
    residual = (x @ weight + bias) / 4
    norm = math.hypot(
        np.linalg.norm(x.T @ residual), np.linalg.norm(residual.sum(0))
    )
    (*_, logged) = run.scalars("gradient_norm").values()
    # float16 keeps 11 bits of each factor.
    np.testing.assert_allclose(logged, norm, rtol=2e-3)


def test_settings_are_logged_at_the_start(tmp_path):
    with kmp.matmul_precision("float32"):
        run = watched(tmp_path, good(2))
    (begin,) = run.told("train_begin")
    assert begin["matmul_precision"].startswith("float32")
    settings = begin["settings"]
    assert (settings["optimizer"], settings["learning_rate"]) == ("SGD", 0.0)
    assert settings["log_dir"] == str(tmp_path)
    assert run.overview()["matmul_precision"] == begin["matmul_precision"]
    assert begin["matmul_precision"] in prose(run.watcher.report)


# Dtypes of layers, at the start and on change.


def test_each_fit_has_a_table_of_dtypes(tmp_path):
    model = one_weight()
    watched(tmp_path, good(6), model)
    for policy in "float32", "float32":
        kmp.apply_policy(model, policy)
        run = watched(tmp_path, good(2), model)
    tables = run.texts("layer_dtypes")
    # At 6 TensorBoard would delete what the fit before logged there.
    assert [*tables] == [0, 7, 9]
    assert ["float16" in tables[step] for step in (0, 7)] == [True, False]


@pytest.mark.parametrize(
    ("hook", "policies", "steps"),
    [
        ("on_epoch_begin", {1: "float32"}, [0, 4]),
        # The last change has no reading behind it.
        (
            "on_epoch_end",
            {0: "float32", 1: "mixed_float16", 2: "float32"},
            [0, 4, 6],
        ),
    ],
)
def test_changes_in_training_are_logged(hook, policies, steps, tmp_path):
    model = one_weight()

    def change(epoch, logs=None):
        if epoch in policies:
            kmp.apply_policy(model, policies[epoch], rules=[])

    changing = keras.callbacks.LambdaCallback(**{hook: change})
    run = watched(tmp_path, good(6), model, changing, epochs=3)
    assert [*run.texts("layer_dtypes")] == steps


# A run that is killed, or fails for a night, leaves a log that can be opened.


@every_backend
def test_what_was_written_when_a_process_is_killed_is_read(tmp_path):
    """What other processes see then is what a kill would leave."""
    seen = tmp_path / "seen"

    def look(epoch, logs=None):
        if epoch == 2:
            shutil.copytree(tmp_path / "log", seen)

    looking = keras.callbacks.LambdaCallback(on_epoch_end=look)
    often, values = {"epochs": 4, "update_freq": 1}, [*good(3), BAD] * 4
    watched(tmp_path / "log", values, one_weight(), looking, **often)
    points = scalars(seen, "skipped_steps")
    assert points == {step: step // 4 for step in range(max(points) + 1)}
    assert max(points) >= 11
    skipped = [e["at_step"] for e in told(seen, "skipped_step")]
    assert skipped[:2] == [4, 8]
    # Another run goes on at the step that the one before ended with.
    run = watched(seen, good(4), update_freq=1)
    assert [*run.scalars("loss_scale")] == [*range(max(points) + 5)]


LOOK, READINGS = 50, 2000


def failing(look):
    """What a reading finds where all steps are skipped at the lowest scale."""
    first, last = LOOK * look, LOOK * (look + 1)
    steps = [
        NonfiniteStep(step, 0.5, ["dense/kernel"])
        for step in range(last - 31, last + 1)
    ]
    points = [ScalePoint(step, 0.5, step, 0) for step in (first, last)]
    others = [Block(first + 1, last - 32, LOOK - 32)]
    return Reading(points, [], last, last, True, steps, others, {}, {}, 0)


def test_a_log_of_skips_is_small_and_counts_each(tmp_path):
    with RunLog(tmp_path) as log:
        skips = Skips(log)
        for look in range(READINGS):
            skips.report("", failing(look))
        skips.report_rest(LOOK * READINGS)
    size = sum(path.stat().st_size for path in (tmp_path / "mixprec").iterdir())
    assert size < 20e6  # 120 MB if each were told.
    data = overview(tmp_path)
    kinds = [event["kind"] for event in data["events"]]
    in_full = kinds.count("skipped_step")
    assert 1000 <= in_full < 1032
    others = sum(event.get("count", 0) for event in data["events"])
    assert in_full + others == LOOK * READINGS
    (course,) = data["scale"]
    assert course["skipped"][-1] == LOOK * READINGS
    assert len(course["steps"]) < 1500


# What lint and doctor found before training.


def linted(log_dir, **arguments):
    model = compiled(scale_of_a_billionth(), kmp.LossScaleOptimizer("sgd"))
    return watched(log_dir, (samples(8, 4), samples(8, 8)), model, **arguments)


@pytest.mark.parametrize("repaired", [False, True])
def test_findings_of_lint_are_logged_at_the_first_step(repaired, tmp_path):
    optimizer = "sgd" if repaired else kmp.LossScaleOptimizer("sgd")
    findings = kmp.lint(compiled(scale_of_a_billionth(), optimizer))
    # The loss is scaled by now.
    rules = [finding.rule for finding in findings]
    assert ("no_loss_scaling" in rules) == repaired
    run = linted(tmp_path, lint=findings)
    events = run.told("before_training")
    first = [events[0][k] for k in ("step", "level", "finding", "layer")]
    assert first == [0, "bad", "argument_beyond_format", "bytes"]
    assert {e["level"] for e in events} <= {"bad", "warning"}
    assert "no_loss_scaling" not in [e["finding"] for e in events]
    assert "argument_beyond_format in" in prose(run.watcher.report)
    assert run.verdicts == []


def test_findings_of_the_doctor_are_logged_if_there_are_any(tmp_path):
    finding = {"name": "driver-old", "level": "error", "text": "Old driver."}
    finding |= {"fix": "Install another.", "evidence": ""}
    report = dataclasses.replace(kmp.doctor(quick=True), findings=[finding])
    run = linted(tmp_path / "a", doctor=report)
    (event,) = run.told("before_training")
    assert (event["finding"], event["level"]) == ("driver-old", "bad")
    assert "driver-old" in prose(run.watcher.report)
    assert linted(tmp_path / "b").told("before_training") == []


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("lint", w) for w in (True, "lint", [], plain_adam)]
    + [("doctor", "quick")],
)
def test_other_findings_are_refused(tmp_path, name, wrong):
    with pytest.raises(TypeError, match=f"`{name}` must be"):
        kmp.MixPrecMonitor(tmp_path, **{name: wrong})


# The summary at the end.

HEADLINE = {"text": "9 steps, no findings.", "state": "healthy"}
LONG = "a_rather_long_model_name/encoder/block_{}/multi_head_attention/kernel"


def done(**changes):
    settings = {
        "steps": 123456,
        "skipped": 1234,
        "in_a_row": 77,
        "first_scale": 32768.0,
        "last_scale": 2.0**-120,
        "overflow_counts": {LONG.format(n): n for n in range(500)},
    }
    return OptimizerSummary(**settings | changes)


@pytest.mark.parametrize(
    ("names", "changes", "state", "lines"),
    [
        ([""], {}, "healthy", 24),
        ([f"optimizer_of_player_{n}" for n in range(10)], {}, "failing", 24),
        ([""], {"skipped": 3}, "healthy", 2),
    ],
)
def test_a_summary_fits_a_screen(names, changes, state, lines):
    dtypes = {"float16": 480, "float32": 15, "bfloat16": 3, "float64": 2}
    dtypes, unscaled = ({}, "") if changes else (dtypes, 30 * "no loss scale ")
    optimizers = {name: done(**changes) for name in names}
    found = HEADLINE | {"state": state}
    text = str(TrainingSummary(dtypes, optimizers, {}, "logs", unscaled, found))
    assert len(text.splitlines()) <= lines
    assert max(map(len, text.splitlines())) <= 100
    assert all(name in text for name in names)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        (dict.fromkeys("abcd", 9), "all 4 variables, in 9 steps each"),
        (
            {"a": 9, "b": 8, "c": 7, "d": 6, "e": 0},
            "a (9 steps), b (8 steps), c (7 steps) and 1 more",
        ),
        ({"a": 9, "b": 9}, "a (9 steps) and b (9 steps)"),
    ],
)
def test_variables_that_fail_alike_are_no_lead(counts, text):
    (remark,) = OptimizerSummary(9, 9, 0, 8.0, 4.0, counts).remarks()
    assert remark.endswith(f": {text}.")


@every_backend
@pytest.mark.parametrize("verbose", [0, 1])
def test_the_summary_of_a_run(verbose, tmp_path, capsys):
    watcher = monitor(tmp_path, verbose=verbose)
    assert watcher.summary is None
    fit(one_weight(), [*good(2), *[BAD] * 4], [watcher])
    done = watcher.summary.optimizers[""]
    assert (done.steps, done.skipped, done.in_a_row) == (6, 4, 4)
    text = str(watcher.summary)
    assert (text in capsys.readouterr().out) == bool(verbose)
    assert watcher.summary.folder == str(tmp_path / "mixprec")
    assert text.endswith(watcher.summary.folder)
    # The search for a scale, which the run ends in, is no stop.
    assert "including the last" not in text


@every_backend
@pytest.mark.parametrize("last", ["mixed_float16", "float32"])
def test_an_output_left_in_float16_is_told(last, tmp_path):
    first = keras.layers.Dense(2, name="first")
    softmax = keras.layers.Dense(2, "softmax", dtype=last, name="last")
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((2,)), first, softmax])
    model.compile(kmp.LossScaleOptimizer("sgd"), "mse", jit_compile=False)
    x = np.ones((4, 2), "float32")
    left = watched(tmp_path, (x, x), model).summary.left_in_float16
    assert ("'last'" in left) == (last == "mixed_float16")
    assert "'first'" not in left
