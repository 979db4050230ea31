"""When the tuner diagnoses: in one `fit`, in several, beside a monitor."""

import gc
import weakref

import keras
import numpy as np
import pytest
from monitor_models import each_jit, monitor, tags, told
from tuner_models import (
    BIG,
    CURE,
    GOOD,
    chain,
    compiled,
    demoted,
    diagnosed,
    done,
    fit,
    kinds,
    tuner,
)
from zoo import cases

import keras_mixprec as kmp
from keras_mixprec.monitoring.audit_schedule import AuditSchedule


@pytest.fixture
def seen(monkeypatch, clock):
    """Step and rows of each diagnosis, all of which take no time."""
    return diagnosed(monkeypatch)


@pytest.fixture
def slow_diagnoses(monkeypatch, clock):
    """A callback by which steps take 2 ms, and diagnoses a second each."""
    diagnosed(monkeypatch, lambda: clock.wait(1.0))
    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: clock.wait(0.002)
    )


def steps(seen):
    return [step for step, _ in seen]


def zoo_case(name, *callbacks):
    (case,) = cases([name])
    model = case.model("mixed_float16", False)
    case.fit(model, callbacks=[*callbacks])
    return model


def test_audits_come_at_the_steps_that_the_documents_name(seen):
    fit(chain(), [GOOD] * 200, tuner())
    assert steps(seen) == [0, 16, 48, 192]


def test_diagnoses_of_a_run_that_diverges_wait_for_each_other(seen):
    zoo_case("learning_rate_too_high", tuner())
    # Three audits and false alarms. The first explains the skips before step
    # 8, since the scale had to fall, and three more.
    assert len(seen) <= 8
    assert steps(seen)[:2] == [0, 11]
    assert steps(seen)[2] > 11 + 100


def test_a_scale_search_that_is_explained_is_not_diagnosed_again(seen):
    zoo_case("initial_scale_too_high", callback := tuner())
    # 8 skips and more; the audits after 16 steps and 48 come all the same.
    assert steps(seen)[:2] == [0, 16]
    assert not callback.history


def test_a_scale_that_falls_further_than_explained_is_diagnosed(slow_diagnoses):
    """A fault of one batch in eight, behind a search for the loss scale."""
    model = zoo_case("calibrated_experts", tuner(), slow_diagnoses)
    # 184 on torch while only the time spent decided: until step 561 of 640.
    assert model.optimizer.skipped_steps < 40


def test_a_fault_behind_a_divergence_is_repaired(slow_diagnoses):
    values = [GOOD] + [1e38] * 30 + [GOOD] * 300 + [BIG] * 30
    fit(chain(), values, callback := tuner(), slow_diagnoses)
    (step,) = done(callback)
    assert 331 < step <= 331 + 8


def test_a_fault_that_begins_in_a_pause_is_diagnosed_after_it(
    tmp_path, monkeypatch, clock
):
    # No audit, which would find it as well if one is due by then.
    monkeypatch.setattr(AuditSchedule, "due", lambda self, taken: False)
    # Twice what float32 does not hold either, 128 steps of pause after each.
    values = [GOOD] * 20 + [1e38] * 6 + [GOOD] * 280 + [1e38] * 60
    watcher = monitor(tmp_path, max_overhead=1e-6)
    fit(model := chain(), values + [GOOD] * 60 + [BIG] * 300, tuner(), watcher)
    assert demoted(model) == CURE


BAD_DATA = [1.0, np.nan, np.nan, 1.0, np.nan, np.nan, 1.0] + [1.0] * 3


@pytest.mark.parametrize(
    ("before", "patience"),
    [
        ([GOOD] * 3, 3),
        # Bad data come to nothing twice: four bad steps are waited for.
        (BAD_DATA, 7),
    ],
    ids=["good", "bad data"],
)
def test_skips_in_a_row_are_diagnosed_at_once(before, patience, clock):
    fit(chain(), before + [BIG] * 8, callback := tuner())
    assert len(before) < done(callback)[0] <= len(before) + patience


