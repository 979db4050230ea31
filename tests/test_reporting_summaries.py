"""TensorBoard's own code decodes the summaries in a log."""

import numpy as np
import pytest
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.util import tensor_util

import keras_mixprec as kmp
from keras_mixprec import metrics, verdict_kinds
from keras_mixprec.diagnosis.advice import advice
from keras_mixprec.formats import get_format
from keras_mixprec.monitoring import ranges
from keras_mixprec.numerics.range_reading import LayerReading
from keras_mixprec.numerics.statistics import statistics_of
from keras_mixprec.reporting import summaries
from keras_mixprec.reporting.facts import is_repaired
from keras_mixprec.reporting.run_log import RunLog
from keras_mixprec.reporting.text_formats import markdown_table

pytestmark = pytest.mark.one_backend


def decoded(value):
    event = event_pb2.Event.FromString(summaries.encode_event(3, [value]))
    return event.summary.value[0]


def array_of(value):
    return tensor_util.make_ndarray(decoded(value).tensor)


BINS = [[0.0, 1.0, 2.0]]
NUMBERS = 0.1, 2.0**32, -0.0, np.inf, -np.inf, np.nan, 1e300, 1e-46


@np.errstate(over="ignore")
def as_float32(number):
    return np.float32(number)


@pytest.mark.parametrize(
    ("value", "expected", "plugin"),
    [
        *(
            (summaries.scalar("a", n), as_float32(n), "scalars")
            for n in NUMBERS
        ),
        (summaries.text("a", "*b*"), np.array(b"*b*", object), "text"),
        (summaries.histogram("a", BINS), np.array(BINS), "histograms"),
    ],
)
def test_a_value_is_read_back_by_whom_it_is_for(value, expected, plugin):
    array, metadata = array_of(value), decoded(value).metadata
    np.testing.assert_array_equal(array, expected)
    assert array.shape == expected.shape
    assert metadata.plugin_data.plugin_name == plugin
    data_class = "SCALAR" if plugin == "scalars" else "TENSOR"
    data_class = summary_pb2.DataClass.Value(f"DATA_CLASS_{data_class}")
    assert metadata.data_class == data_class


def test_markdown_table_escapes_names():
    table = markdown_table([{"path": "a|_b_<c>\n*d*", "n": 1}])
    row = table.splitlines()[2]
    assert row == r"| a\|\_b\_&lt;c&gt; \*d\* | 1 |"
    assert markdown_table([]) == ""


# Adding a kind of verdict, or a metric, is adding it to its table.


def run_of(log, folder):
    log.close()
    (run,) = kmp.load_report(folder).to_dict().values()
    return run


def test_a_new_kind_of_verdict_is_known_everywhere(monkeypatch, tmp_path):
    repair = {"phrase": "drifted", "repaired_by": ("float32",)}
    kind = verdict_kinds.Kind("drift", "Freeze {layer!r}.", "warning", **repair)
    monkeypatch.setitem(verdict_kinds.KINDS, "drift", kind)
    said = advice("drift", "a")
    assert said == "Freeze 'a'."
    verdict = kmp.Verdict("drift", "a", "forward", 3, advice=said)
    log = RunLog(tmp_path)
    log.layers(0, [{"path": "a", "compute_dtype": "float16"}])
    log.event(3, verdict.event())
    run = run_of(log, tmp_path)
    assert "drifted" in run["headline"]["text"]
    assert [event["level"] for event in run["events"]] == ["warning"]
    dtypes = "float32", "bfloat16"
    assert [is_repaired("drift", dtype) for dtype in dtypes] == [True, False]


def test_a_new_metric_is_described_to_the_page(monkeypatch, tmp_path):
    metric = metrics.Metric("drift", "count", "Weights", "Drift", "Why.")
    monkeypatch.setitem(metrics.METRICS, "drift", metric)
    log = RunLog(tmp_path)
    log.heat(0, np.ones((1, 1)), ["a"], {"drift": metric.worst})
    (told,) = run_of(log, tmp_path)["heat"]["metrics"]
    described = "drift", "count", "max", "Weights", "Drift", "Why."
    assert tuple(told.values())[:6] == described


def test_columns_of_a_probe_are_joined_by_name(monkeypatch):
    swapped = dict(reversed(metrics.PROBED.items()))
    monkeypatch.setattr(ranges, "PROBED", swapped)
    found = statistics_of(np.array([0.0, 0.0, 2.0**-30, 2.0**13]))
    reading = LayerReading("a", {"activation": found, "weight": found}, 0.125)
    table = ranges.metrics_table([reading], get_format("float16"))
    row = dict(zip(swapped, table[0], strict=True))
    measured = {n: value for n, value in row.items() if np.isfinite(value)}
    assert measured == {
        "activation_headroom_bits": np.float32(np.log2(65504) - 13),
        "activation_nonfinite": 0,
        "activation_zero": 0.5,
        "activation_subnormal": 0,
        "activation_below": 0.25,
        "weight_headroom_bits": np.float32(np.log2(65504) - 13),
        "lost_updates": 0.125,
    }
