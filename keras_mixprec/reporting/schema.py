"""The names in a run's folder: the schema, version 3.

The event file has the values that TensorBoard draws. Our own tables lie beside
it. `<table>.jsonl` has a JSON object on each line. Measurements of layers are
in files of records, which `record_dtype` describes and `<table>.jsonl` lists.
All tables are append-only. A change that old readers would misread needs a new
version.
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

# The curves that continue over all runs in a folder.
COUNTERS = (SKIPPED_TAG, NONFINITE_LOSSES_TAG, NONFINITE_GRADIENTS_TAG)
COUNTS = "counts"

LAYER_DTYPES_TAG = "mixprec/layer_dtypes"
# The key for the layers that feed a layer. Subclassed models do not have it.
FED_BY = "fed_by"

_RUN_FOLDERS = re.compile(rf"{RUN_FOLDER}(_\d+)?")

# The tables.
RUN = "run"
EVENTS = "events"
EVENTS_FILE = "events.jsonl"
LAYERS = "layers"
SCALE = "scale"
LOSS = "loss"
PERFORMANCE = "performance"
HISTOGRAMS = "histograms"

# Tables of measurements of layers, and of their errors.
HEAT = "heat"
ERRORS = "error_against_float32"

# The trials of a search for the layers that need float32.
TRADE_OFF_EVENT = "trade_off"

# Kinds of events that change the dtypes of layers.
PRECISION_CHANGES = ("demote", "shrink", "promote", "undo")

# TensorBoard groups curves by the part before the first slash, in alphabetical
# order, with twelve on a page. Curves of each layer or variable have their own
# groups, so the first page shows the loss scale and the counters.
RANGES = "mixprec_ranges"
SPEED = "mixprec_performance"
NORMS_BY_VARIABLE = "mixprec_gradient_norm_by_variable"
OVERFLOWS_BY_VARIABLE = "mixprec_overflow_count"

# The groups of exponent histograms, by part.
EXPONENTS = {
    "activation": "mixprec_activation_exponent",
    "gradient": "mixprec_gradient_exponent",
}


class Row(NamedTuple):
    """The speed of plain steps up to `step`; unknown numbers are NaN.

    `steps`, `seconds` and `samples` are sums. Only steps timed one by one have
    a median and a 95th percentile. `overhead_share` and `once_seconds` are
    about the run so far.
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
        """Returns whether it has the time of any step."""
        return self.steps > 0 and self.seconds > 0


COLUMNS: dict[str, tuple] = {
    SCALE: ("step", "scale", "nonfinite_count", "iterations"),
    LOSS: ("step", "loss"),
    PERFORMANCE: Row._fields,
}


def run_folder(number: int) -> str:
    """Returns the name of the folder of the `number`th run at a time."""
    return RUN_FOLDER if number == 1 else f"{RUN_FOLDER}_{number}"


def is_run_folder(name: str) -> bool:
    """Returns whether a folder of that name is one of a run."""
    return bool(_RUN_FOLDERS.fullmatch(name))


def curve_tag(tag: str, optimizer: str) -> str:
    """Returns the tag of an optimizer's curve; an only one has no name."""
    return f"{tag}/{optimizer}" if optimizer else tag


def is_counter(tag: str) -> bool:
    """Returns whether a curve counts, of one optimizer or of all."""
    return tag.startswith(COUNTERS)


def record_dtype(layers: int, metrics: int) -> np.dtype:
    """Returns the NumPy dtype of a file of measurements.

    Args:
        layers: Int. The number of layers.
        metrics: Int. The number of metrics.
    """
    return np.dtype([("step", "<i8"), ("values", "<f4", (metrics, layers))])
