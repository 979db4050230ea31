"""When the tuner diagnoses, and when it takes a demotion back."""

import keras
import numpy as np
import pytest
import tuner_models as models
from monitor_models import BACKEND, monitor, told
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
from zoo import cases

import keras_mixprec as kmp
from keras_mixprec.diagnosis import in_training

pytestmark = pytest.mark.long

Hooks = keras.callbacks.LambdaCallback

one_backend = pytest.mark.one_backend


@pytest.fixture
def seen(monkeypatch, clock):
    """Returns the steps of the diagnoses, which take no time here."""
    steps, examine = [], in_training.examine

    def noted(*args, **kwargs):
        steps.append(kwargs["step"])
        return examine(*args, **kwargs)

    monkeypatch.setattr(in_training, "examine", noted)
    return steps


@one_backend
def test_audits_come_at_the_steps_that_the_documents_name(seen):
    tuned([GOOD] * 200)
    assert seen == [0, 16, 48, 192]


@one_backend
@pytest.mark.parametrize(
    ("name", "second", "third"),
    [
        # The first explains the skips before step 8, since the scale had to
        # fall, and three more. After a false alarm the next one waits.
        ("learning_rate_too_high", 11, 111),
        # 8 skips and more; the audits after 16 steps and 48 come all the same.
        ("initial_scale_too_high", 16, 48),
        ("nan_data", 17, 18),
    ],
)
def test_what_is_no_matter_of_precision_changes_nothing(
    name, second, third, seen
):
    (case,) = cases([name])
    model, callback = case.model("mixed_float16", BACKEND == "jax"), tuner()
    case.fit(model, callbacks=[callback])
    assert callback.history == []
    assert demoted(model) == demoted(case.model("mixed_float16", False))
    assert len(seen) <= 8
    assert seen[:2] == [0, second]
    assert all(step >= third for step in seen[2:])


@one_backend
def test_skips_in_a_row_are_diagnosed_at_once():
    _, callback = tuned([GOOD] * 3 + [BIG] * 8)
    (_, step), *_ = done(callback)
    assert 3 < step <= 3 + 3


@one_backend
@pytest.mark.parametrize(
    ("begin", "arguments", "least"),
    [
        # At step 10 `big` and `last` fail, then `first` fails too.
        ([GOOD] * 10 + [BIG] * 12, {"cooldown": 30}, 30),
        # `first` does not fail on the batch that is diagnosed at the start.
        ([BIG], {"cooldown": 1000, "promote_after": 0}, 1),
    ],
)
def test_a_cooldown_is_waited_for_but_at_first(begin, arguments, least):
    model, callback = tuned(begin + [1e5] * 60, **arguments)
    (_, first), (_, second) = done(callback)
    assert first + least <= second < first + 60
    assert set(demoted(model)) == {"first", "big", "last"}


@one_backend
def test_a_dry_run_advises_once_and_changes_nothing(seen, tmp_path):
    path, watcher = tmp_path / "plan.json", monitor(tmp_path / "logs")
    model, callback = tuned([BIG] * 60, watcher, plan=path, dry_run=True)
    # Twice as many steps are waited for each time; it was 29 times.
    assert len(seen) <= 8
    assert demoted(model) == {}
    assert not path.exists()
    (advice,), (event,) = callback.history, told(tmp_path / "logs", "demote")
    assert (advice["kind"], advice["dry_run"]) == ("demote", True)
    assert {p: c["after"] for p, c in advice["layers"].items()} == CURE
    assert event["layers"] == advice["layers"]
    # A repair that was only advised is found again.
    _, callback = tuned([BIG], model=model)
    assert done(callback) == [("demote", 0)]


# Several calls of `fit` are as one long one.


def healthy():
    return models.sequential(
        lambda: [keras.layers.Dense(1, bias_initializer="ones")],
        rate=1e-3,
        loss="mse",
        scale=None,
    )


def watching(folder):
    return kmp.MixPrecMonitor(folder, verbose=0)


@one_backend
@pytest.mark.parametrize(
    ("callbacks", "audits"),
    [
        (lambda folder: [tuner()], [0, 16 - 2 * 6]),
        (lambda folder: [watching(folder), tuner()], [0, 16]),
        # A monitor audits as its budget allows.
        (lambda folder: [watching(folder)], []),
    ],
)
def test_five_fits_are_audited_as_one(callbacks, audits, seen, tmp_path):
    model = healthy()
    for _ in range(5):
        fit(model, [GOOD] * 6, *callbacks(tmp_path))
    assert seen == audits


@one_backend
@pytest.mark.parametrize(
    "change",
    [
        models.compiled,
        lambda model: model.set_weights([w + 1 for w in model.get_weights()]),
        lambda model: kmp.apply_policy(model, "mixed_bfloat16"),
    ],
)
def test_what_has_changed_is_audited_before_its_first_step(change, seen):
    model, _ = tuned([GOOD] * 2, model=healthy())
    change(model)
    tuned([GOOD] * 2, model=model)
    assert seen == [0, 0]


