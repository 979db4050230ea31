"""Wrong arguments, each with the error that says so."""

import pytest
from monitor_models import arrays, fit, good, monitor, one_weight

from keras_mixprec import MixPrecMonitor

ARGUMENTS = [
    ({"update_freq": 0}, ValueError, "`update_freq` must be at least 1"),
    ({"update_freq": -1}, ValueError, "`update_freq` must be at least 1"),
    ({"update_freq": 1.5}, TypeError, "`update_freq` must be an integer"),
    ({"update_freq": "x"}, TypeError, "`update_freq` must be an integer"),
    ({"update_freq": True}, TypeError, "`update_freq` must be an integer"),
    ({"probe_every": -1}, ValueError, "`probe_every` must be at least 0"),
    ({"probe_every": None}, TypeError, "`probe_every` must be an integer"),
    ({"on_stop": "explode"}, ValueError, "`on_stop` must be one of"),
    ({"stop_after": 0}, ValueError, "`stop_after` must be at least 1"),
    ({"stop_after": "x"}, TypeError, "`stop_after` must be an integer"),
    (
        {"keep_failing_batches": -1},
        ValueError,
        "`keep_failing_batches` must be at least 0",
    ),
    (
        {"keep_failing_batches": 0.5},
        TypeError,
        "`keep_failing_batches` must be an integer",
    ),
    ({"max_overhead": -1}, ValueError, "number between 0 and 1"),
    ({"max_overhead": 2}, ValueError, "number between 0 and 1"),
    ({"max_overhead": float("nan")}, ValueError, "finite number"),
    ({"max_overhead": "x"}, TypeError, "`max_overhead` must be a number"),
    ({"max_overhead": None}, TypeError, "`max_overhead` must be a number"),
    ({"verbose": 2}, ValueError, "`verbose` must be at least 0 and at most 1"),
    ({"verbose": "auto"}, TypeError, "`verbose` must be an integer"),
    ({"log_dir": 5}, TypeError, "`log_dir` must be a path"),
    ({"log_dir": None}, TypeError, "`log_dir` must be a path"),
    ({"log_dir": "gs://bucket/x"}, ValueError, "must be a local folder"),
]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    ARGUMENTS,
    ids=[str(a[0]) for a in ARGUMENTS],
)
def test_argument_is_refused_where_it_is_given(arguments, error, message):
    with pytest.raises(error, match=message) as caught:
        MixPrecMonitor(**arguments)
    ((name, value),) = arguments.items()
    assert f"Received: {name}={value!r}" in str(caught.value)


@pytest.mark.parametrize("where", ["log_dir", "log_dir/mixprec"])
def test_a_file_in_the_way(where, tmp_path):
    path = tmp_path / where
    path.parent.mkdir(exist_ok=True)
    path.write_text("in the way")
    model = one_weight()
    with pytest.raises(OSError, match="must be a folder that can be written"):
        fit(model, good(2), [monitor(tmp_path / "log_dir")])
    assert path.read_text() == "in the way"


def test_model_trains_after_a_failed_start(tmp_path):
    (tmp_path / "file").touch()
    model = one_weight()
    with pytest.raises(OSError, match="must be a folder"):
        fit(model, good(2), [monitor(tmp_path / "file")])
    assert fit(model, [1 / 8], []) == {"loss": [1 / 64]}
    assert fit(model, [1 / 8], [monitor(tmp_path)]) == {"loss": [1 / 64]}
    assert model.evaluate(*arrays([1 / 8]), verbose=0) == 1 / 64
