"""Batches with a loss that is not finite are counted, by its kind."""

import json

import keras
import numpy as np
import pytest
from monitor_models import (
    BACKEND,
    BAD,
    each_jit,
    fit,
    good,
    monitor,
    not_torch,
    one_weight,
    scalars,
    texts,
    told,
)
from zoo.own_step import OwnStep

import keras_mixprec as kmp

INF, NAN = np.inf, np.nan
TARGETS = [0, INF, 0, NAN, -INF, INF, INF, 0, NAN, 0]
COUNTED = {"inf": 3, "-inf": 1, "nan": 2}


def sum_loss(target, prediction):
    # As finite as the target, which adds nothing to the gradient.
    return target + keras.ops.cast(prediction, "float32")


def train(model, targets, watcher):
    data = np.ones((len(targets), 1)), np.array(targets, "float32")[:, None]
    model.fit(
        *data, batch_size=1, shuffle=False, verbose=0, callbacks=[watcher]
    )


def counts(log_dir, tag):
    """What is last in the curve of each kind."""
    curves = {kind: scalars(log_dir, f"{tag}/{kind}") for kind in COUNTED}
    return {kind: [*c.values()][-1] for kind, c in curves.items() if c}


@each_jit
def test_losses_are_counted_by_kind(jit, tmp_path):
    model = one_weight(jit=jit, loss=sum_loss)
    watcher = monitor(tmp_path)
    train(model, TARGETS, watcher)
    assert watcher.summary.nonfinite_losses == COUNTED
    assert model.optimizer.skipped_steps == 0
    assert counts(tmp_path, "nonfinite_losses") == COUNTED
    (event,) = told(tmp_path, "nonfinite_losses")
    assert event["counts"] == COUNTED
    line = "Non-finite loss: inf in 3 batches, -inf in 1, nan in 2."
    assert line in str(watcher.summary)
    assert line in str(kmp.load_report(tmp_path))


def test_another_fit_in_the_folder_counts_on(tmp_path):
    model = one_weight(jit=BACKEND == "jax", loss=sum_loss)
    for folder, targets in ("a", TARGETS), ("a", [0, INF]), ("b", [NAN, 0]):
        watcher = monitor(tmp_path / folder)
        train(model, targets, watcher)
    assert watcher.summary.nonfinite_losses == {"inf": 0, "-inf": 0, "nan": 1}
    assert counts(tmp_path / "a", "nonfinite_losses") == COUNTED | {"inf": 4}
    assert counts(tmp_path / "b", "nonfinite_losses") == {"nan": 1}
    assert "inf in 4 batches" in str(kmp.load_report(tmp_path / "a"))


@not_torch
@each_jit
def test_several_steps_in_one_call(jit, tmp_path):
    model = one_weight(jit=jit, loss=sum_loss, steps_per_execution=5)
    watcher = monitor(tmp_path)
    train(model, TARGETS, watcher)
    assert watcher.summary.nonfinite_losses == COUNTED


@each_jit
def test_gradients_are_logged_by_kind(jit, tmp_path):
    watcher = monitor(tmp_path)
    # BAD overflows to inf in the forward pass, NaN is NaN.
    fit(one_weight(jit=jit), [*good(2), BAD, np.nan], [watcher])
    first, second = told(tmp_path, "skipped_step")
    assert list(first["kinds"]) == first["variables"]
    assert list(second["kinds"].values()) == [["nan"]]
    (done,) = watcher.summary.optimizers.values()
    assert done.nonfinite_counts["nan"] >= 1
    logged = counts(tmp_path, "nonfinite_gradients")
    assert logged == {k: n for k, n in done.nonfinite_counts.items() if n}
    assert "Non-finite gradients: " in str(kmp.load_report(tmp_path))


def times_loss(target, prediction):
    # The gradient is as finite as the target.
    return target * keras.ops.cast(prediction, "float32")


