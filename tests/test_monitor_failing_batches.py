"""Failing batches are kept, and fail alike in another process."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers, ops
from monitor_models import (
    BACKEND,
    BAD,
    each_jit,
    fit,
    good,
    monitor,
    not_torch,
    one_weight,
    told,
    with_bad,
)

import keras_mixprec as kmp
from keras_mixprec.diagnosis.failing_batch import FailingBatch

JIT = BACKEND == "jax"
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(48, 4)).astype("float32")
X[16:24] *= 300.0  # The third of six batches.
Y = RANDOM.normal(size=(48, 1)).astype("float32")


class Squares(layers.Layer):
    """Overflows in float16 where the input exceeds 255."""

    def call(self, x):
        return ops.square(x) * 1e-3


def model_with_squares():
    """Built alike in every process."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            Squares(name="squares"),
            layers.Dropout(0.2),
            layers.Dense(1, name="head"),
        ]
    )
    kmp.apply_policy(model, "mixed_float16")
    model.compile(kmp.LossScaleOptimizer("adam"), "mse", jit_compile=False)
    return model


REPLAY = """
import json, sys
sys.path.insert(0, sys.argv[2])
from test_monitor_failing_batches import FailingBatch, model_with_squares
verdicts = FailingBatch.load(sys.argv[1]).replay(model_with_squares())
print(json.dumps([v.to_dict() for v in verdicts]))
"""


@pytest.mark.slow
def test_a_batch_fails_alike_in_another_process(tmp_path):
    model = model_with_squares()
    watcher = monitor(tmp_path, keep_failing_batches=3)
    model.fit(X, Y, 8, epochs=2, shuffle=False, verbose=0, callbacks=[watcher])
    assert [b.step for b in watcher.failing_batches] == [3, 9]
    first = watcher.failing_batches[0]
    np.testing.assert_array_equal(first.batch[0], X[16:24])
    path = tmp_path / "batch.npz"
    first.save(path)
    here = first.replay(model_with_squares())
    assert [(v.kind, v.layer) for v in here] == [
        ("forward_overflow", "squares")
    ]
    answer = subprocess.run(
        [sys.executable, "-c", REPLAY, path, os.path.dirname(__file__)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    there = json.loads(answer.stdout.splitlines()[-1])
    assert there == json.loads(json.dumps([v.to_dict() for v in here]))
    assert there[0]["step"] == 3


@each_jit
def test_training_is_the_same_and_the_first_are_kept(tmp_path, jit):
    values = with_bad(good(8), 2, 3, 6)

    def losses(*callbacks):
        return fit(one_weight(jit=jit), values, callbacks, epochs=2)["loss"]

    watcher = monitor(tmp_path / "a", keep_failing_batches=2)
    kept = losses(watcher)
    assert kept == losses(monitor(tmp_path / "b"))
    batches = watcher.failing_batches
    assert [b.step for b in batches] == [3, 4]
    assert [b.scales for b in batches] == [
        {"optimizer": 2.0**15},
        {"optimizer": 2.0**14},
    ]
    assert (batches[0].batch[0] == np.float32(BAD)).all()
    assert batches[0].plan == {"dense": "mixed_float16"}


def test_none_is_kept_unless_asked_for(tmp_path):
    watcher = monitor(tmp_path)
    fit(one_weight(jit=JIT), with_bad(good(4), 2), [watcher])
    assert watcher.failing_batches == []


def test_dicts_and_weights_of_samples_are_kept(tmp_path):
    batch = ({"a": np.ones(2), "b": [np.zeros(3), None]}, np.ones(1), None)
    kept = FailingBatch(4, batch, [np.ones((2, 2))], [], {"optimizer": 2.0}, {})
    kept.save(tmp_path / "b.npz")
    found = FailingBatch.load(tmp_path / "b.npz")
    keras.tree.map_structure(np.testing.assert_array_equal, found.batch, batch)
    np.testing.assert_array_equal(found.weights[0], np.ones((2, 2)))
    assert (found.step, found.scales) == (4, {"optimizer": 2.0})


def test_other_files_and_other_models_are_refused(tmp_path):
    np.savez(tmp_path / "other.npz", a=np.ones(2))
    with pytest.raises(ValueError, match="must be a file that.*Received: path"):
        FailingBatch.load(tmp_path / "other.npz")
    batch = FailingBatch(0, (np.ones((2, 4)),), [np.ones((9, 9))], [], {}, {})
    with pytest.raises(ValueError, match="shapes.*Received: model with"):
        batch.replay(model_with_squares())


@not_torch
def test_of_several_steps_in_one_call_none_is_kept(tmp_path):
    model = one_weight(jit=JIT, steps_per_execution=2)
    watcher = monitor(tmp_path, keep_failing_batches=2)
    with pytest.warns(UserWarning, match="cannot keep.*several"):
        fit(model, with_bad(good(4), 2), [watcher])
    assert watcher.failing_batches == []
    assert model.optimizer.attempted_steps == 4


def overflowing(scale):
    return one_weight(
        lambda inner: kmp.LossScaleOptimizer(inner, scale), jit=JIT
    )


def test_an_unrecoverable_run_is_stopped_with_the_reason(tmp_path, capsys):
    watcher = monitor(tmp_path, update_freq=1, stop_after=8, verbose=1)
    model = overflowing(kmp.DynamicLossScale(2.0, min_scale=1.0))
    fit(model, [BAD] * 40, [watcher])
    assert model.optimizer.attempted_steps < 12
    [event] = told(tmp_path, "stopped")
    assert "a loss scale of 1 does not help either" in event["reason"]
    assert event["reason"] in capsys.readouterr().out
    # The cause, not the collapse that it brings about.
    kinds = [v.kind for v in watcher.verdicts]
    assert kinds
    assert "scale_collapsed" not in kinds


def test_others_go_on(tmp_path):
    watcher = monitor(tmp_path, update_freq=1, stop_after=3)
    model = overflowing(kmp.DynamicLossScale(2.0, min_scale=1.0))
    fit(model, with_bad(good(12), 2, 5), [watcher])
    assert model.optimizer.attempted_steps == 12
    assert told(tmp_path, "stopped") == []
    assert "scale_collapsed" not in [v.kind for v in watcher.verdicts]
