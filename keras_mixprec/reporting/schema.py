"""The names of what a run's folder holds: the schema, version 3.

Own tables lie beside the event file, which holds what TensorBoard itself draws:
`<table>.jsonl` has a JSON object a line, and what was measured of layers is in
files of records that `record_dtype` describes, named in `<table>.jsonl`. They
are only appended to. A change that an old reader would misread takes a new
version.
"""

import re
from typing import NamedTuple

import numpy as np

SCHEMA_VERSION = 3
PLUGIN_NAME = "mixed_precision"

# The run's own folder inside `log_dir`: TensorBoard's Python loader stops
# reading the older of two live event files in one folder, so sharing one with
# Keras' callback loses half the data.
RUN_FOLDER = "mixprec"

SKIPPED_TAG = "mixprec/skipped_steps"
NONFINITE_LOSSES_TAG = "mixprec/nonfinite_losses"
NONFINITE_GRADIENTS_TAG = "mixprec/nonfinite_gradients"

# The curves that continue over all runs in a folder.
COUNTERS = (SKIPPED_TAG, NONFINITE_LOSSES_TAG, NONFINITE_GRADIENTS_TAG)
COUNTS = "counts"

LAYER_DTYPES_TAG = "mixprec/layer_dtypes"
# In a row of the table of layers: the paths of the layers that feed it. Logs of
# subclassed models have none.
FED_BY = "fed_by"

# What a run is called while another one writes to the folder of that name.
_RUN_FOLDERS = re.compile(rf"{RUN_FOLDER}(_\d+)?")

# The tables: by whom a run was written, what happened, and what was counted.
RUN = "run"
EVENTS = "events"
EVENTS_FILE = "events.jsonl"
LAYERS = "layers"
SCALE = "scale"
LOSS = "loss"
PERFORMANCE = "performance"
HISTOGRAMS = "histograms"

# Tables of what was measured of layers, and of their errors.
HEAT = "heat"
ERRORS = "error_against_float32"

# The trials of a search for the layers that need float32.
TRADE_OFF_EVENT = "trade_off"

# Kinds of events that change what layers compute in.
PRECISION_CHANGES = ("demote", "shrink", "promote", "undo")

# TensorBoard shows curves and histograms in groups, by what is before the first
# slash, in alphabetical order and twelve to a page. So that the first page has
# the loss scale and the counters, whatever there is one of for each layer or
# variable is in groups of its own.
RANGES = "mixprec_ranges"
SPEED = "mixprec_performance"
NORMS_BY_VARIABLE = "mixprec_gradient_norm_by_variable"
OVERFLOWS_BY_VARIABLE = "mixprec_overflow_count"

# The groups of exponent histograms, by what they are of.
EXPONENTS = {
    "activation": "mixprec_activation_exponent",
    "gradient": "mixprec_gradient_exponent",
}


class Row(NamedTuple):
    """Of the speed of plain steps up to one, NaN where it is not known.

    How many, their seconds, their samples; the median and the 95th percentile
    of a step, where steps were seen one by one; bytes; the share of the bytes
    of layers' outputs that 16 bits save; and of the run so far the share of its
    time that counts as overhead, and seconds of what happens once.
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
        """Whether there is a time of a step in it."""
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
    """Whether a folder of that name is one of a run."""
    return bool(_RUN_FOLDERS.fullmatch(name))


def curve_tag(tag: str, optimizer: str) -> str:
    """Returns the tag of an optimizer's curve, `""` for an only one."""
    return f"{tag}/{optimizer}" if optimizer else tag


def is_counter(tag: str) -> bool:
    """Whether a curve counts, of one optimizer or of all."""
    return tag.startswith(COUNTERS)


def record_dtype(layers: int, metrics: int) -> np.dtype:
    """Returns what NumPy reads a file of measurements with.

    Args:
        layers: Int. How many layers were measured.
        metrics: Int. How many numbers of each.
    """
    return np.dtype([("step", "<i8"), ("values", "<f4", (metrics, layers))])
