"""What the monitor writes, read back by TensorBoard's own readers."""

import importlib.util
import math

import keras
import numpy as np
import pytest
from monitor_models import (
    BAD,
    JITS,
    OPTIMIZERS,
    fit,
    good,
    monitor,
    one_weight,
    scalars,
    tags,
    texts,
    told,
    with_bad,
)
from reporting_readers import get, poll, tensorboard

import keras_mixprec as kmp

KERNEL = "model/dense/kernel"
VALUES = with_bad(good(6), 2, 3)


@pytest.fixture(
    scope="module",
    params=[(wrap, jit) for wrap in OPTIMIZERS for jit in JITS],
    ids=[f"{wrap}-{JITS[jit]}" for wrap in OPTIMIZERS for jit in JITS],
)
def run(request, tmp_path_factory):
    """The folder of a run with either optimizer, compiled and not."""
    wrap, jit = request.param
    keras.backend.clear_session()
    log_dir = tmp_path_factory.mktemp("run")
    watcher = monitor(log_dir, update_freq=1)
    fit(one_weight(OPTIMIZERS[wrap], jit), VALUES, [watcher])
    return log_dir


def test_the_log_says_what_float32_products_are_computed_in(tmp_path):
    with kmp.matmul_precision("float32"):
        fit(one_weight(), good(2), [monitor(tmp_path)])
    (begin,) = told(tmp_path, "train_begin")
    assert begin["matmul_precision"].startswith("float32, ")
    settings = begin["settings"]
    assert {settings["optimizer"], settings["log_dir"]} == {
        "SGD",
        str(tmp_path),
    }
    assert settings["learning_rate"] == 0.0  # As `one_weight` has it.
    report = kmp.load_report(tmp_path)
    (run,) = report.to_dict().values()
    assert run["matmul_precision"] == begin["matmul_precision"]
    said = (
        f"Products of float32 numbers are computed in {run['matmul_precision']}"
    )
    assert said in str(report)


def test_tags(run):
    # A run that XLA compiles is long enough for a diagnosis.
    found = tags(run) - {"error_against_float32/00000"}
    # Those are in `test_monitor_performance.py`.
    assert {tag for tag in found if "performance/" not in tag} == {
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


def test_loss_scale_and_skipped_steps(run):
    log2 = [15, 15, 15, 14, 13, 13, 13]
    assert scalars(run, "log2_loss_scale") == dict(enumerate(log2))
    scales = scalars(run, "loss_scale").values()
    assert list(scales) == [2.0**n for n in log2]
    skipped = scalars(run, "skipped_steps").values()
    assert list(skipped) == [0, 0, 0, 1, 2, 2, 2]


def test_gradient_norms_are_unscaled(run):
    for tag in "gradient_norm", f"mixprec_gradient_norm_by_variable/{KERNEL}":
        norms = scalars(run, tag)
        for step, value in enumerate(VALUES, start=1):
            if value == BAD:
                assert not math.isfinite(norms[step])
            else:
                assert norms[step] == 2 * value**2


def test_norm_of_all_gradients(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(kmp.LossScaleOptimizer("sgd"), "mse", jit_compile=False)
    model.train_on_batch(np.ones((4, 3)), np.ones((4, 2)))
    weight, bias = (np.float64(w) for w in model.get_weights())
    x = np.random.default_rng(0).normal(size=(4, 3))
    model.fit(x, 0 * x[:, :2], verbose=0, callbacks=[monitor(tmp_path)])
    residual = (x @ weight + bias) / 4
    norm = math.hypot(
        np.linalg.norm(x.T @ residual), np.linalg.norm(residual.sum(0))
    )
    (*_, logged) = scalars(tmp_path, "gradient_norm").values()
    # float16 keeps 11 bits of each factor.
    np.testing.assert_allclose(logged, norm, rtol=2e-3)


def test_overflow_counts_by_variable(run):
    counts = scalars(run, f"mixprec_overflow_count/{KERNEL}")
    assert counts == {3: 1, 4: 2, 5: 2, 6: 2}


def test_text_of_skipped_steps(run):
    shown = texts(run, "skipped_step")
    assert list(shown) == [3, 4]
    assert r"| 3 | 2\*\*15 | inf | model/dense/kernel (inf) |" in shown[3]
    assert r"| 4 | 2\*\*14 | inf | model/dense/kernel (inf) |" in shown[4]


def test_events_of_skipped_steps(run):
    events = told(run, "skipped_step")
    kept = ("at_step", "scale", "variables", "step")
    assert [[e[k] for k in kept] for e in events] == [
        [3, 32768.0, [KERNEL], 3],
        [4, 16384.0, [KERNEL], 4],
    ]


def test_summary_is_the_last_event(run):
    (event,) = told(run, "train_end")
    assert "2 of 6 steps skipped" in " ".join(event["summary"].split())


def test_dtypes_at_start_and_on_change(tmp_path):
    model = one_weight()
    fit(model, good(6), [monitor(tmp_path)])
    for policy in "float32", "float32":
        kmp.apply_policy(model, policy)
        fit(model, good(2), [monitor(tmp_path)])
    tables = texts(tmp_path, "layer_dtypes")
    # At 6 TensorBoard would delete what the fit before logged there.
    assert list(tables) == [0, 7, 9]
    assert "float16" in tables[0]
    assert "float16" not in tables[7]


def test_change_in_mid_training_is_logged(tmp_path):
    class Promote(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                kmp.apply_policy(self.model, "float32")

    fit(one_weight(), good(6), [monitor(tmp_path), Promote()], epochs=3)
    assert list(texts(tmp_path, "layer_dtypes")) == [0, 4]


def test_changes_after_the_last_reading_are_no_error(tmp_path):
    class Alternate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            policy = ("float32", "mixed_float16")[epoch % 2]
            kmp.apply_policy(self.model, policy, rules=[])

    fit(one_weight(), good(6), [monitor(tmp_path), Alternate()], epochs=3)
    assert list(texts(tmp_path, "layer_dtypes")) == [0, 4, 6]


def test_a_tensorboard_serves_the_run(tmp_path):
    keras.backend.clear_session()
    fit(one_weight(), VALUES, [monitor(tmp_path)])
    loader = importlib.util.find_spec("tensorboard_data_server")
    flag = f"--load_fast={'true' if loader else 'false'}"
    with tensorboard(str(tmp_path), flag) as url:
        served = poll(lambda: get(url, "plugin/scalars/tags")["mixprec"])
        assert f"mixprec_overflow_count/{KERNEL}" in served
        shown = poll(lambda: get(url, "plugin/text/tags").get("mixprec"))
        assert set(shown) == {"mixprec/layer_dtypes", "mixprec/skipped_step"}
