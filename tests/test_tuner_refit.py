"""A model that is fitted again and again is audited as in one long `fit`."""

import gc
import weakref

import keras
import pytest
from monitor_models import BACKEND, monitor, tags
from tuner_models import CURE, chain, demoted, done, fit, tuner

import keras_mixprec as kmp
from keras_mixprec.diagnosis import in_training as examiner


@pytest.fixture
def audits(monkeypatch):
    """A list that gets the step of every diagnosis."""
    steps, examine = [], examiner.examine

    def counted(*args, step, **kwargs):
        steps.append(step)
        return examine(*args, step=step, **kwargs)

    monkeypatch.setattr(examiner, "examine", counted)
    return steps


def healthy():
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    layer = keras.layers.Dense(1, bias_initializer="ones")
    model = keras.Sequential([keras.Input((1,)), layer])
    compiled(model)
    return model


def compiled(model):
    model.compile(
        kmp.LossScaleOptimizer(keras.optimizers.SGD(1e-3)),
        loss="mse",
        jit_compile=BACKEND == "jax",
    )


def test_five_fits_are_audited_as_one_of_their_length(audits):
    model, callback = healthy(), tuner()
    for _ in range(5):
        fit(model, [1.0] * 6, callback)
    assert audits == [0, 16 - 2 * 6]


def test_beside_a_monitor_they_are_audited_as_often(audits, tmp_path):
    model = healthy()
    for _ in range(5):
        fit(model, [1.0] * 6, kmp.MixPrecMonitor(tmp_path, verbose=0), tuner())
    assert len(audits) == 2


def test_a_monitor_alone_audits_as_its_budget_allows(audits, tmp_path):
    model = healthy()
    for _ in range(5):
        fit(model, [1.0] * 6, kmp.MixPrecMonitor(tmp_path, verbose=0))
    assert audits == []


def set_weights(model):
    model.set_weights([w + 1 for w in model.get_weights()])


def set_dtypes(model):
    kmp.apply_policy(model, "mixed_bfloat16")


@pytest.mark.parametrize("change", [compiled, set_weights, set_dtypes])
def test_what_has_changed_is_audited_before_its_first_step(audits, change):
    model = healthy()
    fit(model, [1.0] * 2, tuner())
    change(model)
    fit(model, [1.0] * 2, tuner())
    assert audits == [0, 0]


def test_what_was_only_advised_is_found_again(audits):
    keras.config.set_dtype_policy("mixed_float16")
    layer = keras.layers.Dense(1, kernel_initializer="ones", name="big")
    model = keras.Sequential([keras.Input((1,)), layer])
    compiled(model)
    fit(model, [1e5], tuner(dry_run=True))
    callback = tuner()
    fit(model, [1e5], callback)
    assert [e["kind"] for e in callback.history] == ["demote"]


def test_a_new_log_has_the_errors_of_the_last_audit(tmp_path):
    model = healthy()
    for name in "ab":
        watcher = kmp.MixPrecMonitor(tmp_path / name, verbose=0)
        fit(model, [1.0] * 2, watcher, tuner())
    assert "error_against_float32/00000" in tags(tmp_path / "b")


GOOD, BIG = 1.0, 1000.0


@pytest.mark.parametrize("new_callback", [True, False])
def test_a_later_fit_knows_what_was_demoted_and_why(new_callback):
    model, callback = chain(), tuner(max_rebuilds=1)
    fit(model, [BIG] * 4, callback)
    reasons = callback.plan.reasons
    again = tuner(max_rebuilds=1) if new_callback else callback
    fit(model, [GOOD] * 4, again)
    assert again.plan.reasons == reasons
    assert reasons.keys() == CURE.keys()
    # The only rebuild is used up.
    model.set_weights(model.get_weights())
    fit(model, [1e5] * 8, again)
    kinds = [e["kind"] for e in again.history]
    assert kinds == [*["demote"] * (not new_callback), "give_up"]
    assert "max_rebuilds=1" in again.history[-1]["message"]


def test_a_demoted_layer_returns_after_quiet_steps_of_several_fits():
    model, callback = chain(), tuner(promote_after=30, cooldown=5)
    fit(model, [BIG] * 4, callback)
    for _ in range(2):
        fit(model, [GOOD] * 10, callback)
    assert demoted(model) == CURE
    for _ in range(2):
        fit(model, [GOOD] * 10, callback)
    assert demoted(model) == {}
    assert len(done(callback, "promote")) == 1


def test_what_the_user_sets_between_two_fits_is_no_demotion():
    model, callback = chain(), tuner(promote_after=10, cooldown=5)
    fit(model, [BIG] * 4, callback)
    kmp.apply_policy(model, "mixed_bfloat16", rules=[])
    for _ in range(3):
        fit(model, [GOOD] * 10, callback)
    assert set(demoted(model).values()) == {"mixed_bfloat16"}
    assert callback.plan.reasons == {}


def test_nothing_is_held_for_a_model_that_is_gone():
    model, callback = chain(), tuner()
    fit(model, [BIG] * 4, callback)
    reference = weakref.ref(model)
    callback.set_model(None)
    del model, callback
    # What the first one finalizes lets go of the rest.
    gc.collect()
    gc.collect()
    assert reference() is None


def test_a_second_fit_is_told_of_by_itself(tmp_path):
    model, callback = chain(), tuner(tmp_path / "plan.json")
    watcher = monitor(tmp_path / "logs")
    for _ in range(3):
        fit(model, [BIG] * 4, watcher, callback)
    assert [e["kind"] for e in callback.history] == ["demote", "start"]
    said = str(watcher.report)
    assert "In the last of 3 fits the tuner watched" in " ".join(said.split())
    assert "The tuner watched" not in said
