"""Policies are compared by what a plain `fit` under each would do."""

import math
import random
import time

import comparison_models as models
import keras
import numpy as np
import pytest

import keras_mixprec as kmp
from keras_mixprec.analysis.comparison.batches import read_batches
from keras_mixprec.analysis.comparison.result import ComparisonResult

# A plain `fit` under it says so, where 16 bits bring no speed.
pytestmark = pytest.mark.filterwarnings("ignore:The policy:UserWarning")

BACKEND = keras.backend.backend()
SHORT = {"steps": 8, "blocks": 2, "batch_size": models.BATCH, "verbose": 0}


def compare(build=models.dense, data=None, policies=("float32",), **arguments):
    data = models.arrays() if data is None else data
    arguments = {"seeds": 1, **SHORT, **arguments}
    result = kmp.compare_precisions(build, data, policies, **arguments)
    return result.to_dict()["record"]


def plain_fit(build, data, policy, seed=0, epochs=2):
    keras.utils.set_random_seed(seed)
    with kmp.policy_scope(policy):
        model = build()
    return model.fit(
        *data, models.BATCH, epochs, shuffle=False, verbose=0
    ).history["loss"]


def losses(record):
    return {
        arm["name"]: [seed["losses"] for seed in arm["seeds"]]
        for arm in record["arms"]
    }


def test_losses_are_those_of_a_plain_fit_under_each_policy():
    policies = "float32", "mixed_bfloat16", "mixed_float16"
    found = losses(compare(policies=policies, seeds=[7]))
    expected = {
        policy: [plain_fit(models.dense, models.arrays(), policy, seed=7)]
        for policy in policies
    }
    assert found == expected
    assert found["float32"] != found["mixed_bfloat16"]


@pytest.mark.parametrize(
    ("build", "data"),
    [
        (models.several_steps_at_a_time, models.arrays),
        (models.unbuilt, models.arrays),
        (models.two_inputs, models.two_arrays),
        (models.own_step, models.arrays),
    ],
    ids=lambda function: function.__name__,
)
def test_any_model_trains_as_by_itself(build, data):
    (arm,) = compare(build, data(), ["mixed_bfloat16"])["arms"]
    assert arm["error"] is None
    expected = plain_fit(build, data(), "mixed_bfloat16")
    assert arm["seeds"][0]["losses"] == expected


def test_a_plan_is_followed_and_timed():
    with kmp.policy_scope("mixed_bfloat16"):
        plan = kmp.PrecisionPlan.from_model(models.dense())
    record = compare(policies=["mixed_bfloat16", plan], steps=16, blocks=4)
    same, arm = record["arms"]
    assert arm["policy"]["layers"] == dict(plan)
    assert arm["seeds"][0]["losses"] == same["seeds"][0]["losses"]
    assert len(arm["step_seconds"]) == 3
    assert min(arm["step_seconds"]) > 0
    assert arm["compile_seconds"] >= 0
    assert arm["share_of_flops_16bit"] == 1.0


def test_what_fails_is_a_row_with_a_reason():
    policies = "float32", "float32+bfloat16_3x"
    first, failed = compare(policies=policies)["arms"]
    assert (first["status"], failed["status"]) == ("done", "failed")
    assert "bfloat16_3x" in failed["error"]
    assert not failed["seeds"]


def test_skipped_steps_and_the_time_they_took_are_counted():
    fixed, preset = compare(
        policies=["mixed_float16"], loss_scales=[2.0**100, "torch"]
    )["arms"]
    assert fixed["name"] == f"mixed_float16, loss scale {2.0**100:g}"
    (seed,) = fixed["seeds"]
    assert seed["skipped_steps"] == 8
    assert seed["seconds_lost"] == pytest.approx(8 * fixed["step_seconds"][0])
    assert preset["seeds"][0]["skipped_steps"] < 8
    assert preset["loss_scale"] == "torch"


def test_a_policy_set_inside_of_build_gives_way():
    policies = "float32", "mixed_bfloat16"
    arms = compare(models.sets_the_policy, policies=policies)["arms"]
    assert [a["share_of_flops_16bit"] > 0.5 for a in arms] == [False, True]
    assert "sets the global policy" in arms[1]["notes"][0]


def test_monitor_and_tuner_are_timed_and_change_nothing():
    policies = "mixed_bfloat16", "mixed_bfloat16+monitor+tuner"
    without, arm = compare(policies=policies)["arms"]
    assert arm["error"] is None
    assert arm["callbacks"] == ["MixPrecMonitor", "PrecisionTuner"]
    assert losses({"arms": [arm]}).popitem()[1] == [
        without["seeds"][0]["losses"]
    ]


def test_random_numbers_of_the_caller_go_on_as_before():
    random.seed(1), np.random.seed(1)
    expected = random.random(), np.random.uniform()
    random.seed(1), np.random.seed(1)
    compare()
    assert (random.random(), np.random.uniform()) == expected
    assert keras.config.dtype_policy().name == "float32"


