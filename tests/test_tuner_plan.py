"""The plan that a tuner starts from and leaves behind."""

import contextlib
import json
import os
import shutil
import warnings

import keras
import pytest
import tuner_models as models
from full_disk import full, small_disk
from monitor_models import each_jit, monitor, told
from tuner_models import (
    BIG,
    CURE,
    GOOD,
    chain,
    demoted,
    done,
    fit,
    tuned,
    tuner,
)

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


def at_step(step, work):
    """A callback that does something before one step."""
    return Hooks(on_train_batch_begin=lambda n, logs: n == step and work())


@each_jit
def test_the_next_run_starts_from_what_was_learned(jit, path):
    model, callback = tuned([GOOD] * 4, model=chain(jit), plan=str(path))
    assert demoted(model) == CURE
    assert done(callback) == [("start", 0)]
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
def test_a_damaged_sign_off_is_refused(path):
    content = json.loads(path.read_text())
    content["tuner"]["sign_off"] = {"within": "yes"}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="damaged.*Received: sign_off="):
        tuned([GOOD] * 4, plan=path)


@one_backend
def test_a_path_that_cannot_be_written_stops_before_training(tmp_path):
    model, file = chain(), tmp_path / "file"
    file.touch()
    # Not even root can write to the last two.
    for path in (
        tmp_path / "nowhere" / "plan.json",
        tmp_path / "x" / "..",
        file / "plan.json",
        "/proc/plan.json",
    ):
        with pytest.raises(OSError, match="Received: plan="):
            tuned([GOOD] * 4, model=model, plan=path)
    assert model.optimizer.iterations.numpy() == 0


@one_backend
@pytest.mark.parametrize("fault", ["full disk", "file there"])
def test_a_plan_that_cannot_be_written_any_more(fault, tmp_path):
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(small_disk(tmp_path))
        path, watcher = disk / "plans/plan.json", monitor(tmp_path / "logs")
        path.parent.mkdir()
        filled = full(disk)

        def fail():
            if fault == "full disk":
                return filled.__enter__()
            shutil.rmtree(path.parent)
            return path.parent.write_text("theirs")

        values = [GOOD] * 20 + [BIG] * 20
        with pytest.warns(UserWarning, match="cannot write the") as warned:
            model, callback = tuned(
                values, watcher, at_step(15, fail), plan=path
            )
        messages = [str(w.message) for w in warned if "plan" in str(w.message)]
        assert [m.count("\n") for m in messages] == [0]
        assert demoted(model) == CURE
        assert callback.plan["big"] == "float32"
        assert callback.plan.reasons["big"].startswith("forward_overflow")
        event, *_ = told(tmp_path / "logs", "plan_not_written")
        assert "Traceback" in event["details"]
        if fault == "full disk":
            filled.__exit__(None, None, None)
            assert kmp.PrecisionPlan.load(path)["big"] == "mixed_float16"
            assert os.listdir(path.parent) == ["plan.json"]


@one_backend
def test_a_removed_folder_is_made_again_where_it_was(tmp_path, monkeypatch):
    start, other = tmp_path / "start", tmp_path / "other"
    for folder in start / "plans", other:
        folder.mkdir(parents=True)
    monkeypatch.chdir(start)
    watcher, callback = monitor("logs"), tuner("plans/plan.json")

    def remove():
        shutil.rmtree("plans")
        os.chdir(other)

    fit(chain(), [GOOD] * 4 + [BIG] * 8, watcher, callback, at_step(2, remove))
    assert os.listdir(other) == []
    assert sorted(os.listdir(start)) == ["logs", "plans"]
    assert kmp.PrecisionPlan.load(start / "plans/plan.json") == callback.plan
    assert callback.plan["big"] == "float32"
    assert watcher.report.to_dict()


# A plan that was made for another model, or another policy.


def widened(policy):
    kmp.apply_policy(model := chain(), policy, rules=[])
    return model


def dtypes(model):
    return {layer.compute_dtype for layer in model.layers}


@one_backend
@pytest.mark.parametrize("verbose", [0, 1])
def test_the_plan_of_a_float32_run_pins_nothing(verbose, tmp_path, capsys):
    path, watcher = tmp_path / "plan.json", monitor(tmp_path / "logs")
    tuned([GOOD] * 4, model=widened("float32"), plan=path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model, _ = tuned([GOOD] * 4, watcher, plan=path, verbose=verbose)
    assert dtypes(model) == {"float16"}
    (event,) = told(tmp_path / "logs", "start")
    assert event["left_aside"].keys() >= {"first", "big", "last"}
    assert "float32" in event["left_aside"]["big"]
    # It is printed, or else warned of.
    said = capsys.readouterr().out.replace("\n", "")
    if not verbose:
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


@pytest.mark.parametrize("script", ["mixed_float16", "float32"])
def test_a_saved_model_goes_on_with_its_plan(script, tmp_path):
    path, model = tmp_path / "plan.json", chain()
    rules = [kmp.PrecisionRule("first", "mixed_bfloat16", "asked for")]
    kmp.apply_policy(model, "mixed_float16", rules=rules)
    tuned([BIG] * 4, model=model, plan=path)
    model.save(tmp_path / "model.keras")
    before = json.loads(path.read_text())
    keras.config.set_dtype_policy(script)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    _, callback = tuned([GOOD] * 4, model=loaded, plan=path)
    assert demoted(loaded) == CURE | {"first": "mixed_bfloat16"}
    assert all("left_aside" not in event for event in callback.history)
    assert json.loads(path.read_text()) == before
    assert sorted(os.listdir(tmp_path)) == ["model.keras", "plan.json"]


def changed():
    """`chain` of which `first` computes in bfloat16."""
    model = keras.models.clone_model(chain())
    model.get_layer("first").dtype_policy = "mixed_bfloat16"
    return models.compiled(model), {"first": "mixed_bfloat16"}, {"first"}


def edited():
    """`chain` without `first`, and with a layer behind `last`."""
    layers = [keras.Input((1,)), *chain().layers[1:], models.times(1.0, "new")]
    return models.compiled(keras.Sequential(layers)), {}, {"first", "new"}


@one_backend
@pytest.mark.parametrize("build", [changed, edited])
def test_of_another_model_the_entries_that_fit_are_used(build, path):
    model, own, aside = build()
    with pytest.warns(UserWarning, match="'first'"):
        _, callback = tuned([GOOD] * 4, model=model, plan=path)
    assert demoted(model) == CURE | own
    assert callback.history[0]["left_aside"].keys() == aside
    assert callback.plan.reasons["big"].startswith("forward_overflow")
    # The script as it was, with the repair that it needs.
    with pytest.warns(UserWarning, match="'first'"):
        model, _ = tuned([GOOD] * 4, plan=path)
    assert demoted(model) == CURE


@one_backend
def test_a_plan_made_by_hand_is_followed_in_every_run(tmp_path):
    path, asked = tmp_path / "plan.json", CURE | {"first": "mixed_bfloat16"}
    kmp.PrecisionPlan(asked, "mixed_float16").save(path)
    for _ in range(3):
        model, callback = tuned([GOOD] * 4, plan=path)
        assert demoted(model) == asked
        assert "which sets" in callback.history[0]["message"]