def test_a_cooldown_is_waited_for(clock):
    model, callback = chain(), tuner(cooldown=30)
    # At 10 `big` and `last` fail, then `first` as well.
    fit(model, [GOOD] * 10 + [BIG] * 12 + [1e5] * 60, callback)
    first, second = done(callback, "demote")
    assert second >= first + 30
    assert set(demoted(model)) == {"first", "big", "last"}


def test_it_does_not_wait_when_the_first_repair_was_not_enough(clock):
    model, callback = chain(), tuner(cooldown=1000, promote_after=0)
    # `first` does not fail on the batch that is diagnosed at the start.
    fit(model, [BIG] + [1e5] * 30, callback)
    assert set(demoted(model)) == {"first", "big", "last"}


def test_a_dry_run_advises_once_and_changes_nothing(seen, tmp_path):
    path, model = tmp_path / "plan.json", chain()
    callback = tuner(path, dry_run=True)
    fit(model, [BIG] * 60, callback, monitor(tmp_path / "logs"))
    # Twice as many steps are waited for each time; it was 29 times.
    assert len(seen) <= 8
    assert demoted(model) == {}
    assert not path.exists()
    (advice,), (event,) = callback.history, told(tmp_path / "logs", "demote")
    assert (advice["kind"], advice["dry_run"]) == ("demote", True)
    assert {p: c["after"] for p, c in advice["layers"].items()} == CURE
    assert event["layers"] == advice["layers"]
    # What was only advised is found again.
    fit(model, [BIG], callback := tuner())
    assert kinds(callback) == ["demote"]


# Several calls of `fit` are as one long one.


def healthy():
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    layer = keras.layers.Dense(1, bias_initializer="ones")
    model = keras.Sequential([keras.Input((1,)), layer])
    return compiled(model, 1e-3, loss="mse", scale=None)


def watching(folder):
    return kmp.MixPrecMonitor(folder, verbose=0)


@pytest.mark.parametrize(
    ("callbacks", "audits"),
    [
        (lambda folder: [tuner()], [0, 16 - 2 * 6]),
        (lambda folder: [watching(folder), tuner()], [0, 16]),
        # A monitor audits as its budget allows.
        (lambda folder: [watching(folder)], []),
    ],
    ids=["tuner", "both", "monitor"],
)
def test_five_fits_are_audited_as_one(callbacks, audits, seen, tmp_path):
    model = healthy()
    for _ in range(5):
        fit(model, [GOOD] * 6, *callbacks(tmp_path))
    assert steps(seen) == audits


@pytest.mark.parametrize(
    "change",
    [
        lambda model: compiled(model),
        lambda model: model.set_weights([w + 1 for w in model.get_weights()]),
        lambda model: kmp.apply_policy(model, "mixed_bfloat16"),
    ],
    ids=["compiled", "weights", "dtypes"],
)
def test_what_has_changed_is_audited_before_its_first_step(change, seen):
    model = healthy()
    fit(model, [GOOD] * 2, tuner())
    change(model)
    fit(model, [GOOD] * 2, tuner())
    assert steps(seen) == [0, 0]


@pytest.mark.parametrize("new_callback", [True, False])
def test_a_later_fit_knows_what_was_demoted_and_why(new_callback, tmp_path):
    model, callback = chain(), tuner(max_rebuilds=1)
    watcher = monitor(tmp_path)
    fit(model, [BIG] * 4, watcher, callback)
    reasons = callback.plan.reasons
    again = tuner(max_rebuilds=1) if new_callback else callback
    for _ in range(2):
        fit(model, [GOOD] * 4, watcher, again)
    assert again.plan.reasons == reasons
    assert reasons.keys() == CURE.keys()
    said = " ".join(str(watcher.report).split())
    assert "of 3 fits" in said
    assert "The tuner watched" not in said
    # The only rebuild is used up.
    model.set_weights(model.get_weights())
    fit(model, [1e5] * 8, again)
    assert kinds(again) == [*["demote"] * (not new_callback), "give_up"]
    assert "max_rebuilds=1" in again.history[-1]["message"]