@each_jit
def test_a_skipped_step_says_what_its_loss_was(jit, tmp_path):
    model = one_weight(jit=jit, loss=times_loss)
    watcher = monitor(tmp_path)
    # The last one has a finite loss, whose gradient overflows once scaled.
    train(model, [1, INF, NAN, 1, -INF, 1e35], watcher)
    skipped = told(tmp_path, "skipped_step")
    assert [event["at_step"] for event in skipped] == [2, 3, 5, 6]
    losses = [event.get("loss") for event in skipped]
    assert losses == [["inf"], ["nan"], ["-inf"], None]
    steps = model.optimizer.nonfinite_steps()
    assert [step.loss for step in steps] == [x or [] for x in losses]
    assert "| inf |" in texts(tmp_path, "skipped_step")[6]


class OwnLosses(OwnStep):
    """Its loss is the target, which it returns or gives to a metric."""

    def __init__(self, tracked):
        super().__init__()
        self.dense = keras.layers.Dense(1, dtype="float16")
        self.tracker = keras.metrics.Mean(name="my_loss") if tracked else None

    def call(self, x):
        return self.dense(x)

    def loss_of(self, x, y):
        loss = keras.ops.mean(sum_loss(y, self(x)))
        if self.tracker is None:
            return loss, {"own_loss": loss}
        self.tracker.update_state(loss)
        return loss, {"tracked": self.tracker.result()}


@each_jit
@pytest.mark.parametrize("tracked", [False, True])
def test_those_of_a_train_step_of_the_users_own(tracked, jit, tmp_path):
    if tracked and BACKEND == "jax":
        pytest.skip("The step hands its metrics on as they were.")
    model = OwnLosses(tracked)
    model.compile(kmp.LossScaleOptimizer("sgd"), jit_compile=jit)
    model(np.ones((1, 1)))
    watcher = monitor(tmp_path)
    train(model, TARGETS, watcher)
    assert watcher.summary.nonfinite_losses == COUNTED
    (event,) = told(tmp_path, "nonfinite_losses")
    assert event["counts"] == COUNTED


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_healthy_run_has_nothing_of_it(policy, tmp_path):
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(kmp.LossScaleOptimizer("sgd"), "mse", jit_compile=False)
    watcher = monitor(tmp_path)
    fit(model, good(3), [watcher])
    counted = None if policy == "float32" else dict.fromkeys(COUNTED, 0)
    assert watcher.summary.nonfinite_losses == counted
    assert not counts(tmp_path, "nonfinite_losses")
    with open(tmp_path / "mixprec" / "events.jsonl") as lines:
        kinds = {json.loads(line)["kind"] for line in lines}
    assert not kinds & {"nonfinite_losses", "nonfinite_gradients"}


@each_jit
def test_losses_that_are_infinite_are_diagnosed_at_the_next_reading(
    jit, tmp_path
):
    # Its gradients are finite, so that no step is skipped.
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(1, name="price"),
        ]
    )
    model.compile(kmp.LossScaleOptimizer("sgd"), "mae", jit_compile=jit)
    model.get_layer("price").set_weights([np.array([[6e4]]), np.ones(1)])
    watcher = monitor(tmp_path, update_freq=8)
    x = np.full((64, 1), 2.0, "float32")
    model.fit(
        x, 1e5 * x, batch_size=1, epochs=1, verbose=0, callbacks=[watcher]
    )
    (verdict,) = watcher.verdicts
    assert (verdict.kind, verdict.layer) == ("forward_overflow", "price")
    assert verdict.step == 8


@each_jit
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_lost_weights_are_found_where_no_loss_is_scaled(jit, policy, tmp_path):
    """No optimizer skips a step of theirs, and no batch is counted."""
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=jit)
    watcher = monitor(tmp_path, update_freq=1)
    fit(model, [1.0, 1.0, NAN, 1.0, 1.0, 1.0], [watcher])
    [verdict] = watcher.verdicts
    assert verdict.kind == "weights_lost"
    assert watcher.summary.headline["state"] == "failing"
