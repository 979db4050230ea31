"""What a tuner does not do, and what it says then."""

import numpy as np
import pytest
from tuner_models import CURE, chain, demoted, done, fit, tuner

import keras_mixprec as kmp
from keras_mixprec.monitoring.audit_schedule import AuditSchedule

GOOD, BIG = 1.0, 1000.0


def gave_up(callback):
    """The reason, if that is the last that was done."""
    last = callback.history[-1]
    return last["message"] if last["kind"] == "give_up" else None


@pytest.mark.parametrize(
    "limit",
    [{"max_rebuilds": 0}, {"max_demoted_fraction": 0.5}],
    ids=["rebuilds", "fraction"],
)
def test_past_a_limit_it_says_what_to_do(limit):
    model, callback = chain(), tuner(**limit)
    fit(model, [BIG] * 40, callback)
    assert demoted(model) == {}
    assert next(iter(limit)) in gave_up(callback)
    assert "mixed_bfloat16" in gave_up(callback)
    assert len(callback.history) == 1


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_second_tuner_in_one_fit_is_refused(dry_run):
    model = chain()
    with pytest.raises(ValueError, match="one `PrecisionTuner` only"):
        fit(model, [GOOD] * 4, tuner(dry_run=dry_run), tuner())
    fit(model, [BIG] * 4, tuner())
    assert demoted(model) == CURE


def test_it_stops_when_asked_to():
    model, callback = chain(), tuner(max_rebuilds=0, on_limit="stop")
    history = fit(model, [BIG] * 4, callback, epochs=3)
    assert len(history["loss"]) == 1


def test_it_goes_to_float32_when_asked_to():
    model = chain()
    callback = tuner(max_demoted_fraction=0.5, on_limit="float32")
    history = fit(model, [BIG] * 4, callback)
    assert set(demoted(model)) == {"first", "big", "last"}
    assert history["loss"] == pytest.approx([1000 * 300 / 256], rel=1e-3)


def test_a_cooldown_is_waited_for():
    model, callback = chain(), tuner(cooldown=30)
    # At 10 `big` and `last` fail, then `first` as well.
    fit(model, [GOOD] * 10 + [BIG] * 12 + [1e5] * 60, callback)
    first, second = done(callback, "demote")
    assert second >= first + 30
    assert set(demoted(model)) == {"first", "big", "last"}


def test_bad_data_change_nothing_over_many_epochs():
    model, callback = chain(rate=2.0**-20), tuner()
    values = [GOOD] * 99 + [np.nan]
    fit(model, values, callback, epochs=5)
    assert callback.history == []
    assert demoted(model) == {}
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_what_is_said_fits_the_screen(capsys):
    fit(chain(), [BIG] * 4, tuner(verbose=1))
    said = capsys.readouterr().out
    assert "demotes 'big', 'last' to float32" in said
    assert (
        "PrecisionTuner: big overflowed (found before the first step) and was "
        "demoted to float32 with 1 more layer; 4 steps, none skipped; 33% of "
        "FLOPs still in 16 bits." in " ".join(said.split())
    )
    assert len(said.splitlines()) < 24


def test_nothing_is_said_where_nothing_is_done(capsys):
    fit(chain(), [GOOD] * 60, tuner(verbose=1))
    assert capsys.readouterr().out == ""


WRONG = {
    "plan": (3, TypeError),
    "dry_run": ("yes", ValueError),
    "promote_after": (-1, ValueError),
    "cooldown": (2.5, TypeError),
    "max_demoted_fraction": (1.5, ValueError),
    "max_rebuilds": (-1, ValueError),
    "on_limit": ("explode", ValueError),
    "bfloat16": ("always", ValueError),
    "update_freq": (0, ValueError),
    "verbose": (7, ValueError),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_at_once(name):
    value, error = WRONG[name]
    with pytest.raises(error, match=f"Received: {name}={value!r}"):
        kmp.PrecisionTuner(**{name: value})


def test_it_does_not_wait_when_the_first_repair_was_not_enough():
    model, callback = chain(), tuner(cooldown=1000, promote_after=0)
    # `first` does not fail on the batch that is diagnosed at the start.
    fit(model, [BIG] + [1e5] * 30, callback)
    assert set(demoted(model)) == {"first", "big", "last"}


TOGETHER = {
    "promote_after=5": {"promote_after": 5, "cooldown": 20},
    "max_rebuilds=0": {"max_rebuilds": 0, "on_limit": "float32"},
}


@pytest.mark.parametrize("received", TOGETHER)
def test_arguments_that_contradict_each_other_are_refused(received):
    with pytest.raises(ValueError, match=f"Received: {received}"):
        kmp.PrecisionTuner(**TOGETHER[received])


def test_messages_have_lines_of_their_own_beside_the_bar(capsys):
    x = np.ones((160, 1), "float32")
    x[32:] = BIG
    for verbose in 1, 0:
        callback = kmp.PrecisionTuner()
        options = {"batch_size": 4, "shuffle": False, "verbose": verbose}
        chain().fit(x, 0 * x, callbacks=[callback], **options)
        said = capsys.readouterr().out
        (step,) = done(callback, "demote")
        assert step > 0
        lines = said.splitlines()
        assert any(x.startswith("PrecisionTuner at step") for x in lines)
        assert verbose or "" not in lines


def test_a_fault_that_begins_in_a_pause_is_diagnosed_after_it(
    tmp_path, monkeypatch
):
    # No audit, which would find it as well if one is due by then.
    monkeypatch.setattr(AuditSchedule, "due", lambda self, taken: False)
    # Twice what float32 does not hold either, 128 steps of pause after each.
    model, callback = chain(), tuner()
    monitor = kmp.MixPrecMonitor(tmp_path, max_overhead=1e-6, verbose=0)
    values = [GOOD] * 20 + [1e38] * 6 + [GOOD] * 280 + [1e38] * 60
    fit(model, values + [GOOD] * 60 + [BIG] * 300, callback, monitor)
    assert demoted(model) == CURE
