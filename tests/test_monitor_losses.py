"""The loss by step, and batches whose loss is not finite."""

from functools import partial

import keras
import numpy as np
import pytest
from monitor_models import (
    BAD,
    DEFAULTS,
    JITS,
    ROWS,
    arrays,
    dense,
    each_jit,
    every_backend,
    good,
    monitor,
    not_jax,
    not_torch,
    one_backend,
    one_weight,
    stream,
    watched,
    with_bad,
)
from zoo.own_step import OwnStep

import keras_mixprec as kmp

pytestmark = one_backend

INF, NAN = np.inf, np.nan
TARGETS = [0, INF, 0, NAN, -INF, INF, INF, 0, NAN, 0]
COUNTED = {"inf": 3, "-inf": 1, "nan": 2}


@pytest.mark.parametrize(
    ("per_epoch", "epochs", "max_overhead", "bad"),
    [
        pytest.param(12, 2, 1.0, [], marks=every_backend),
        # Without a budget for readings each epoch still has a mean.
        (12, 4, 0.0, []),
        # As many steps an epoch as between two readings, or one more.
        (2, 4, 1.0, []),
        (3, 4, 1.0, []),
        # Step 2 shares a reading with a finite one, steps 5 to 8 do not.
        (12, 2, 1.0, [1, 4, 5, 6, 7]),
    ],
)
def test_a_point_is_the_mean_of_the_finite_steps_since_the_last(
    per_epoch, epochs, max_overhead, bad, tmp_path
):
    values = with_bad(good(per_epoch * epochs), *bad)
    often = {"update_freq": 2, "max_overhead": max_overhead}
    # The loss of validation is another one.
    of_fit = {"epochs": epochs, "validation_data": arrays([9.0])}
    logged = watched(tmp_path, values, **often, **of_fit).overview()["loss"]
    losses = np.square([NAN if v == BAD else v for v in values])
    ends = [per_epoch * (n + 1) for n in range(epochs)]
    assert {*ends} <= {*logged["steps"]}
    assert max_overhead or len(logged["steps"]) == epochs
    read = [0, *logged["steps"]]
    for value, a, b in zip(logged["values"], read, read[1:], strict=False):
        # A span over two epochs is of the second alone.
        span = losses[max(a, (b - 1) // per_epoch * per_epoch) : b]
        expected = np.nan if np.isnan(span).all() else np.nanmean(span)
        assert value == pytest.approx(expected, rel=1e-5, nan_ok=True)


@every_backend
def test_the_end_of_an_epoch_that_is_not_read_is_in_the_curve(tmp_path, clock):
    options = DEFAULTS | {"update_freq": 10}
    with clock.each_look_takes(0.001):
        run = watched(tmp_path, good(15) * 2, epochs=2, **options)
    logged = run.overview()["loss"]
    assert logged["steps"][:2] == [10, 15]
    mean = np.mean(np.square(good(15)[10:]))
    assert logged["values"][1] == pytest.approx(mean, rel=1e-5)


# Losses that are not finite.


def sum_loss(target, prediction):
    # As finite as the target, which adds nothing to the gradient.
    return target + keras.ops.cast(prediction, "float32")


def times_loss(target, prediction):
    # The gradient is as finite as the target.
    return target * keras.ops.cast(prediction, "float32")


def targets(*values):
    """One sample a batch."""
    return np.ones((len(values), 1)), np.array(values, "float32")[:, None]


def counts(run, tag):
    """Returns the last value of the curve of each kind."""
    curves = {kind: run.scalars(f"{tag}/{kind}") for kind in COUNTED}
    return {kind: [*c.values()][-1] for kind, c in curves.items() if c}


class OwnLosses(OwnStep):
    """Its loss is the target, which it returns or gives to a metric."""

    def __init__(self, tracked, jit):
        super().__init__()
        self.dense = keras.layers.Dense(1, dtype="float16")
        self.tracker = keras.metrics.Mean(name="loss") if tracked else None
        self.compile(kmp.LossScaleOptimizer("sgd"), jit_compile=jit)
        self(np.ones((1, 1)))

    def call(self, x):
        return self.dense(x)

    def loss_of(self, x, y):
        loss = keras.ops.mean(sum_loss(y, self(x)))
        if self.tracker is None:
            return loss, {"own_loss": loss}
        self.tracker.update_state(loss)
        return loss, {"tracked": self.tracker.result()}


@pytest.mark.long
@each_jit
@pytest.mark.parametrize(
    "make",
    [
        partial(one_weight, loss=sum_loss),
        pytest.param(
            partial(one_weight, loss=sum_loss, steps_per_execution=5),
            marks=not_torch,
        ),
        partial(OwnLosses, False),
        # JAX hands the metrics of such a step on as they were.
        pytest.param(partial(OwnLosses, True), marks=not_jax),
    ],
    ids=["compiled loss", "five steps at once", "returned", "tracked"],
)
def test_losses_are_counted_by_kind(make, jit, tmp_path):
    run = watched(tmp_path, targets(*TARGETS), make(jit=jit), batch_size=1)
    assert run.summary.nonfinite_losses == COUNTED
    assert run.model.optimizer.skipped_steps == 0
    assert counts(run, "nonfinite_losses") == COUNTED
    (event,) = run.told("nonfinite_losses")
    assert event["counts"] == COUNTED
    # The loss of a custom step is shown unchanged.
    if (curve := run.overview()["loss"]) and not isinstance(make.func, type):
        assert np.isfinite(curve["values"]).all()


@each_jit
def test_a_skipped_step_has_the_kinds_of_its_loss_and_gradients(jit, tmp_path):
    model = one_weight(jit=jit, loss=times_loss)
    # The last one has a finite loss, whose gradient overflows once scaled.
    values = targets(1, INF, NAN, 1, -INF, 1e35)
    run = watched(tmp_path, values, model, batch_size=1)
    skipped = run.told("skipped_step")
    assert [event["at_step"] for event in skipped] == [2, 3, 5, 6]
    losses = [event.get("loss") for event in skipped]
    assert losses == [["inf"], ["nan"], ["-inf"], None]
    steps = model.optimizer.nonfinite_steps()
    assert [step.loss for step in steps] == [x or [] for x in losses]
    assert all(list(e["kinds"]) == e["variables"] for e in skipped)
    kinds = [[*event["kinds"].values()] for event in skipped]
    assert kinds == [[["inf"]], [["nan"]], [["-inf"]], [["inf"]]]
    gradients = {"inf": 2, "-inf": 1, "nan": 1}
    (done,) = run.summary.optimizers.values()
    assert done.nonfinite_counts == gradients
    assert counts(run, "nonfinite_gradients") == gradients
    assert "| inf |" in run.texts("skipped_step")[6]


@each_jit
def test_infinite_losses_are_diagnosed_at_the_next_reading(jit, tmp_path):
    # Its gradients are finite, so that no step is skipped.
    model = dense(inputs=1, loss="mae", rules=[], jit=jit)
    model.get_layer("head").set_weights([np.array([[6e4]]), np.ones(1)])
    x = np.full((16, 1), 2.0, "float32")
    run = watched(tmp_path, (x, 1e5 * x), model, update_freq=8, batch_size=1)
    (verdict,) = run.verdicts
    assert (verdict.kind, verdict.layer) == ("forward_overflow", "head")
    assert verdict.step == 8


@each_jit
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_lost_weights_are_found_where_no_loss_is_scaled(jit, policy, tmp_path):
    """No optimizer skips a step of theirs, and no batch is counted."""
    model = dense(inputs=1, policy=policy, jit=jit)
    values = [1.0, 1.0, NAN, 1.0, 1.0, 1.0]
    run = watched(tmp_path, values, model, update_freq=1)
    [verdict] = run.verdicts
    assert verdict.kind == "weights_lost"
    assert run.summary.headline["state"] == "failing"


# Metrics that float16 makes infinite, though the loss is finite.

ONES = np.ones((4, 1), "float32")
# The error of a prediction of 1 is 1e5 of the smallest of these targets, which
# is 1e7%: beyond float16, where the loss is at most 4.
SMALL = np.array([[1e-5], [1.0], [2.0], [1e-5]], "float32")


@pytest.mark.long
@every_backend
@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize(
    ("last", "validated", "event"),
    [
        (None, False, "metric_not_finite"),
        (None, True, "validation_not_finite"),
        # As the advice has it; 1e5 of two of four targets, in percent.
        ("float32", False, None),
    ],
)
def test_a_metric_that_overflows_is_logged_once(
    last, validated, event, jit, tmp_path
):
    keras.config.set_dtype_policy("mixed_float16")
    layer = keras.layers.Dense(1, kernel_initializer="ones", dtype=last)
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(
        kmp.LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=1.0),
        loss="mse",
        metrics=["mae", "mape"],
        jit_compile=jit,
    )
    validation = {"validation_data": (ONES, SMALL)} if validated else {}
    data = ONES, ONES if validated else SMALL
    run = watched(tmp_path, data, model, epochs=2, **validation)
    assert np.isfinite(run.history["loss"]).all()
    found = run.history["val_mape" if validated else "mape"]
    expected = 100 * 1e5 / 2 if last else INF
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    events = [e for e in run.told() if "not_finite" in e["kind"]]
    assert [e["kind"] for e in events] == ([event] if event else [])
    assert all(e["metrics"] == {"mape": "inf"} for e in events)
    assert (run.summary.headline["state"] == "warning") == bool(event)
    verdicts = [v.numbers["metric"] for v in run.verdicts]
    assert verdicts == ["mape"] * validated


# Metrics of every kind with a skipped step.

METRICS = [
    keras.metrics.RootMeanSquaredError,
    keras.metrics.R2Score,
    lambda: keras.metrics.AUC(num_thresholds=5),
    lambda: "accuracy",
    keras.metrics.Precision,
    lambda: keras.metrics.BinaryIoU(threshold=0.15),
]
# The second of three batches is bad.
X = np.repeat([1 / 8, BAD, 1 / 4], 4)[:, None]
BATCHES = {"batch_size": 4, "shuffle": False, "verbose": 0}


def labeled(values):
    """Batches whose targets are not all the same."""
    for x, _ in stream(values):
        yield x, np.arange(ROWS)[:, None] % 2 * 1.0


# Keras' metrics of float16 predictions, without a monitor as well.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@each_jit
def test_metrics_leave_the_bad_batches_out(jit, tmp_path):
    def run(values, callbacks):
        keras.backend.clear_session()
        model = one_weight(
            metrics=[make() for make in METRICS],
            weighted_metrics=[keras.metrics.MeanAbsoluteError(name="weighted")],
            jit=jit,
        )
        steps = {"steps_per_epoch": len(values), "callbacks": callbacks}
        data = labeled(values)
        return model.fit(data, shuffle=False, verbose=0, **steps).history

    values = good(4, start=7)
    expected = run(values, [])
    bad = [BAD, *values[:2], BAD, *values[2:]]
    shown = run(bad, [monitor(tmp_path)])
    assert shown.keys() == expected.keys()
    for name, value in shown.items():
        # XLA may add up in another order.
        np.testing.assert_allclose(value, expected[name], rtol=1e-5)


@pytest.mark.long
@each_jit
def test_losses_of_several_outputs(jit, tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((1,))
    dense = {
        name: keras.layers.Dense(
            1, use_bias=False, kernel_initializer="ones", name=name
        )
        for name in "ab"
    }
    model = keras.Model(inputs, {n: d(inputs) for n, d in dense.items()})
    losses = {"a": "mse", "b": "mae"}
    metrics = {"a": ["mse"], "b": ["mae"]}
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, losses, metrics=metrics, jit_compile=jit)
    y = {"a": np.zeros_like(X), "b": np.zeros_like(X)}
    logs = model.fit(X, y, callbacks=[monitor(tmp_path)], **BATCHES).history
    a, b = 5 / 128, 3 / 16
    shown = [logs[n][0] for n in ("loss", "a_loss", "b_loss", "a_mse", "b_mae")]
    np.testing.assert_allclose(shown, [a + b, a, b, a, b], rtol=1e-6)


@every_backend
def test_a_bad_last_batch_does_not_lose_the_weights(tmp_path):
    of = keras.layers
    parts = [of.Dense(8), of.BatchNormalization(), of.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *parts])
    kmp.apply_policy(model, "mixed_float16")
    sgd = kmp.LossScaleOptimizer(keras.optimizers.SGD(1e-3), 8.0)
    model.compile(sgd, "mse", jit_compile=False)
    x = np.ones((32, 4), "float32")
    x[-1] = np.nan
    callback = kmp.MixPrecMonitor(tmp_path, verbose=0)
    found = model.fit(x, x[:, :1] * 0, 8, 2, 0, [callback], shuffle=False)
    assert np.isfinite(found.history["loss"]).all()
