"""The plan that a tuner starts from and leaves behind."""

import json

import keras
import pytest
from monitor_models import each_jit
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
    assert "would change" in advice["message"]


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
    "another model's": json.dumps(
        {
            "format": "keras_mixprec.plan",
            "version": 1,
            "layers": [{"path": "conv", "policy": "float32"}],
        }
    ),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_plan_that_does_not_fit_stops_before_training(content, tmp_path):
    path, model = tmp_path / "plan.json", chain()
    path.write_text(content)
    with pytest.raises(ValueError, match="Received|unknown path 'conv'"):
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
