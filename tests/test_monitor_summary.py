"""The summary at the end of a training run."""

import keras
import numpy as np
import pytest
from monitor_models import BAD, fit, good, monitor, one_weight

import keras_mixprec as kmp
from keras_mixprec.monitoring.summary import OptimizerSummary, TrainingSummary

UNSCALED = 30 * "no loss scale "
HEADLINE = {"text": "9 steps, none skipped, no findings.", "state": "healthy"}
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


def assert_fits_a_screen(text):
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100


def test_one_optimizer_fits_a_screen():
    assert_fits_a_screen(
        str(
            TrainingSummary(
                {"float16": 500}, {"": done()}, {}, "logs", UNSCALED, HEADLINE
            )
        )
    )


def test_ten_optimizers_fit_a_screen():
    optimizers = {f"optimizer_of_player_{n}": done() for n in range(10)}
    dtypes = {"float16": 480, "float32": 15, "bfloat16": 3, "float64": 2}
    failing = HEADLINE | {"state": "failing"}
    text = str(
        TrainingSummary(dtypes, optimizers, {}, "logs", UNSCALED, failing)
    )
    assert_fits_a_screen(text)
    for name in optimizers:
        assert name in text


def test_a_healthy_run_takes_two_lines():
    optimizers = {"": done(skipped=3)}
    text = str(TrainingSummary({}, optimizers, {}, "logs", "", HEADLINE))
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        (
            {"a": 9, "b": 9, "c": 9, "d": 9},
            "all 4 variables, in 9 steps each",
        ),
        (
            {"a": 9, "b": 8, "c": 7, "d": 6, "e": 0},
            "a (9 steps), b (8 steps), c (7 steps) and 1 more",
        ),
        ({"a": 9, "b": 9}, "a (9 steps) and b (9 steps)"),
    ],
)
def test_variables_that_fail_alike_are_no_lead(counts, text):
    optimizer = OptimizerSummary(9, 9, 0, 8.0, 4.0, counts)
    (remark,) = optimizer.remarks()
    assert remark.endswith(f": {text}.")


def test_skipped_to_the_end_is_said(tmp_path):
    watcher = monitor(tmp_path)
    fit(one_weight(), [*good(2), *[BAD] * 5], [watcher])
    text = " ".join(str(watcher.summary).split())
    assert "5 of 7 steps skipped;" in text
    assert "5 of 7 steps skipped" in text


@pytest.mark.parametrize("kind", [kmp.MixPrecMonitor, kmp.PrecisionTuner])
def test_one_callback_is_not_passed_twice(kind, tmp_path):
    callback = kind(tmp_path / "path", verbose=0)
    model = one_weight()
    with pytest.raises(ValueError, match=f"the same {kind.__name__} again"):
        fit(model, good(2), [callback, callback])
    fit(model, good(2), [callback])


def test_a_search_that_the_run_ends_in_is_no_stop(tmp_path):
    watcher = monitor(tmp_path)
    fit(one_weight(), [*good(2), *[BAD] * 4], [watcher])
    assert "including the last" not in str(watcher.summary)


def test_float16_without_loss_scaling_is_said(tmp_path):
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, dtype="mixed_float16")]
    )
    model.compile("sgd", "mse", jit_compile=False)
    watcher = monitor(tmp_path)
    fit(model, good(2), [watcher])
    assert watcher.summary.unscaled_float16
    text = " ".join(str(watcher.summary).split())
    assert "float16 but nothing scales the loss" in text


@pytest.mark.parametrize("verbose", [0, 1])
def test_printed_if_asked_for(verbose, tmp_path, capsys):
    watcher = monitor(tmp_path, verbose=verbose)
    fit(one_weight(), good(2), [watcher])
    assert (str(watcher.summary) in capsys.readouterr().out) == bool(verbose)


def test_there_is_none_before(tmp_path):
    assert monitor(tmp_path).summary is None


def test_folder_is_named(tmp_path):
    watcher = monitor(tmp_path)
    fit(one_weight(), good(2), [watcher])
    assert watcher.summary.folder == str(tmp_path / "mixprec")
    assert str(watcher.summary).endswith(f"Log: {tmp_path / 'mixprec'}")


def test_an_output_left_in_float16_is_told(tmp_path):
    def summary(last):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((2,)),
                keras.layers.Dense(2, dtype="mixed_float16", name="first"),
                keras.layers.Dense(2, "softmax", dtype=last, name="last"),
            ]
        )
        model.compile(kmp.LossScaleOptimizer("sgd"), "mse", jit_compile=False)
        watching = kmp.MixPrecMonitor(tmp_path, verbose=0)
        x = np.ones((4, 2), "float32")
        model.fit(x, x, verbose=0, callbacks=[watching])
        return watching.summary.left_in_float16

    assert "'last'" in summary("mixed_float16")
    assert "'first'" not in summary("mixed_float16")
    assert not summary("float32")
