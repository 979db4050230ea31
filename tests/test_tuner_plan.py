"""The plan that a tuner starts from and leaves behind."""

import json
import shutil

import keras
import pytest
import tuner_models as models
from monitor_models import each_jit, monitor, told
from tuner_models import BIG, CURE, GOOD, chain, demoted, done, fit, tuned

import keras_mixprec as kmp

Hooks = keras.callbacks.LambdaCallback
one_backend = pytest.mark.one_backend


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """The file of a plan that demotes `big` and `last`."""
    path = tmp_path_factory.mktemp("learned") / "plan.json"
    tuned([BIG] * 4, plan=path)
    return path


@pytest.fixture
def path(learned, tmp_path):
    """A copy of it."""
    return shutil.copy(learned, tmp_path / "plan.json")


@pytest.mark.long
@each_jit
def test_the_next_run_starts_from_what_was_learned(jit, path):
    content = json.loads(path.read_text())
    content["tuner"]["tries"]["big"] = 3
    path.write_text(json.dumps(content))
    model, callback = tuned([GOOD] * 4, model=chain(jit), plan=str(path))
    assert demoted(model) == CURE
    assert done(callback) == [("start", 0)]
    assert json.loads(path.read_text())["tuner"] == content["tuner"]
    # So does another model with the same callback.
    fit(other := chain(jit), [GOOD], callback)
    assert demoted(other) == CURE
    # The plan is handed on without the tuner.
    kmp.apply_policy(model := chain(), kmp.PrecisionPlan.load(path))
    assert demoted(model) == CURE
    # `first` overflows as well, and the only rebuild is used up.
    _, callback = tuned([1e5] * 4, plan=path, max_rebuilds=1)
    assert done(callback) == [("start", 0), ("give_up", 0)]
    assert "max_rebuilds=1" in callback.history[-1]["message"]


@one_backend
def test_a_plan_is_written_at_once_and_says_why(tmp_path):
    path, model, written = tmp_path / "plan.json", chain(), []
    rules = [kmp.PrecisionRule("first", "float32", "asked for")]
    kmp.apply_policy(model, "mixed_float16", rules=rules)

    def read(batch, logs):
        written.append(kmp.PrecisionPlan.load(path)["big"])

    values, reader = [GOOD] * 20 + [BIG] * 20, Hooks(on_train_batch_end=read)
    _, callback = tuned(values, reader, model=model, plan=path)
    plan, ((_, step),) = kmp.PrecisionPlan.load(path), done(callback)
    assert written[step - 1 : step + 1] == ["mixed_float16", "float32"]
    assert plan == callback.plan
    assert plan.reasons == callback.plan.reasons
    assert plan.reasons["big"].startswith("forward_overflow in 'big'")
    assert f"at step {step}" in plan.reasons["big"]
    assert plan.reasons["first"] == "asked for"


@one_backend
def test_a_path_that_cannot_be_written_stops_before_training(tmp_path):
    (tmp_path / "file").touch()
    model = chain()
    # Not even root can write to the last two.
    for path in "nowhere/plan.json", "x/..", "file/p.json", "/proc/p.json":
        with pytest.raises(OSError, match="Received: plan="):
            tuned([GOOD] * 4, model=model, plan=tmp_path / path)
    assert model.optimizer.iterations.numpy() == 0


@one_backend
def test_a_plan_that_cannot_be_written_any_more(tmp_path):
    path, watcher = tmp_path / "plans/plan.json", monitor(tmp_path / "logs")
    path.parent.mkdir()

    def fail(batch, logs):
        if batch == 15:
            shutil.rmtree(path.parent)
            path.parent.write_text("theirs")

    values, failing = [GOOD] * 20 + [BIG] * 20, Hooks(on_train_batch_begin=fail)
    with pytest.warns(UserWarning, match="cannot write the") as warned:
        model, callback = tuned(values, watcher, failing, plan=path)
    messages = [str(w.message) for w in warned if "plan" in str(w.message)]
    assert [m.count("\n") for m in messages] == [0]
    assert demoted(model) == CURE
    assert callback.plan["big"] == "float32"
    assert callback.plan.reasons["big"].startswith("forward_overflow")
    event, *_ = told(tmp_path / "logs", "plan_not_written")
    assert "Traceback" in event["details"]


# A plan that was made for another model, or another policy.


def widened(policy):
    kmp.apply_policy(model := chain(), policy, rules=[])
    return model


def dtypes(model):
    return {layer.compute_dtype for layer in model.layers}


@one_backend
def test_the_plan_of_a_float32_run_pins_nothing(tmp_path):
    path, watcher = tmp_path / "plan.json", monitor(tmp_path / "logs")
    tuned([GOOD] * 4, model=widened("float32"), plan=path)
    with pytest.warns(UserWarning, match="PrecisionTuner") as warned:
        model, _ = tuned([GOOD] * 4, watcher, plan=path)
    assert dtypes(model) == {"float16"}
    (event,) = told(tmp_path / "logs", "start")
    assert event["left_aside"].keys() >= {"first", "big", "last"}
    assert "float32" in event["left_aside"]["big"]
    messages = [str(w.message) for w in warned]
    (said,) = [m for m in messages if m.startswith("PrecisionTuner")]
    for name in (str(path), "'big'", "float32"):
        assert name in said
    # Now it is a plan of this run.
    _, callback = tuned([GOOD] * 4, plan=path)
    assert "left_aside" not in callback.history[0]


@one_backend
def test_another_policy_than_that_of_the_plan_wins_and_all_are_kept(path):
    contents = [path.read_text()]
    for policy in "float32", "mixed_bfloat16", "mixed_float16":
        model = widened(policy)
        with pytest.warns(UserWarning, match=f"then, {policy} now"):
            tuned([BIG] * 4, model=model, plan=path)
        contents.append(path.read_text())
        if policy != "mixed_float16":
            assert dtypes(model) == {policy.removeprefix("mixed_")}
    # A run that has lost its policy does not touch the plan.
    assert contents[0] == contents[1]
    assert path.with_suffix(".old.json").read_text() == contents[0]
    kept = [p.read_text() for p in path.parent.iterdir() if p != path]
    assert sorted(kept) == sorted(contents[1:3])


@one_backend
def test_of_another_model_the_entries_that_fit_are_used(path):
    # `chain` without `first`, and with a layer behind `last`.
    layers = [keras.Input((1,)), *chain().layers[1:], models.times(1.0, "new")]
    model = models.compiled(keras.Sequential(layers))
    with pytest.warns(UserWarning, match="'first'"):
        _, callback = tuned([GOOD] * 4, model=model, plan=path)
    assert demoted(model) == CURE
    assert callback.history[0]["left_aside"].keys() == {"first", "new"}
    assert callback.plan.reasons["big"].startswith("forward_overflow")
    # The script as it was, with the repair that it needs.
    with pytest.warns(UserWarning, match="'first'"):
        model, _ = tuned([GOOD] * 4, plan=path)
    assert demoted(model) == CURE
