"""A comparison of policies gives the results of a plain `fit` under each."""

import random

import comparison_models as models
import keras
import numpy as np
import pytest

import keras_mixprec as kmp
from keras_mixprec.analysis.comparison.sources import read_batches
from keras_mixprec.analysis.resume import fingerprint

# A plain `fit` warns if 16 bits are no faster.
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:The policy:UserWarning"),
]

BACKEND = keras.backend.backend()
POLICIES = "float32", "mixed_bfloat16", "mixed_float16"


def compare(build=models.dense, data=None, policies=("float32",), **arguments):
    data = models.arrays() if data is None else data
    short = {"steps": 8, "blocks": 2, "batch_size": models.BATCH, "seeds": 1}
    arguments = {**short, "verbose": 0, **arguments}
    result = kmp.compare_precisions(build, data, policies, **arguments)
    return result.to_dict()["record"]


def plain_fit(build, data, policy, seed=0, epochs=2):
    keras.utils.set_random_seed(seed)
    with kmp.policy_scope(policy):
        model = build()
    return model.fit(
        *data, models.BATCH, epochs, shuffle=False, verbose=0
    ).history["loss"]


def losses(arm):
    (seed,) = arm["seeds"]
    return seed["losses"]


@pytest.fixture(scope="module")
def arms():
    """Returns the record of each policy by name, and the plan."""
    with kmp.policy_scope("mixed_bfloat16"):
        plan = kmp.PrecisionPlan.from_model(models.dense())
    policies = {name: name for name in POLICIES} | {
        "plan": plan,
        "watched": "mixed_bfloat16+monitor+tuner",
        "failing": "float32+bfloat16_3x",
    }
    random.seed(1), np.random.seed(1)
    expected = random.random(), np.random.uniform()
    random.seed(1), np.random.seed(1)
    record = compare(policies=policies, steps=16, blocks=4, seeds=[7])
    # Random numbers of the caller go on as before.
    assert (random.random(), np.random.uniform()) == expected
    assert keras.config.dtype_policy().name == "float32"
    return {arm["name"]: arm for arm in record["arms"]}, plan


@pytest.mark.parametrize("policy", POLICIES)
def test_losses_are_those_of_a_plain_fit_under_each_policy(arms, policy):
    data = models.arrays()
    expected = plain_fit(models.dense, data, policy, seed=7, epochs=4)
    assert losses(arms[0][policy]) == expected
    # Data repeat from epoch to epoch, and each policy rounds differently.
    others = [losses(arms[0][p]) for p in POLICIES if p != policy]
    assert expected not in others


def test_a_plan_is_followed_and_timed(arms):
    arm, same = arms[0]["plan"], arms[0]["mixed_bfloat16"]
    assert arm["policy"]["layers"] == dict(arms[1])
    assert losses(arm) == losses(same)
    (seed,) = arm["seeds"]
    assert len(seed["step_seconds"]) == 3
    assert min(seed["step_seconds"]) > 0
    assert seed["compile_seconds"] >= 0
    assert arm["share_of_flops_16bit"] == 1.0


def test_what_fails_is_a_row_with_a_reason(arms):
    assert arms[0]["float32"]["status"] == "done"
    failed = arms[0]["failing"]
    assert failed["status"] == "failed"
    assert "bfloat16_3x" in failed["error"]
    assert not failed["seeds"]


def test_monitor_and_tuner_are_timed_and_change_nothing(arms):
    arm = arms[0]["watched"]
    assert arm["error"] is None
    assert losses(arm) == losses(arms[0]["mixed_bfloat16"])


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("build", "data"),
    [(models.two_inputs, models.two_arrays), (models.own_step, models.arrays)],
    ids=lambda function: function.__name__,
)
def test_any_model_trains_as_by_itself(build, data):
    (arm,) = compare(build, data(), ["mixed_bfloat16"])["arms"]
    assert arm["error"] is None
    assert losses(arm) == plain_fit(build, data(), "mixed_bfloat16")


