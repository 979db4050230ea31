"""The plan that a tuner starts from and leaves behind."""

import json
import os
import shutil
import warnings

import keras
import pytest
from full_disk import full, small_disk
from monitor_models import each_jit, monitor, told
from tuner_models import CURE, chain, demoted, done, fit, tuner

import keras_mixprec as kmp

GOOD, BIG = 1.0, 1000.0


@each_jit
def test_the_next_run_starts_from_what_was_learned(jit, tmp_path):
    path = tmp_path / "plan.json"
    fit(chain(jit), [BIG] * 4, tuner(path))
    model, callback = chain(jit), tuner(str(path))
    fit(model, [GOOD] * 4, callback)
    assert demoted(model) == CURE
    assert [e["kind"] for e in callback.history] == ["start"]


def test_a_plan_says_why(tmp_path):
    path = tmp_path / "plan.json"
    callback = tuner(path)
    fit(chain(), [GOOD] * 20 + [BIG] * 20, callback)
    plan = kmp.PrecisionPlan.load(path)
    assert plan == callback.plan
    assert plan.reasons == callback.plan.reasons
    (step,) = done(callback)
    assert plan.reasons["big"].startswith("forward_overflow in 'big'")
    assert f"at step {step}" in plan.reasons["big"]


def test_a_plan_keeps_the_reasons_of_rules(tmp_path):
    model = chain()
    rules = [kmp.PrecisionRule("first", "float32", "it is the first")]
    kmp.apply_policy(model, "mixed_float16", rules=rules)
    callback = tuner(tmp_path / "plan.json")
    fit(model, [GOOD] * 4 + [BIG] * 20, callback)
    assert callback.plan.reasons["first"] == "it is the first"
    assert callback.plan.reasons["big"].startswith("forward_overflow in 'big'")


def test_a_plan_is_handed_on_without_the_tuner(tmp_path):
    path = tmp_path / "plan.json"
    fit(chain(), [BIG] * 4, tuner(path))
    model = chain()
    kmp.apply_policy(model, kmp.PrecisionPlan.load(path))
    assert demoted(model) == CURE


def test_a_plan_is_written_at_once_when_something_changes(tmp_path):
    path = tmp_path / "plan.json"

    class Killed(Exception):
        pass

    def kill(batch, logs):
        if callback.history:
            raise Killed

    callback = tuner(path)
    killer = keras.callbacks.LambdaCallback(on_train_batch_begin=kill)
    with pytest.raises(Killed):
        fit(chain(), [GOOD] * 20 + [BIG] * 20, callback, killer)
    assert kmp.PrecisionPlan.load(path)["big"] == "float32"


def test_a_run_goes_on_counting(tmp_path):
    path = tmp_path / "plan.json"
    fit(chain(), [BIG] * 4, tuner(path, max_rebuilds=1))
    callback = tuner(path, max_rebuilds=1)
    # `first` overflows as well, and the only rebuild is used up.
    fit(chain(), [1e5] * 4, callback)
    assert [e["kind"] for e in callback.history] == ["start", "give_up"]
    assert "max_rebuilds=1" in callback.history[-1]["message"]


def test_a_dry_run_reads_and_writes_no_plan(tmp_path):
    path, model = tmp_path / "plan.json", chain()
    callback = tuner(path, dry_run=True)
    fit(model, [BIG] * 60, callback)
    assert demoted(model) == {}
    assert not path.exists()
    (advice,) = callback.history
    assert advice["kind"] == "demote"
    assert {p: c["after"] for p, c in advice["layers"].items()} == CURE
    assert "would demote" in advice["message"]