class Counted(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.x, self.y = models.arrays()

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = slice(index * models.BATCH, (index + 1) * models.BATCH)
        return self.x[rows], self.y[rows]


def of_the_backend():
    x, y = models.arrays()
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((x, y)).batch(models.BATCH)
    if BACKEND == "torch":
        import torch

        data = torch.utils.data.TensorDataset(*map(torch.tensor, (x, y)))
        return torch.utils.data.DataLoader(data, models.BATCH)
    return ((x[i : i + 8], y[i : i + 8]) for i in range(0, 32, 8))


def test_all_kinds_of_data_are_the_same_batches():
    x, y = models.arrays()
    kinds = [(x, y), lambda: (x, y), Counted(), Counted, of_the_backend()]
    kinds += [list(Counted()), "comparison_models:arrays"]
    found = [read_batches("data", kind, models.BATCH) for kind in kinds]
    assert len({batches.digest() for batches in found}) == 1
    # Without dropout, whose generator torch's loaders draw from as well.
    for data in of_the_backend(), Counted:
        expected = plain_fit(models.unbuilt, (x, y), "float32")
        assert losses(compare(models.unbuilt, data))["float32"] == [expected]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's own")
def test_the_graph_rewrite_is_an_arm():
    policies = "float32", "float32+graph_rewrite_bfloat16"
    plain, arm = compare(policies=policies, steps=16, blocks=4)["arms"]
    expected = plain_fit(models.dense, models.arrays(), "float32", epochs=4)
    assert plain["seeds"][0]["losses"] == expected
    if arm["error"] is None:
        assert arm["seeds"][0]["losses"] != expected
        assert "products" in arm["notes"][0]
    else:
        assert "does not rewrite graphs to bfloat16" in arm["error"]


WRONG = {
    "`policies` must be one of": {"policies": ["float33"]},
    "`policies` must be a list": {"policies": 5},
    "at least one": {"policies": []},
    "must be one of 'float32', 'bfloat16_3x'": {"policies": ["float32+fast"]},
    "name plans by a dict": {"policies": ["float32", "float32"]},
    "none of `policies` does": {"loss_scales": ["torch"]},
    "or presets": {"loss_scales": ["peach"], "policies": ["float16"]},
    "multiple of `blocks`": {"steps": 7},
    "`blocks` must be at least 2": {"blocks": 1},
    "`seeds` must be": {"seeds": 0},
    "list of different": {"seeds": [1, 1]},
    "`tolerance` must be": {"tolerance": -0.1},
    "check its spelling, or give `mode`": {"metric": "quality"},
    "`metric` must be the name": {"metric": 3},
    "`mode` must be one of": {"mode": "up"},
    "`build` must be a function": {"build": 3},
    "'module:name'": {"build": "models"},
    "cannot be imported": {"build": "comparison_models:nothing"},
    "`data` must be arrays": {"data": 5},
    "at least one batch": {"data": []},
    "same number of samples": {"data": (np.ones((4, 6)), np.ones((3, 1)))},
    "With `isolate=True`": {"isolate": True, "build": lambda: models.dense()},
    "`batch_size` must be at least 1": {"batch_size": 0},
    "`tokens_per_sample` must be": {"tokens_per_sample": 0.5},
    "`callbacks` must be a function": {"callbacks": []},
    "`callbacks` must return a list": {"callbacks": lambda: 3},
    "or 'module:name' of one. Received: build=<Seq": {"build": models.dense()},
    "`build` must return a compiled `keras.Model`": {"build": lambda: 3},
    "`build` must return a compiled model: call": {"build": keras.Sequential},
    "`metric` must return a number": {
        "metric": lambda m: "good",
        "mode": "min",
    },
    "must be a tuple, `(x, y)`": {"data": list(models.arrays())},
    "`data` has no targets": {"data": models.arrays()[0]},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_calls_say_what_is_wrong(message):
    with pytest.raises((TypeError, ValueError)) as caught:
        compare(**WRONG[message])
    assert message in str(caught.value)
    assert "Received: " in str(caught.value)


def test_a_metric_that_is_not_there_is_named_before_all_is_trained():
    epochs = []

    def callbacks():
        count = lambda epoch, logs: epochs.append(epoch)  # noqa: E731
        return [keras.callbacks.LambdaCallback(on_epoch_end=count)]

    with pytest.raises(ValueError, match="one of 'loss', 'mae'"):
        compare(metric="accuracy", callbacks=callbacks)
    assert epochs == [0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_is_worse_with_any_number_of_seeds(value):
    def metric(model):
        return 1.0 if model.dtype_policy.name == "float32" else value

    policies = "float32", "mixed_bfloat16"
    options = {"policies": policies, "metric": metric, "mode": "max"}
    result = ComparisonResult(compare(**options, seeds=2))
    assert [row["verdict"] for row in result.rows] == ["reference", "worse"]
    assert "not finite with 2 of 2 seeds" in str(result)


class Kept(kmp.MixPrecMonitor):
    def on_train_begin(self, logs=None):
        self.wall = time.perf_counter()
        super().on_train_begin(logs)

    def on_train_end(self, logs=None):
        self.wall = time.perf_counter() - self.wall
        self.trained = self._session.budget.trained
        super().on_train_end(logs)


class Slow(keras.callbacks.Callback):
    slept = 0.0

    def on_epoch_end(self, epoch, logs=None):
        if keras.config.dtype_policy().name != "float32":
            time.sleep(1.0)
            self.slept += 1.0


def test_a_monitor_does_not_take_the_pauses_for_training(tmp_path):
    made = []

    def callbacks():
        made.append((Kept(tmp_path / str(len(made)), verbose=0), Slow()))
        return made[-1]

    compare(policies=["float32", "mixed_bfloat16"], callbacks=callbacks)
    (first, _), (_, other) = made[:2]
    assert other.slept >= 2
    # The first one has paused at least while the other one slept.
    assert first.trained < first.wall - other.slept
