"""What is said where a part of the monitor does not work: one line."""

import warnings

import keras
import pytest

from keras_mixprec.monitoring.failures import failure_event, warn_disabled


class Refuses(keras.layers.Layer):
    def call(self, x):
        raise TypeError("\x1b[31mnot\x1b[0m " + "like this " * 100)


@pytest.fixture
def error():
    """What Keras makes of it: paragraphs in bold."""
    with pytest.raises(TypeError) as caught:
        Refuses(name="refuses")(keras.ops.ones((2, 2)))
    assert "\n" in str(caught.value)
    assert "\x1b[1m" in str(caught.value)
    return caught.value


@pytest.mark.usefixtures("training_goes_on")
@pytest.mark.parametrize("form", [lambda e: e, str], ids=["error", "text"])
def test_a_warning_is_one_line(error, form):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_disabled("do it", form(error))
    (line,) = (str(w.message) for w in caught)
    assert line.startswith(
        "MixPrecMonitor cannot do it; training goes on without"
    )
    assert "calling Refuses.call(). not like this" in line
    assert len(line) < 300
    assert not {"\n", "\x1b"} & {*line}


def test_the_log_has_the_details(error):
    event = failure_event("probe_failed", error, layer="refuses")
    assert (event["kind"], event["layer"]) == ("probe_failed", "refuses")
    assert event["reason"].startswith("TypeError: Exception encountered when")
    assert len(event["reason"]) <= 200
    assert "Traceback (most recent call last)" in event["details"]
    assert "in call\n" in event["details"]
    assert "\x1b" not in event["details"]
    assert len(event["details"]) <= 8000


def test_an_error_without_words_has_its_name():
    assert failure_event("x", KeyError())["reason"] == "KeyError"
    assert failure_event("x", "why")["details"] == "why"
