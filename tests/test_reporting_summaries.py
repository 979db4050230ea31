"""What is put into a log, decoded by TensorBoard's own code."""

import json

import ml_dtypes
import numpy as np
import pytest
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.util import tensor_util

from keras_mixprec.reporting import summaries
from keras_mixprec.reporting.text_formats import markdown_table, to_json


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
    assert array.shape == ()
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(array, np.float32(number), strict=True)


@pytest.mark.parametrize("dtype", ["<f4", "<f8", ">f4"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_numbers_keep_shape_and_value(dtype, shape):
    array = np.random.default_rng(0).normal(size=shape).astype(dtype)
    read = array_of(summaries.numbers("a", array))
    np.testing.assert_array_equal(read, array)
    assert read.shape == shape


@pytest.mark.parametrize(
    ("items", "shape"), [("a", ()), (["a"], (1,)), (["a", "\u00e9"], (2,))]
)
def test_strings_keep_rank(items, shape):
    read = array_of(summaries.strings("a", items))
    assert read.shape == shape
    expected = [item.encode() for item in items]
    assert read.ravel().tolist() == expected


@pytest.mark.parametrize(
    ("value", "plugin", "data_class"),
    [
        (summaries.scalar("a", 1.0), "scalars", "SCALAR"),
        (summaries.text("a", "*b*"), "text", "TENSOR"),
        (summaries.histogram("a", [[0, 1, 2]]), "histograms", "TENSOR"),
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


def test_histogram_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"Received: bins of shape \(3,\)"):
        summaries.histogram("a", [0, 1, 2])


def test_decoding_something_else_says_so():
    with pytest.raises(ValueError, match="Not an event"):
        summaries.decode_event(b"\xff\xff\xff")


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


def test_json_refuses_what_it_cannot_say():
    with pytest.raises(TypeError, match="not JSON serializable"):
        to_json({"a": object()})


def test_markdown_table_escapes_names():
    table = markdown_table([{"path": "a|_b_<c>\n*d*", "n": 1}])
    row = table.splitlines()[2]
    assert row == r"| a\|\_b\_&lt;c&gt; \*d\* | 1 |"


def test_markdown_table_of_nothing_is_empty():
    assert markdown_table([]) == ""