@pytest.mark.one_backend
def test_skipped_steps_and_the_time_they_took_are_counted():
    (arm,) = compare(models.skips, policies=["mixed_float16"])["arms"]
    (seed,) = arm["seeds"]
    assert seed["skipped_steps"] == 8
    assert seed["seconds_lost"] == pytest.approx(8 * seed["step_seconds"][0])


@pytest.mark.one_backend
@pytest.mark.parametrize("build", [models.dense, models.unbuilt])
def test_variables_of_16_bits_start_as_those_of_float32(build):
    def first_weights(model):
        return np.abs(model.get_weights()[0].astype("float64")).sum()

    given = {"policies": ["float32", "bfloat16"], "metric": first_weights}
    given |= {"mode": "min", "callbacks": lambda: [Frozen()]}
    exact, narrow = (arm["seeds"][0] for arm in compare(build, **given)["arms"])
    assert narrow["metric"] == pytest.approx(exact["metric"], rel=2**-8)


@pytest.mark.one_backend
def test_a_policy_set_inside_of_build_gives_way():
    arms = compare(models.sets_the_policy, policies=POLICIES[:2])["arms"]
    assert [a["share_of_flops_16bit"] > 0.5 for a in arms] == [False, True]
    assert "global policy" in arms[1]["notes"][0]


class Frozen(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.model.optimizer.learning_rate = 0.0


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
    assert len({fingerprint(batches.batches) for batches in found}) == 1
    # Without dropout, whose generator torch's loaders draw from as well.
    (arm,) = compare(models.unbuilt, of_the_backend())["arms"]
    assert losses(arm) == plain_fit(models.unbuilt, (x, y), "float32")


def uneven():
    return np.ones((4, 6)), np.ones((3, 1))


WRONG = {
    "one of 'loss', 'mae'": {"metric": "accuracy"},
    "'float32', 'bfloat16_3x'": {"policies": ["float32+fast"]},
    "Use a dict": {"policies": ["float32", "float32"]},
    "`tolerance` must": {"tolerance": -0.1},
    "number of samples": {"data": uneven()},
    "With `isolate=True`": {"isolate": True, "build": lambda: models.dense()},
    "`callbacks` must be": {"callbacks": []},
    "`metric` must return": {"metric": lambda m: "good", "mode": "min"},
    "`data` has no": {"data": models.arrays()[0]},
}


@pytest.mark.one_backend
@pytest.mark.parametrize("message", WRONG)
def test_wrong_calls_say_what_is_wrong(message):
    with pytest.raises((TypeError, ValueError)) as caught:
        compare(**WRONG[message])
    assert message in str(caught.value)
    assert "Received: " in str(caught.value)


class Kept(kmp.MixPrecMonitor):
    def on_train_end(self, logs=None):
        self.trained = self._session.watch.budget.trained
        super().on_train_end(logs)


@pytest.mark.one_backend
def test_a_monitor_does_not_take_the_pauses_for_training(tmp_path, clock):
    monitors = []

    class Slow(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if keras.config.dtype_policy().name != "float32":
                clock.wait(1.0)

    def callbacks():
        folder = tmp_path / str(len(monitors))
        monitors.append(Kept(folder, verbose=0))
        return [monitors[-1], Slow()]

    start = clock.now
    compare(policies=POLICIES[:2], callbacks=callbacks)
    assert clock.now - start >= 2
    # The first one has paused while the other one was slow.
    assert monitors[0].trained == 0
    assert monitors[1].trained > 0


@pytest.mark.one_backend
def test_what_others_hold_of_a_device_is_not_an_arms_memory(monkeypatch):
    memory = "keras_mixprec.devices.memory"
    record = {"peak_bytes": 175, "measured_by": "device", "weights_bytes": 10}
    record |= {"slots_bytes": 5, "activations_bytes": 160}
    monkeypatch.setattr(f"{memory}.peak_bytes", lambda: (100, "device"))
    monkeypatch.setattr(f"{memory}.reset_peak", lambda: True)
    monkeypatch.setattr(f"{memory}.memory_record", lambda *_: record)
    for arm in compare(policies=POLICIES[:2])["arms"]:
        assert arm["memory"]["peak_bytes"] == 75
        assert arm["memory"]["activations_bytes"] == 60
