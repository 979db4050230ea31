"""Non-finite inputs, and faults in evaluations."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from monitor_models import (
    BACKEND,
    DEFAULTS,
    assert_logged,
    dense,
    each_jit,
    every_backend,
    one_backend,
    one_weight,
    prose,
    told,
    watched,
)
from tuner_models import tuner

import keras_mixprec as kmp

pytestmark = one_backend


def data(*bad, rows=40):
    """Samples that float16 holds but for the numbers at some rows of x."""
    x = np.full((rows, 1), 0.5, "float32")
    x[list(bad)] = np.nan
    return x, np.zeros((rows, 1), "float32")


def run(folder, data, *others, model=None, **arguments):
    arguments = {"update_freq": 1, "epochs": 2} | arguments
    return watched(folder, data, model, *others, **arguments)


@each_jit
@pytest.mark.parametrize(
    "shuffle", [True, pytest.param(False, marks=one_backend)]
)
def test_samples_are_named_in_the_users_order(shuffle, jit, tmp_path):
    x, y = data(5, 30)
    y[17] = np.inf
    weights = np.ones(40, "float32")
    weights[11] = np.nan
    own = {"shuffle": shuffle, "sample_weight": weights}
    done = run(tmp_path, (x, y), model=one_weight(jit=jit), **own)
    (verdict,) = done.verdicts
    assert verdict.kind == "bad_data"
    assert verdict.numbers["samples_of_x"] == [5, 30]
    assert verdict.numbers["samples_of_y"] == [17]
    assert verdict.numbers["samples_of_sample_weight"] == [11]
    assert "5, 30 of x" in done.summary.headline["text"]


@every_backend
def test_rows_of_a_stream_are_named(tmp_path):
    batches = (data(*[2] * (n in (3, 7)), rows=4) for n in range(10))
    done = run(tmp_path, batches, steps_per_epoch=10, epochs=1)
    (verdict,) = done.verdicts
    found = [verdict.numbers[k] for k in ("epoch", "batch", "rows_of_x")]
    assert found == [0, 3, [2]]
    skipped = done.told("skipped_step")
    assert [event["bad_input"] for event in skipped] == [{"x": 2}] * 2
    (event,) = done.told("bad_batches")
    places = [[b[k] for k in ("epoch", "batch")] for b in event["batches"]]
    assert places == [[0, 3], [0, 7]]
    assert "epoch 0, batches 3, 7" in prose(done.watcher.report)


def test_inputs_of_a_dict_are_named_by_their_keys():
    inputs = {"age": keras.Input((4,), name="age")}
    model = keras.Model(inputs, layers.Dense(1)(inputs["age"]))
    model.compile("sgd", "mse")
    x = {"age": np.array([[1.0] * 4, [np.nan] * 4], "float32")}
    (verdict,) = kmp.diagnose(model, x, np.ones((2, 1)))
    assert verdict.numbers == {"rows_of_x['age']": [1]}
    assert "x['age']" in verdict.advice


@every_backend
def test_each_batch_of_each_epoch_has_its_own_rows(tmp_path):
    x, y = data(5, 6, 30)
    y[28] = np.inf
    done = run(tmp_path, (x, y))
    (event,) = done.told("bad_batches")
    assert event["batches"] == [
        {"epoch": 0, "batch": 1, "step": 2, "rows": {"x": 1}},
        {"epoch": 0, "batch": 7, "step": 8, "rows": {"x": 2, "y": 0}},
        {"epoch": 1, "batch": 1, "step": 12, "rows": {"x": 1}},
        {"epoch": 1, "batch": 7, "step": 18, "rows": {"x": 2, "y": 0}},
    ]
    # These are of all arrays, not of the first batch alone.
    headline = done.summary.headline["text"]
    assert "5, 6, 30 of x" in headline
    assert " 28 of y" in headline


@pytest.mark.parametrize(
    ("bad", "tuned", "scale"),
    [
        pytest.param((5, 17, 30), True, 2.0**15, marks=every_backend),
        (range(8, 20), True, 2.0**15),  # Far down, and back.
        ((5, 17, 30), False, 2.0**9),  # The monitor alone changes nothing.
    ],
)
def test_a_tuner_keeps_the_scale(bad, tuned, scale, tmp_path):
    done = run(tmp_path, data(*bad), *[tuner()] * tuned)
    assert float(done.model.optimizer.loss_scale) == scale
    assert done.told("bad_batches")
    assert not tuned or "fell" not in done.summary.headline["text"]


def test_what_overflows_by_itself_lowers_the_scale(tmp_path):
    x, y = data()
    x[8] = 1e30
    done = run(tmp_path, (x, y), tuner(dry_run=False))
    assert float(done.model.optimizer.loss_scale) < 2.0**15
    assert done.told("bad_batches") == []


@pytest.mark.parametrize("update_freq", [1, 4, 100])
def test_the_scale_that_is_put_back_is_logged(update_freq, tmp_path):
    model, scales = one_weight(), []

    def read(batch=None, logs=None):
        scales.append(float(model.optimizer.loss_scale))

    # Records the scale before each batch, and at the end.
    seen = {"on_train_batch_begin": read, "on_train_end": read}
    seen = tuner(), keras.callbacks.LambdaCallback(**seen)
    options = {"update_freq": update_freq, "epochs": 1}
    run(tmp_path, data(1, 39), *seen, model=model, **options)
    assert len(scales) == 11
    assert scales[-1] == 2.0**15
    assert_logged(tmp_path, scales)


@pytest.mark.long
@every_backend
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_tensors_that_numpy_does_not_take(dtype, tmp_path):
    torch = pytest.importorskip("torch")
    x, y = data(5, 17)
    x = torch.from_numpy(x).to(getattr(torch, dtype))
    x.requires_grad_(BACKEND == "torch")
    done = run(tmp_path, (x, y), epochs=1)
    assert done.verdicts[0].numbers["samples_of_x"] == [5, 17]


# Evaluations, in `fit` and by `evaluate`.

RNG = np.random.default_rng(0)


class Energy(layers.Layer):
    """Its squares overflow float16 for rows of about 200."""

    def call(self, x):
        squares = ops.sum(x * x, -1, keepdims=True)
        both = x / ops.sqrt(squares), ops.log(squares + 1.0)
        return ops.concatenate(both, axis=-1)


def energies(jit=None):
    keras.utils.set_random_seed(0)
    rules = [kmp.PrecisionRule("head")]
    return dense(Energy(name="energy"), inputs=16, rules=rules, jit=jit)


def rows(count, bright=()):
    x = RNG.normal(size=(count, 16)).astype("float32") * 10
    x[list(bright)] = 200.0
    return x, np.ones((count, 1), "float32")


def validated(folder, validation, model, *others, **arguments):
    arguments = DEFAULTS | {"batch_size": 8, "epochs": 2} | arguments
    own = {"validation_data": validation}
    return watched(folder, rows(32), model, *others, **own, **arguments)


@pytest.mark.long
@each_jit
def test_a_layer_that_overflows_in_validation_alone_is_named(tmp_path, jit):
    done = validated(tmp_path, rows(40, (3, 37)), energies(jit))
    assert np.isfinite(done.history["loss"]).all()
    assert not np.isfinite(done.history["val_loss"]).any()
    (verdict,) = done.verdicts
    assert (verdict.kind, verdict.layer) == ("forward_overflow", "energy")
    assert verdict.numbers["rows_of_validation"] == [3, 37]
    (event,) = done.told("validation_not_finite")
    assert event["metrics"].keys() == {"loss"}
    assert "energy" in event["message"]


def test_the_tuner_repairs_it(tmp_path):
    repairing = tuner(bfloat16=False)
    done = validated(tmp_path, rows(40, (3, 37)), energies(), repairing)
    assert np.isfinite(done.history["val_loss"][1])
    assert repairing.plan["energy"] == "float32"


def test_rows_of_validation_that_are_not_finite_are_bad_data(tmp_path):
    x, y = rows(24)
    x[5, 2] = np.nan
    (verdict,) = validated(tmp_path, (x, y), energies()).verdicts
    assert verdict.kind == "bad_data"
    assert verdict.numbers["rows_of_validation"] == [5]


@each_jit
def test_evaluate_is_watched(tmp_path, jit):
    watcher = kmp.MixPrecMonitor(tmp_path, verbose=0)
    watching = {"verbose": 0, "callbacks": [watcher]}
    loss = energies(jit).evaluate(*rows(40, (35,)), **watching)
    assert not np.isfinite(loss)
    (verdict,) = watcher.verdicts
    assert verdict.layer == "energy"
    assert verdict.numbers["rows_of_evaluation"] == [35]
    assert told(tmp_path, "verdict")[0]["layer"] == "energy"


@keras.saving.register_keras_serializable("tests")
class Counted(keras.metrics.Metric):
    """Adds predictions one by one: float16 stays at 2,048."""

    def __init__(self, name="own", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        total = ops.zeros((), y_pred.dtype)
        for value in ops.unstack(ops.reshape(y_pred, (-1,)), 64):
            total = total + value
        self.total.assign(ops.cast(total, "float32"))

    def result(self):
        return self.total / 2.0**20


@pytest.mark.parametrize("first", [2048.0, 1.0])
def test_a_metric_that_float16_spoils_is_named(first, tmp_path):
    # 0.9 is less than half of the distance between 2,048 and the next number.
    x = np.array([[first], *[[0.9]] * 63], "float32")
    still = {"optimizer": keras.optimizers.SGD(0.0), "rules": []}
    model = dense(inputs=1, metrics=[Counted(), "mae"], **still)
    model.layers[-1].set_weights([np.ones((1, 1)), np.zeros(1)])
    own = DEFAULTS | {"validation_data": (x, 0 * x), "batch_size": 64}
    done = watched(tmp_path, (x, 0 * x), model, **own)
    named = [(v.kind, v.layer, v.numbers["metric"]) for v in done.verdicts]
    assert named == [("metric_error", None, "own")] * (first > 1)
    exact = (first + 0.9 * 63) / 2**20
    for verdict in done.verdicts:
        assert verdict.numbers["in_float32"] == pytest.approx(exact, rel=1e-5)
