"""Builds the protocol buffers that TensorBoard keeps in a log.

No other file imports TensorBoard's protocol buffers, which have no documented
interface. Importing the protocol buffers does not load TensorFlow. Importing
`tensorboard.summary` or a plugin's `summary` module would.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tensorboard.compat.proto import event_pb2, tensor_pb2, types_pb2
from tensorboard.compat.proto.summary_pb2 import (
    DATA_CLASS_SCALAR,
    DATA_CLASS_TENSOR,
)
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as layout_metadata
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.scalar import metadata as scalar_metadata
from tensorboard.plugins.text import metadata as text_metadata

from keras_mixprec import _clock


class Value(NamedTuple):
    """One value of one tag at one step.

    Attributes:
        tag: String.
        tensor: The `TensorProto`.
        metadata: The `SummaryMetadata`, which selects the tab.
    """

    tag: str
    tensor: Any
    metadata: Any


_KINDS = {
    bool: api_pb2.DATA_TYPE_BOOL,
    float: api_pb2.DATA_TYPE_FLOAT64,
    str: api_pb2.DATA_TYPE_STRING,
}


def _describe(plugin, data_class, *arguments):
    metadata = plugin.create_summary_metadata(*arguments)
    # TensorBoard's helpers leave `data_class` unset. Loaders need the field to
    # read the values of unknown plugins.
    metadata.data_class = data_class
    return metadata


_SCALAR = _describe(scalar_metadata, DATA_CLASS_SCALAR, "", "")
_TEXT = _describe(text_metadata, DATA_CLASS_TENSOR, "", "")
_HISTOGRAM = _describe(histogram_metadata, DATA_CLASS_TENSOR, "", "")
_LAYOUT = _describe(layout_metadata, DATA_CLASS_TENSOR)


def scalar(tag: str, value: float) -> Value:
    """Returns a point of a curve in the Scalars tab.

    Args:
        tag: String. The curve's name.
        value: Float or anything `float()` accepts, stored as float32.
    """
    # The fast loader silently drops scalars of shape (1,) or of float64.
    tensor = tensor_pb2.TensorProto(
        dtype=types_pb2.DT_FLOAT,
        float_val=(float(value),),
        tensor_shape={},
    )
    return Value(tag, tensor, _SCALAR)


def text(tag: str, markdown: str) -> Value:
    """Returns an entry of the Text tab, in Markdown."""
    return Value(tag, _string_tensor(markdown.encode()), _TEXT)


def histogram(tag: str, bins: np.ndarray) -> Value:
    """Returns a histogram for the Histograms tab.

    Args:
        tag: String.
        bins: Array `[k, 3]` of left edges, right edges and counts, by rising
            edges.
    """
    # The edges of histograms are small integers, so float32 is exact.
    bins = np.asarray(bins, "<f4")
    tensor = tensor_pb2.TensorProto(
        dtype=types_pb2.DT_FLOAT,
        tensor_shape={"dim": [{"size": size} for size in bins.shape]},
        tensor_content=bins.tobytes(),
    )
    return Value(tag, tensor, _HISTOGRAM)


def layout(
    charts: Mapping[str, Mapping[str, Sequence[str]]],
) -> Value:
    """Returns the charts of the Custom Scalars tab.

    Args:
        charts: Dict category -> dict chart title -> list of tags, each a
            regular expression.
    """
    proto = layout_pb2.Layout()
    for category, members in charts.items():
        group = proto.category.add(title=category)
        for title, tags in members.items():
            group.chart.add(title=title, multiline={"tag": tags})
    tensor = _string_tensor(proto.SerializeToString())
    return Value(layout_metadata.CONFIG_SUMMARY_TAG, tensor, _LAYOUT)


def settings(values: Mapping[str, str | float | bool]) -> Value:
    """Returns the settings of a run, for the HParams tab.

    Args:
        values: Dict name -> value.
    """
    # With an empty id, the trial is named after its run. The default id would
    # be the same for all runs with equal settings.
    (value,) = hparams_pb(dict(values), trial_id="").value
    value.metadata.data_class = DATA_CLASS_TENSOR
    return Value(value.tag, value.tensor, value.metadata)


def experiment(
    settings: Mapping[str, type], metrics: Mapping[str, str]
) -> Value:
    """Returns the columns of the HParams tab.

    TensorBoard uses the columns of one run for all runs.

    Args:
        settings: Dict from the names of settings to `str`, `float` or `bool`.
        metrics: Dict from the tags of curves to titles.
    """
    proto = api_pb2.Experiment(time_created_secs=_clock.wall())
    for name, kind in settings.items():
        proto.hparam_infos.add(name=name, type=_KINDS[kind])
    for tag, title in metrics.items():
        proto.metric_infos.add(name={"tag": tag}, display_name=title)
    metadata = hparams_metadata.create_summary_metadata(
        plugin_data_pb2.HParamsPluginData(experiment=proto)
    )
    metadata.data_class = DATA_CLASS_TENSOR
    tag, tensor = hparams_metadata.EXPERIMENT_TAG, hparams_metadata.NULL_TENSOR
    return Value(tag, tensor, metadata)


def encode_first_event() -> bytes:
    """Returns the version event, the first in every event file."""
    return event_pb2.Event(
        wall_time=_clock.wall(), file_version="brain.Event:2"
    ).SerializeToString()


def encode_event(
    step: int,
    values: Sequence[Value],
    known_tags: Collection[str] = (),
) -> bytes:
    """Returns one event with all values of a step.

    Args:
        step: Int >= 0.
        values: List of `Value`.
        known_tags: Tags whose metadata is already in the file. Repeating
            metadata would make a log 17% larger.
    """
    event = event_pb2.Event(wall_time=_clock.wall(), step=step)
    add = event.summary.value.add
    for tag, tensor, metadata in values:
        described = {} if tag in known_tags else {"metadata": metadata}
        # In layer names, escape the characters that UTF-8 cannot encode.
        name = tag.encode(errors="backslashreplace")
        add(tag=name.decode(), tensor=tensor, **described)
    return event.SerializeToString()


def _string_tensor(text):
    return tensor_pb2.TensorProto(
        dtype=types_pb2.DT_STRING, tensor_shape={}, string_val=[text]
    )
