"""Errors and messages of the tuner, and when it gives up."""

import re

import numpy as np
import pytest
from tuner_models import BIG, GOOD, chain, demoted, done, fit, tuned, tuner

import keras_mixprec as kmp

pytestmark = pytest.mark.one_backend

X = np.ones((4, 1), "float32")
WRONG = [
    ({"plan": 3}, TypeError, "plan=3"),
    ({"dry_run": "yes"}, ValueError, "dry_run='yes'"),
    ({"on_limit": "explode"}, ValueError, "on_limit='explode'"),
    # Arguments that contradict each other.
    ({"promote_after": 5, "cooldown": 20}, ValueError, "promote_after=5"),
    ({"max_rebuilds": 0, "on_limit": "float32"}, ValueError, "max_rebuilds=0"),
    ({"rungs": ("clamp", "float32")}, ValueError, "some of.*clamp"),
    ({"rungs": ("rescale",)}, ValueError, "always repairs.*rescale"),
    ({"validate": 3}, TypeError, "`validate`.*Received: .*3"),
    ({"validate": iter([(X, X)])}, ValueError, "list_iterator"),
    ({"validate": (X, X), "mode": "best"}, ValueError, "`mode`.*best"),
    ({"monitor": "val_mae"}, ValueError, "pass `validate`.*val_mae"),
    ({"tolerance": -1}, ValueError, "`tolerance`.*-1"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG)
def test_wrong_arguments_are_refused_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        kmp.PrecisionTuner(**arguments)


@pytest.mark.parametrize(
    "limit", [{"max_rebuilds": 0}, {"max_demoted_fraction": 0.5}]
)
def test_past_a_limit_it_says_what_to_do(limit):
    model, callback = tuned([BIG] * 40, **limit)
    assert demoted(model) == {}
    assert done(callback) == [("give_up", 0)]
    for name in *limit, "mixed_bfloat16":
        assert name in callback.history[0]["message"]


def test_it_stops_when_asked_to():
    model, callback = chain(), tuner(max_rebuilds=0, on_limit="stop")
    history = fit(model, [BIG] * 4, callback, epochs=3)
    assert len(history["loss"]) == 1


def test_it_goes_to_float32_when_asked_to():
    callback = tuner(max_demoted_fraction=0.5, on_limit="float32")
    history = fit(model := chain(), [BIG] * 4, callback)
    assert set(demoted(model)) == {"first", "big", "last"}
    assert history["loss"] == pytest.approx([1000 * 300 / 256], rel=1e-3)


@pytest.mark.usefixtures("clock")
def test_what_is_said_fits_the_screen(capsys):
    fit(chain(), [GOOD] * 60, tuner(verbose=1))
    assert capsys.readouterr().out == ""
    fit(chain(), [BIG] * 4, tuner(verbose=1))
    said = capsys.readouterr().out
    assert re.search("'big', 'last' .*float32", said)
    assert re.search(r"'big' overflowed.*\b33% of", " ".join(said.split()))
    assert len(said.splitlines()) < 24


# The progress of a diagnosis.


@pytest.mark.parametrize(
    ("value", "seconds", "verbose", "found"),
    [
        (GOOD, 3.0, 1, "none at"),
        (219.0, 3.0, 1, "2 at"),
        (GOOD, 3.0, 0, None),
        (GOOD, 0.0, 1, None),
    ],
)
def test_one_that_takes_its_time_says_so(
    value, seconds, verbose, found, clock, capsys
):
    with clock.each_look_takes(seconds):
        fit(chain(), [value], kmp.PrecisionTuner(verbose=verbose))
    said = rf" 3 layers .* [\d.]+ s: {found} fault\.\n"
    out = capsys.readouterr().out
    assert re.search(said, out) if found else "check" not in out
