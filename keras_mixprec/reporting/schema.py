"""The schema of a run's folder, version 3: files, tables and tags.

The event file has the values that TensorBoard draws. All other data is in our
own tables. `<table>.jsonl` has one JSON object per line. Layer measurements
are in binary files, which `<table>.jsonl` lists. `record_dtype` describes their
records. All tables are append-only. Raise the version if old readers would
misread a change.
"""

import re
from typing import NamedTuple

import numpy as np

SCHEMA_VERSION = 3
PLUGIN_NAME = "mixed_precision"

# The run's own folder inside `log_dir`. TensorBoard's Python loader reads only
# the newer of two live event files in a folder, and Keras' callback may write
# one to `log_dir`.
RUN_FOLDER = "mixprec"

SKIPPED_TAG = "mixprec/skipped_steps"
NONFINITE_LOSSES_TAG = "mixprec/nonfinite_losses"
NONFINITE_GRADIENTS_TAG = "mixprec/nonfinite_gradients"

# Counters that a later run in the same folder continues instead of restarting.
COUNTERS = (SKIPPED_TAG, NONFINITE_LOSSES_TAG, NONFINITE_GRADIENTS_TAG)
COUNTS = "counts"

LAYER_DTYPES_TAG = "mixprec/layer_dtypes"
# The key for the layers that feed a layer. Rows of subclassed models lack the
# key, because subclassed models have no graph.
FED_BY = "fed_by"

_RUN_FOLDERS = re.compile(rf"{RUN_FOLDER}(_\d+)?")

# The names of the tables in a run folder.
RUN = "run"
EVENTS = "events"
EVENTS_FILE = "events.jsonl"
LAYERS = "layers"
SCALE = "scale"
LOSS = "loss"
PERFORMANCE = "performance"
HISTOGRAMS = "histograms"

# The table of layer measurements, and the table of errors against float32.
HEAT = "heat"
ERRORS = "error_against_float32"

# The kind of event that has the trials of a search for layers that need
# float32.
TRADE_OFF_EVENT = "trade_off"

# Kinds of events that change the dtypes of layers.
PRECISION_CHANGES = ("demote", "shrink", "promote", "undo")

# TensorBoard groups curves by the text before the first slash and shows twelve
# per page. Curves of single layers and variables have separate groups, so that
# the first page shows the loss scale and the counters.
RANGES = "mixprec_ranges"
SPEED = "mixprec_performance"
NORMS_BY_VARIABLE = "mixprec_gradient_norm_by_variable"
OVERFLOWS_BY_VARIABLE = "mixprec_overflow_count"

# The groups of exponent histograms, by part of a layer.
EXPONENTS = {
    "activation": "mixprec_activation_exponent",
    "gradient": "mixprec_gradient_exponent",
}


class Row(NamedTuple):
    """The speed of plain steps up to `step`. Unknown numbers are NaN.

    `steps`, `seconds` and `samples` are sums. The median and the 95th
    percentile are known only if steps were timed one by one. `overhead_share`
    and `once_seconds` cover the run so far.
    """

    step: float
    steps: float
    seconds: float
    samples: float
    step_time_median: float
    step_time_p95: float
    peak_memory: float
    output_bytes_saved: float
    overhead_share: float
    once_seconds: float

    def is_timed(self) -> bool:
        """Returns whether any step was timed."""
        return self.steps > 0 and self.seconds > 0


COLUMNS: dict[str, tuple] = {
    SCALE: ("step", "scale", "nonfinite_count", "iterations"),
    LOSS: ("step", "loss"),
    PERFORMANCE: Row._fields,
}


def run_folder(number: int) -> str:
    """Returns the folder name of the `number`th simultaneous run."""
    return RUN_FOLDER if number == 1 else f"{RUN_FOLDER}_{number}"


def is_run_folder(name: str) -> bool:
    """Returns whether a folder with this name belongs to a run."""
    return bool(_RUN_FOLDERS.fullmatch(name))


def curve_tag(tag: str, optimizer: str) -> str:
    """Returns the tag of a curve. A single optimizer has the name `""`."""
    return f"{tag}/{optimizer}" if optimizer else tag


def is_counter(tag: str) -> bool:
    """Returns whether a tag is a counter, for one optimizer or for all."""
    return tag.startswith(COUNTERS)


def record_dtype(layers: int, metrics: int) -> np.dtype:
    """Returns the NumPy dtype of a file of measurements.

    Args:
        layers: Int. The number of layers.
        metrics: Int. The number of metrics.
    """
    return np.dtype([("step", "<i8"), ("values", "<f4", (metrics, layers))])
