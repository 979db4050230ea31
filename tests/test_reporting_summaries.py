"""What is put into a log, decoded by TensorBoard's own code, and new kinds."""

import json

import ml_dtypes
import numpy as np
import pytest
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.util import tensor_util

import keras_mixprec as kmp
from keras_mixprec import metrics, verdict_kinds
from keras_mixprec.diagnosis import ranges
from keras_mixprec.diagnosis.advice import advice
from keras_mixprec.formats import get_format
from keras_mixprec.monitoring import audits
from keras_mixprec.numerics.probed_step import LayerReading
from keras_mixprec.numerics.statistics import statistics_of
from keras_mixprec.reporting import summaries
from keras_mixprec.reporting.facts import is_repaired
from keras_mixprec.reporting.run_log import RunLog
from keras_mixprec.reporting.text_formats import markdown_table, to_json

pytestmark = pytest.mark.one_backend


def decoded(value):
    event = event_pb2.Event.FromString(summaries.encode_event(3, [value]))
    return event.summary.value[0]


def array_of(value):
    return tensor_util.make_ndarray(decoded(value).tensor)


@pytest.mark.parametrize(
    "number",
    [0.1, 2.0**32, -0.0, np.inf, -np.inf, np.nan, 1e300, 1e-46, np.float32(3)],
)
def test_scalar_is_a_float32_of_rank_0(number):
    array = array_of(summaries.scalar("a", number))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(array, np.float32(number), strict=True)


@pytest.mark.parametrize("dtype", ["<f4", "<f8", ">f4"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_numbers_keep_shape_and_value(dtype, shape):
    array = np.random.default_rng(0).normal(size=shape).astype(dtype)
    read = array_of(summaries.numbers("a", array))
    np.testing.assert_array_equal(read, array)
    assert read.shape == shape


@pytest.mark.parametrize("items", ["a", ["a"], ["a", "\u00e9"]])
def test_strings_keep_rank(items):
    read = array_of(summaries.strings("a", items))
    np.testing.assert_array_equal(read, np.char.encode(items).astype(object))


BINS = [[0, 1, 2]]


@pytest.mark.parametrize(
    ("value", "plugin", "data_class"),
    [
        (summaries.scalar("a", 1.0), "scalars", "SCALAR"),
        (summaries.text("a", "*b*"), "text", "TENSOR"),
        (summaries.histogram("a", BINS), "histograms", "TENSOR"),
        (summaries.layout({}), "custom_scalars", "TENSOR"),
        (summaries.strings("a", "b"), "mixed_precision", "TENSOR"),
        (summaries.numbers("a", np.ones(2)), "mixed_precision", "TENSOR"),
    ],
    ids=["scalar", "text", "histogram", "layout", "strings", "numbers"],
)
def test_metadata_says_who_shows_it(value, plugin, data_class):
    metadata = decoded(value).metadata
    assert metadata.plugin_data.plugin_name == plugin
    data_class = f"DATA_CLASS_{data_class}"
    assert metadata.data_class == summary_pb2.DataClass.Value(data_class)


def test_own_content_carries_the_schema_version():
    value = decoded(summaries.strings("a", "b", columns=["c"]))
    content = json.loads(value.metadata.plugin_data.content)
    assert content == {"schema": 2, "columns": ["c"]}


def test_layout_holds_the_charts():
    value = summaries.layout({"Precision": {"Scale": ["mixprec/.*scale"]}})
    layout = layout_pb2.Layout.FromString(array_of(value).item())
    (category,) = layout.category
    (chart,) = category.chart
    assert (category.title, chart.title) == ("Precision", "Scale")
    assert list(chart.multiline.tag) == ["mixprec/.*scale"]


def test_what_is_something_else_is_refused():
    with pytest.raises(ValueError, match=r"Received: bins.*\(3,\)"):
        summaries.histogram("a", BINS[0])
    with pytest.raises(ValueError, match="Not an event"):
        summaries.decode_event(b"\xff\xff\xff")
    with pytest.raises(TypeError, match="not JSON"):
        to_json({"a": object()})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("inf"), '"inf"'),
        (np.float64("-inf"), '"-inf"'),
        (np.float32("nan"), '"nan"'),
        (ml_dtypes.bfloat16(1.5), "1.5"),
        (np.float16(65504), "65504.0"),
        ({1: (np.int32(2), None, True)}, '{"1": [2, null, true]}'),
        (np.array([[1.0, np.inf]]), '[[1.0, "inf"]]'),
    ],
    ids=str,
)
def test_json_is_valid_for_every_number(value, text):
    assert to_json(value) == text


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
    metric = metrics.Metric("drift", "count", "Weights", "Drift", "Why.", "min")
    monkeypatch.setitem(metrics.METRICS, "drift", metric)
    log = RunLog(tmp_path)
    log.heat(0, np.ones((1, 1)), ["a"], {"drift": metric.worst})
    (told,) = run_of(log, tmp_path)["heat"]["metrics"]
    described = "drift", "count", "min", "Weights", "Drift", "Why."
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


def test_columns_of_an_audit_are_joined_by_name(monkeypatch, tmp_path):
    swapped = dict(reversed(metrics.AUDITED.items()))
    monkeypatch.setattr(audits, "AUDITED", swapped)
    log = RunLog(tmp_path)
    log.layers(0, [{"path": "a", "compute_dtype": "float16"}])
    errors = {"a": {"forward": 1.0, "backward": 2.0}}
    audits.Examiner(log, 0, 0, None, None, "").log_errors(errors, 0)
    told = run_of(log, tmp_path)["heat"]["metrics"]
    assert {m["name"]: m["values"] for m in told} == {
        "forward_error_against_float32": {"a": [1.0]},
        "backward_error_against_float32": {"a": [2.0]},
    }