@pytest.mark.parametrize("new_callback", [True, False])
def test_a_later_fit_knows_what_was_demoted_and_why(new_callback, tmp_path):
    watcher = monitor(tmp_path)
    model, callback = tuned([BIG] * 4, watcher, max_rebuilds=1)
    reasons = callback.plan.reasons
    again = tuner(max_rebuilds=1) if new_callback else callback
    for _ in range(2):
        fit(model, [GOOD] * 4, watcher, again)
    assert again.plan.reasons == reasons
    assert reasons.keys() == CURE.keys()
    said = " ".join(str(watcher.report).split())
    assert "The tuner watched" not in said
    # The only rebuild is used up.
    model.set_weights(model.get_weights())
    fit(model, [1e5] * 8, again)
    kinds = [kind for kind, _ in done(again)]
    assert kinds == [*["demote"] * (not new_callback), "give_up"]
    assert "max_rebuilds=1" in again.history[-1]["message"]


# Monitor and tuner share one session, one diagnosis and one log.

each_order = pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])


@each_order
def test_both_share_one_diagnosis_and_one_log(order, seen, clock, tmp_path):
    watcher, callback = monitor(tmp_path), tuner()
    tick = Hooks(on_train_batch_end=lambda batch, logs: clock.wait(0.25))
    both = [callback, watcher][::order]
    fit(model := chain(), [GOOD] * 20 + [BIG] * 20, *both, tick)
    assert demoted(model) == CURE
    (change,) = callback.history
    # The first two audits, and when the first bad batch was seen.
    assert seen == [0, 16, change["step"]]
    found = {v.kind for v in watcher.verdicts}
    assert found == {"forward_overflow", "cast_overflow"}
    (event,), (cost,) = told(tmp_path, "demote"), told(tmp_path, "rebuild")
    assert event["step"] == change["step"]
    expected = {"before": "mixed_float16", "after": "float32"}
    assert event["layers"]["big"] == expected
    assert cost["seconds"] == change["seconds"] == 0.25


@one_backend
def test_a_second_tuner_in_one_fit_is_refused():
    model = chain()
    with pytest.raises(ValueError, match="one `PrecisionTuner`"):
        fit(model, [GOOD] * 4, tuner(dry_run=True), tuner())
    tuned([BIG] * 4, model=model)
    assert demoted(model) == CURE


# A demotion that lets outliers through is taken back.

VALUES = [0.5] * 20 + ([BIG] + [0.5] * 9) * 20


def bounded(weights):
    """A constraint that no weight gets past."""
    return keras.ops.clip(weights, -50.0, 50.0)


@pytest.mark.parametrize(
    ("of_weights", "beside"),
    [
        ({}, True),
        pytest.param({}, False, marks=one_backend),
        # Its weights are bounded: the loss alone diverges.
        pytest.param(
            {"use_bias": False, "kernel_constraint": bounded},
            False,
            marks=one_backend,
        ),
    ],
)
def test_a_demotion_that_makes_training_diverge_is_undone(
    of_weights, beside, tmp_path
):
    watcher = monitor(tmp_path)
    model = models.regression(0.1, **of_weights)
    _, callback = tuned(VALUES, *[watcher] * beside, model=model)
    assert "demote" in dict(done(callback))
    (undone,) = models.entries(callback, "undo")
    assert ("loss" in undone["message"]) == bool(of_weights)
    assert demoted(model) == {}
    assert max(np.abs(w).max() for w in model.get_weights()) < 2
    # None but the outliers, and those between demotion and undoing.
    assert model.optimizer.skipped_steps < 45
    assert float(model.optimizer.loss_scale) > 2.0**-8
    if beside:
        assert watcher.summary.headline["state"] == "severe"
        assert "undone at step" in watcher.summary.headline["text"]


@pytest.mark.parametrize(
    ("rate", "values"),
    [
        pytest.param(0.0, VALUES, marks=one_backend),
        # The loss of each batch is another one, a million times as large.
        (1e-14, [0.5, BIG, 0.001, 30.0] * 30),
        # It was not a number before.
        (1e-14, [BIG] * 60),
    ],
)
def test_a_demotion_that_training_bears_stays(rate, values):
    model, callback = tuned(values, model=models.regression(rate))
    assert {kind for kind, _ in done(callback)} == {"demote"}
    assert "squares" in demoted(model)


# Layers that no longer need float32 return to 16 bits.


def test_what_the_weights_have_outgrown_returns_in_a_later_fit():
    model, callback = tuned([BIG] * 4, promote_after=30, cooldown=5)
    model.get_layer("big").kernel.assign([[1.0]])
    for expected in CURE, {}:
        for _ in range(2):
            fit(model, [BIG] * 10, callback)
        assert demoted(model) == expected
    (entry,) = models.entries(callback, "promote")
    expected = {"before": "float32", "after": "mixed_float16"}
    assert entry["layers"]["big"] == expected


@one_backend
def test_a_fault_that_comes_and_goes_is_resolved():
    """The weight that overflows is large for half of each period."""
    period, model = 60, chain()

    def swing(batch, logs):
        large = batch % period < period // 2
        model.layers[1].kernel.assign([[300.0 if large else 1.0]])

    _, callback = tuned(
        [BIG] * 325,
        Hooks(on_train_batch_begin=swing),
        model=model,
        promote_after=10,
        cooldown=5,
        max_rebuilds=100,
        update_freq=10,
    )
    # The wait doubles each time: 10, 20, ..., 160 is the last that can end.
    assert 2 < len(done(callback)) <= 2 * 5
    assert demoted(model) == CURE
