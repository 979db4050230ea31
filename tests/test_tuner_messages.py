"""What a tuner refuses, what it says, and where it gives up."""

import contextlib
import itertools
import re
import sys

import keras
import numpy as np
import pytest
import tuner_models as models
from tuner_models import BIG, GOOD, chain, demoted, done, fit, tuned, tuner

import keras_mixprec as kmp
from keras_mixprec import _clock
from keras_mixprec.tuning.state import Phase, TuningState

pytestmark = pytest.mark.one_backend

X = np.ones((4, 1), "float32")
WRONG = [
    ({"plan": 3}, TypeError, "plan=3"),
    ({"dry_run": "yes"}, ValueError, "dry_run='yes'"),
    ({"promote_after": -1}, ValueError, "promote_after=-1"),
    ({"cooldown": 2.5}, TypeError, "cooldown=2.5"),
    ({"max_demoted_fraction": 1.5}, ValueError, "max_demoted_fraction=1.5"),
    ({"max_rebuilds": -1}, ValueError, "max_rebuilds=-1"),
    ({"on_limit": "explode"}, ValueError, "on_limit='explode'"),
    ({"bfloat16": "always"}, ValueError, "bfloat16='always'"),
    ({"update_freq": 0}, ValueError, "update_freq=0"),
    ({"verbose": 7}, ValueError, "verbose=7"),
    # Arguments that contradict each other.
    ({"promote_after": 5, "cooldown": 20}, ValueError, "promote_after=5"),
    ({"max_rebuilds": 0, "on_limit": "float32"}, ValueError, "max_rebuilds=0"),
    ({"rungs": "float32"}, TypeError, "sequence.*type str"),
    ({"rungs": ("clamp", "float32")}, ValueError, "some of.*clamp"),
    ({"rungs": ("float32", "rescale")}, ValueError, "order.*rescale"),
    ({"rungs": ("rescale",)}, ValueError, "always repairs.*rescale"),
    ({"validate": 3}, TypeError, "`validate`.*Received: .*3"),
    ({"validate": X}, ValueError, "targets are missing"),
    ({"validate": (X,)}, ValueError, "tuple of 1"),
    ({"validate": {"x": X}}, TypeError, "`validate` must be"),
    ({"validate": iter([(X, X)])}, ValueError, "more than once"),
    ({"validate": (X, X), "mode": "best"}, ValueError, "`mode`.*best"),
    ({"validate": (X, X), "monitor": 1}, TypeError, "`monitor`.*1"),
    ({"monitor": "val_mae"}, ValueError, "pass `validate`.*val_mae"),
    ({"mode": "max"}, ValueError, "pass `validate`.*mode='max'"),
    ({"tolerance": -1}, ValueError, "`tolerance`.*-1"),
    ({"tolerance": "no"}, TypeError, "`tolerance`.*no"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG)
def test_wrong_arguments_are_refused_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        kmp.PrecisionTuner(**arguments)


def test_a_metric_without_data_is_refused_offline():
    with pytest.raises(ValueError, match="pass `validate_fn`.*val_mae"):
        kmp.minimize_float32(chain(), X, X, monitor="val_mae")


def test_nothing_follows_the_end_or_is_captured_before_the_start():
    state = TuningState()
    state.enter(Phase.CAPTURING, until=7)
    assert not state.captures
    for phase in Phase.ENDED, *Phase:
        state.enter(phase)
        assert (state.ended, state.captures) == (True, False)


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


def test_what_is_said_fits_the_screen(capsys):
    fit(chain(), [GOOD] * 60, tuner(verbose=1))
    assert capsys.readouterr().out == ""
    fit(chain(), [BIG] * 4, tuner(verbose=1))
    said = capsys.readouterr().out
    assert "'big', 'last' to float32" in said
    assert re.search(r"'big' overflowed.*\b33% of", " ".join(said.split()))
    assert len(said.splitlines()) < 24


def test_messages_have_lines_of_their_own_beside_the_bar(capsys):
    x = np.ones((160, 1), "float32")
    x[32:] = BIG
    for verbose in 1, 0:
        callback = kmp.PrecisionTuner()
        options = {"batch_size": 4, "shuffle": False, "verbose": verbose}
        chain().fit(x, 0 * x, callbacks=[callback], **options)
        ((_, step),) = done(callback)
        assert step > 0
        lines = capsys.readouterr().out.splitlines()
        assert any(x.startswith("PrecisionTuner, at step") for x in lines)
        assert verbose or "" not in lines


# The progress of a diagnosis.


@contextlib.contextmanager
def each_reading_takes(seconds):
    """A context in which the clock moves whenever it is read."""
    ticks = itertools.count(step=seconds)
    with _clock.set_to(ticks.__next__):
        yield


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    ("value", "found"), [(GOOD, "none at"), (219.0, "2 at")], ids=["0", "2"]
)
def test_one_that_takes_its_time_shows_a_bar(
    value, found, terminal, capsys, monkeypatch
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    with each_reading_takes(1.0):
        fit(chain(), [value], kmp.PrecisionTuner())
    out = capsys.readouterr().out
    # In a file a bar would be a line for each layer, with colours.
    assert ("12/12" in out, "\x1b" in out) == (terminal, terminal)
    # It says so before, and how many are at fault in the line that ends it.
    assert out.startswith("PrecisionTuner: checking 3 layers")
    assert re.search(rf"checked 3 layers in [\d.]+ s: {found} fault\.\n", out)


@pytest.mark.parametrize(("seconds", "verbose"), [(1.0, 0), (0.0, 1)])
def test_else_it_is_silent(seconds, verbose, capsys):
    with each_reading_takes(seconds):
        fit(chain(), [GOOD], kmp.PrecisionTuner(verbose=verbose))
    assert "check" not in capsys.readouterr().out


@pytest.mark.slow
def test_one_of_many_layers_is_announced(capsys, clock):
    layers = [keras.layers.Dense(1, dtype="mixed_float16") for _ in range(40)]
    fit(models.sequential(lambda: layers), [GOOD], kmp.PrecisionTuner())
    out = capsys.readouterr().out
    assert out.index("checking 40 layers") < out.index("checked 40")


def test_the_same_of_several_layers_is_said_once(capsys):
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((1,))
    big = [
        models.times(300.0, name)(inputs) for name in ("big0", "big1", "big2")
    ]
    ends = [keras.layers.Rescaling(1 / 256, dtype="float32")(b) for b in big]
    model = keras.Model(inputs, keras.layers.Add(dtype="float32")(ends))
    fit(models.compiled(model), [219.0], kmp.PrecisionTuner())
    out = capsys.readouterr().out
    assert out.count("compute in float32") == 1
    (same,) = re.findall("    The same in (.*)\\.\n", out)
    named = re.search("forward_overflow in '(.*?)'", out).group(1)
    names = {named, *same.replace("'", "").split(", ")}
    assert names == {"big0", "big1", "big2"}