def test_a_demoted_layer_returns_after_quiet_steps_of_several_fits():
    model, callback = chain(), tuner(promote_after=30, cooldown=5)
    fit(model, [BIG] * 4, callback)
    for expected in CURE, {}:
        for _ in range(2):
            fit(model, [GOOD] * 10, callback)
        assert demoted(model) == expected
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


# Beside a monitor: one engine, one diagnosis, one log.

each_order = pytest.mark.parametrize(
    "order", [lambda c: c, lambda c: c[::-1]], ids=["first", "last"]
)


@each_order
def test_both_share_one_diagnosis_and_one_log(order, seen, clock, tmp_path):
    watcher, callback = monitor(tmp_path), tuner()
    tick = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: clock.wait(0.25)
    )
    model = chain()
    fit(model, [GOOD] * 20 + [BIG] * 20, *order([callback, watcher]), tick)
    assert demoted(model) == CURE
    (change,) = callback.history
    # The first two audits, and when the first bad batch was seen.
    assert steps(seen) == [0, 16, change["step"]]
    found = {v.kind for v in watcher.verdicts}
    assert found == {"forward_overflow", "cast_overflow"}
    (event,), (cost,) = told(tmp_path, "demote"), told(tmp_path, "rebuild")
    assert event["step"] == change["step"]
    expected = {"before": "mixed_float16", "after": "float32"}
    assert event["layers"]["big"] == expected
    assert cost["seconds"] == change["seconds"] == 0.25


@each_order
@each_jit
def test_together_they_change_nothing_in_a_healthy_run(jit, order, tmp_path):
    def weights(*callbacks):
        model = chain(jit, rate=2.0**-20)
        fit(model, np.linspace(1, 2, 30), *callbacks)
        return [v.numpy() for v in [*model.weights, *model.optimizer.variables]]

    known = weights()
    watched = weights(*order([tuner(), monitor(tmp_path)]))
    for ours, theirs in zip(watched, known, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("beside", [True, False])
def test_the_log_has_what_was_compared_and_who_took_time(beside, tmp_path):
    model = chain()
    for name in "ab":
        watcher = monitor(tmp_path / name)
        fit(model, [GOOD] * 20, watcher, *[tuner()] * beside)
    # The last audit was that of the first `fit`.
    assert ("error_against_float32/00000" in tags(tmp_path / "b")) == beside
    text = watcher.summary.headline["text"]
    assert text.count("with float32") == (not beside)
    assert ("keras_mixprec.diagnose(" in text) == (not beside)
    (run,) = kmp.load_report(tmp_path / "b").to_dict().values()
    titles = [f["title"].split(", ")[0] for f in run["performance"]["figures"]]
    who = {"monitor", "monitor and tuner"} & set(titles)
    assert who == {"monitor and tuner" if beside else "monitor"}
    assert titles.count(*who) == 2


def test_after_a_fit_that_died_the_same_callbacks_serve_again(tmp_path):
    def die(batch, logs):
        raise KeyboardInterrupt

    killer = keras.callbacks.LambdaCallback(on_train_batch_begin=die)
    callbacks, model = [tuner(), monitor(tmp_path)], chain()
    with pytest.raises(KeyboardInterrupt):
        fit(model, [BIG] * 5, *callbacks, killer)
    for again in model, chain():
        fit(again, [BIG] * 5, *callbacks)
        assert demoted(again) == CURE


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_second_tuner_in_one_fit_is_refused(dry_run):
    model = chain()
    with pytest.raises(ValueError, match="`PrecisionTuner` only"):
        fit(model, [GOOD] * 4, tuner(dry_run=dry_run), tuner())
    fit(model, [BIG] * 4, tuner())
    assert demoted(model) == CURE
