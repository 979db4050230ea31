"""A tuner beside a monitor: one engine, one diagnosis, one log."""

import re

import keras
import numpy as np
import pytest
from monitor_models import each_jit, monitor, told
from tuner_models import CURE, chain, demoted, done, fit, tuner

import keras_mixprec as kmp
from keras_mixprec.diagnosis import examination as on_demand

GOOD, BIG = 1.0, 1000.0

each_order = pytest.mark.parametrize(
    "order", [lambda c: c, lambda c: c[::-1]], ids=["first", "last"]
)


@each_order
@each_jit
def test_both_share_one_diagnosis_and_one_log(
    jit, order, tmp_path, monkeypatch
):
    counted = []
    examine = on_demand.examine

    def counting(*args, **kwargs):
        counted.append(kwargs["step"])
        return examine(*args, **kwargs)

    monkeypatch.setattr("keras_mixprec.diagnosis.in_training.examine", counting)
    watcher, callback = monitor(tmp_path), tuner()
    model = chain(jit)
    fit(model, [GOOD] * 20 + [BIG] * 20, *order([callback, watcher]))
    assert demoted(model) == CURE
    (step,) = done(callback)
    # The first two audits, and when the first bad batch was seen.
    assert counted == [0, 16, step]
    kinds = {v.kind for v in watcher.verdicts}
    assert kinds == {"forward_overflow", "cast_overflow"}
    (event,) = told(tmp_path, "demote")
    assert event["step"] == step
    assert event["layers"]["big"] == {
        "before": "mixed_float16",
        "after": "float32",
    }
    (cost,) = told(tmp_path, "rebuild")
    assert cost["seconds"] == pytest.approx(
        callback.history[0]["seconds"], abs=1e-3
    )


@each_order
@each_jit
def test_together_they_change_nothing_in_a_healthy_run(jit, order, tmp_path):
    def weights(*callbacks):
        model = chain(jit, rate=2.0**-20)
        fit(model, np.linspace(1, 2, 30), *callbacks)
        return [v.numpy() for v in [*model.weights, *model.optimizer.variables]]

    known = weights()
    watched = weights(*order([tuner(), monitor(tmp_path)]))
    for ours, theirs in zip(watched, known, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@each_order
def test_a_dry_run_is_in_the_log(order, tmp_path):
    callback = tuner(dry_run=True)
    fit(chain(), [BIG] * 20, *order([callback, monitor(tmp_path)]))
    (event,) = told(tmp_path, "demote")
    assert "would demote" in event["message"]


def test_the_same_callbacks_serve_again(tmp_path):
    callbacks = [tuner(), monitor(tmp_path)]
    for _ in range(2):
        model = chain()
        fit(model, [BIG] * 5, *callbacks)
        assert demoted(model) == CURE


def test_after_a_fit_that_died_all_is_as_before(tmp_path):
    def die(batch, logs):
        raise KeyboardInterrupt

    killer = keras.callbacks.LambdaCallback(on_train_batch_begin=die)
    callback, watcher, model = tuner(), monitor(tmp_path), chain()
    with pytest.raises(KeyboardInterrupt):
        fit(model, [BIG] * 5, callback, watcher, killer)
    fit(model, [BIG] * 5, callback, watcher)
    assert demoted(model) == CURE


@pytest.mark.parametrize("beside", [True, False])
def test_the_overhead_is_that_of_who_was_there(beside, tmp_path):
    watcher = monitor(tmp_path)
    fit(chain(), [GOOD] * 20, watcher, *[tuner()] * beside)
    who = "; monitor and tuner " if beside else "; monitor "
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    said = str(kmp.load_report(tmp_path))
    titles = [f["title"] for f in run["performance"]["figures"]]
    share = re.escape(who) + r"[\d.]+%"
    assert len(re.findall(share, " ".join(said.split()))) == 1
    who = who.strip("; ")
    assert {f"{who}, share of the time", f"{who}, done once"} <= {*titles}