BROKEN = {
    "truncated": '{"format": "keras_mixprec.plan", "version": 1, "lay',
    "not a plan": '{"hello": "world"}',
    "newer": '{"format": "keras_mixprec.plan", "version": 99, "layers": []}',
    "tuner": json.dumps(
        {
            "format": "keras_mixprec.plan",
            "version": 1,
            "default": "mixed_float16",
            "layers": [
                {"path": name, "policy": "mixed_float16"}
                for name in ("first", "big", "last")
            ],
            "tuner": {"demotions": {"big": {"before": 3}}},
        }
    ),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_plan_that_does_not_fit_stops_before_training(content, tmp_path):
    path, model = tmp_path / "plan.json", chain()
    path.write_text(content)
    with pytest.raises(ValueError, match="Received"):
        fit(model, [GOOD] * 4, tuner(path))
    assert path.read_text() == content
    assert model.optimizer.iterations.numpy() == 0
    assert demoted(model) == {}


def test_a_path_that_cannot_be_written_stops_before_training(tmp_path):
    model, file = chain(), tmp_path / "file"
    file.touch()
    for path in (
        tmp_path / "nowhere" / "plan.json",
        tmp_path / "x" / "..",
        # Not even root can write to these.
        file / "plan.json",
        "/proc/plan.json",
    ):
        with pytest.raises(OSError, match="Received: plan="):
            fit(model, [GOOD] * 4, tuner(path))
    assert model.optimizer.iterations.numpy() == 0


class AtStep(keras.callbacks.Callback):
    """Does something before one step."""

    def __init__(self, step, work):
        super().__init__()
        self.step, self.work = step, work

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self.step:
            self.work()


def in_its_place(folder):
    shutil.rmtree(folder)
    folder.write_text("theirs")


@each_jit
@pytest.mark.parametrize("fault", ["full disk", "file in the place"])
def test_a_plan_that_cannot_be_written_any_more(fault, jit, tmp_path):
    with small_disk(tmp_path) as disk:
        folder = disk / "plans"
        folder.mkdir()
        callback, model = tuner(folder / "plan.json"), chain(jit)
        nowhere = full(disk)
        fail = nowhere.__enter__
        if fault == "file in the place":
            fail = lambda: in_its_place(folder)  # noqa: E731
        watcher = monitor(tmp_path / "logs")
        faulty = AtStep(15, fail)
        with pytest.warns(UserWarning, match="cannot write the plan") as warned:
            fit(model, [GOOD] * 20 + [BIG] * 20, watcher, callback, faulty)
        told_of = [str(w.message) for w in warned if "plan" in str(w.message)]
        assert len(told_of) == 1
        assert "\n" not in told_of[0]
        assert demoted(model) == CURE
        assert callback.plan["big"] == "float32"
        assert callback.plan.reasons["big"].startswith("forward_overflow")
        event, *_ = told(tmp_path / "logs", "plan_not_written")
        assert "Traceback" in event["details"]
        if fault == "full disk":
            nowhere.__exit__(None, None, None)
            assert (
                kmp.PrecisionPlan.load(folder / "plan.json")["big"] != "float32"
            )
            assert os.listdir(folder) == ["plan.json"]


def test_a_removed_folder_of_a_plan_is_made_again(tmp_path):
    path = tmp_path / "plans" / "plan.json"
    path.parent.mkdir()
    callback = tuner(path)
    remove = AtStep(10, lambda: shutil.rmtree(path.parent))
    fit(chain(), [GOOD] * 20 + [BIG] * 20, callback, remove)
    assert kmp.PrecisionPlan.load(path) == callback.plan
    assert callback.plan["big"] == "float32"


def test_a_changed_working_folder_changes_no_path(tmp_path, monkeypatch):
    start, other = tmp_path / "start", tmp_path / "other"
    start.mkdir()
    other.mkdir()
    monkeypatch.chdir(start)
    watcher, callback = monitor("logs"), tuner("plan.json")
    move = AtStep(2, lambda: os.chdir(other))
    fit(chain(), [GOOD] * 4 + [BIG] * 4, watcher, callback, move)
    assert os.listdir(other) == []
    assert sorted(os.listdir(start)) == ["logs", "plan.json"]
    assert kmp.PrecisionPlan.load(start / "plan.json") == callback.plan
    assert callback.plan["big"] == "float32"
    assert watcher.report.to_dict()


def widened(model, policy):
    kmp.apply_policy(model, policy, rules=[])
    return model


def edited():
    """`chain` without `first`, and with a layer behind `last`."""
    old = chain()
    model = keras.Sequential(
        [keras.Input((1,)), *old.layers[1:], keras.layers.Dense(1, name="new")]
    )
    model.compile(kmp.LossScaleOptimizer("sgd"), "mae")
    return model


def dtypes(model):
    return {layer.compute_dtype for layer in model.layers}


@pytest.mark.parametrize("verbose", [0, 1])
def test_the_plan_of_a_float32_run_pins_nothing(verbose, tmp_path, capsys):
    path, model = tmp_path / "plan.json", chain()
    fit(widened(chain(), "float32"), [GOOD] * 4, tuner(path))
    callback = tuner(path, verbose=verbose)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fit(model, [GOOD] * 4, monitor(tmp_path / "logs"), callback)
    said = capsys.readouterr().out
    if not verbose:
        messages = [str(w.message) for w in warned]
        (said,) = [m for m in messages if m.startswith("PrecisionTuner")]
    assert dtypes(model) == {"float16"}
    (event,) = told(tmp_path / "logs", "start")
    assert event["left_aside"].keys() >= {"first", "big", "last"}
    assert "float32" in event["left_aside"]["big"]
    for name in (str(path), "'big'", "float32"):
        assert name in said.replace("\n", "")
    # Now it is a plan of this run.
    fit(chain(), [GOOD] * 4, again := tuner(path))
    assert "left_aside" not in again.history[0]


def test_a_run_that_lost_its_policy_keeps_the_plan(tmp_path):
    path = tmp_path / "plan.json"
    fit(chain(), [BIG] * 4, tuner(path))
    content = path.read_text()
    lost = widened(chain(), "float32")
    with pytest.warns(UserWarning, match="mixed_float16 then, float32 now"):
        fit(lost, [GOOD] * 4, tuner(path))
    assert dtypes(lost) == {"float32"}
    assert path.read_text() == content
    model = chain()
    fit(model, [GOOD] * 4, tuner(path))
    assert demoted(model) == CURE


@pytest.mark.parametrize("script", ["mixed_float16", "float32"])
def test_a_saved_model_goes_on_with_its_plan(script, tmp_path):
    path, model = tmp_path / "plan.json", chain()
    kmp.apply_policy(
        model,
        "mixed_float16",
        rules=[kmp.PrecisionRule("first", "mixed_bfloat16", "it is the first")],
    )
    fit(model, [BIG] * 4, tuner(path))
    model.save(tmp_path / "model.keras")
    before = json.loads(path.read_text())
    keras.config.set_dtype_policy(script)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    fit(loaded, [GOOD] * 4, callback := tuner(path))
    assert demoted(loaded) == CURE | {"first": "mixed_bfloat16"}
    assert all("left_aside" not in event for event in callback.history)
    assert json.loads(path.read_text()) == before
    assert sorted(os.listdir(tmp_path)) == ["model.keras", "plan.json"]


def test_one_changed_layer_leaves_the_other_repairs(tmp_path):
    path, model = tmp_path / "plan.json", chain()
    fit(model, [BIG] * 4, tuner(path))
    loaded = keras.models.clone_model(model)
    loaded.get_layer("first").dtype_policy = "mixed_bfloat16"
    loaded.compile(kmp.LossScaleOptimizer("sgd"), "mae")
    with pytest.warns(UserWarning, match="'first'"):
        fit(loaded, [GOOD] * 4, callback := tuner(path))
    assert callback.history[0]["left_aside"].keys() == {"first"}
    assert callback.plan.reasons["big"].startswith("forward_overflow")
    # The script as it was, with the repair that it needs.
    with pytest.warns(UserWarning, match="'first'"):
        fit(model := chain(), [GOOD] * 4, tuner(path))
    assert demoted(model) == CURE


@pytest.mark.filterwarnings("ignore:PrecisionTuner does not start")
def test_every_plan_that_did_not_fit_is_kept(tmp_path):
    path, contents = tmp_path / "plan.json", []
    for policy in ("mixed_float16", "mixed_bfloat16", "mixed_float16"):
        fit(widened(chain(), policy), [BIG] * 4, tuner(path))
        contents.append(path.read_text())
    kept = [p.read_text() for p in tmp_path.iterdir() if p != path]
    assert sorted(kept) == sorted(contents[:2])


def test_another_policy_than_that_of_the_plan_wins(tmp_path):
    path, model = tmp_path / "plan.json", widened(chain(), "mixed_bfloat16")
    fit(chain(), [BIG] * 4, tuner(path))
    content = path.read_text()
    with pytest.warns(UserWarning, match="mixed_float16 then, mixed_bfloat16"):
        fit(model, [GOOD] * 4, tuner(path))
    assert dtypes(model) == {"bfloat16"}
    assert (tmp_path / "plan.old.json").read_text() == content


def test_of_an_edited_model_the_entries_that_fit_are_used(tmp_path):
    path, model = tmp_path / "plan.json", edited()
    fit(chain(), [BIG] * 4, tuner(path))
    with pytest.warns(UserWarning, match="'first'.*'new'"):
        fit(model, [GOOD] * 4, callback := tuner(path))
    assert demoted(model) == CURE
    assert callback.history[0]["left_aside"].keys() == {"first", "new"}
    assert callback.plan.reasons["big"].startswith("forward_overflow")


def test_a_plan_made_by_hand_is_followed_in_every_run(tmp_path):
    path = tmp_path / "plan.json"
    asked = {"first": "mixed_bfloat16", "big": "float32", "last": "float32"}
    kmp.PrecisionPlan(asked, "mixed_float16").save(path)
    for _ in range(3):
        model = chain()
        fit(model, [GOOD] * 4, callback := tuner(path))
        assert demoted(model) == asked
        assert "which sets" in callback.history[0]["message"]
