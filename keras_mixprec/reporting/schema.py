"""The names and limits of what a log holds: the schema, version 2.

Every tensor of ours carries `{"schema": 2, ...}` as its plugin content, so a
reader knows what it reads. A change that an old reader would misread takes a
new version.
"""

import re

SCHEMA_VERSION = 2
PLUGIN_NAME = "mixed_precision"
HISTOGRAM_PLUGIN_NAME = "histograms"

# The run's own folder inside `log_dir`: TensorBoard's Python loader stops
# reading the older of two live event files in one folder, so sharing one with
# Keras' callback loses half the data.
RUN_FOLDER = "mixprec"
EVENTS_FILE = "events.jsonl"

SKIPPED_TAG = "mixprec/skipped_steps"
NONFINITE_LOSSES_TAG = "mixprec/nonfinite_losses"
NONFINITE_GRADIENTS_TAG = "mixprec/nonfinite_gradients"

# Curves that count on over all runs in a folder.
COUNTERS = (SKIPPED_TAG, NONFINITE_LOSSES_TAG, NONFINITE_GRADIENTS_TAG)

LAYERS_TAG = "mixprec/layers"
# In what that tag says of itself: whether any layer computes in 16 bits.
IN_16_BITS = "in_16_bits"
# In a row of the table of layers: the paths of the layers that feed it. Logs of
# subclassed models have none.
FED_BY = "fed_by"

LAYER_DTYPES_TAG = "mixprec/layer_dtypes"

# What a run is called while another one writes to the folder of that name.
_RUN_FOLDERS = re.compile(rf"{RUN_FOLDER}(_\d+)?")

# Families of chunk tags: `mixprec/events/00000`, `mixprec/events/00001`, ...
EVENTS = "mixprec/events"
SCALE = "mixprec/scale"
HEAT = "mixprec/heat"
ERRORS = "mixprec/error_against_float32"
PERFORMANCE = "mixprec/performance"
LOSS = "mixprec/loss"
EPOCHS = "mixprec/epochs"

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

# Every write of a chunk repeats the whole chunk, because readers keep only a
# sample of a tag's values but always the last one. So its size is what one
# write may cost: 16 events are about 5 kB, 256 rows of the scale 8 kB. Rows of
# the performance come at every reading, so that fewer are repeated.
EVENTS_PER_CHUNK = 16
ROWS_PER_CHUNK = 256
PERFORMANCE_ROWS_PER_CHUNK = 16
LOSS_ROWS_PER_CHUNK = 64
EPOCH_ROWS_PER_CHUNK = 64

# A step of the heat is written once, to a tag that further steps follow in:
# one read of a tag may not exceed 256 MB, which 500 steps of 200 layers and
# 17 metrics stay far below.
HEAT_STEPS_PER_TAG = 500

SCALE_COLUMNS = ("step", "scale", "nonfinite_count", "iterations")

LOSS_COLUMNS = ("step", "loss")

# At the end of each epoch: the steps until it, and when it was, since 1970.
EPOCH_COLUMNS = ("step", "seconds")

# Of plain steps up to one: how many, their seconds, their samples; the median
# and the 95th percentile of a step, where steps were seen one by one; bytes;
# the share of the bytes of layers' outputs that 16 bits save; and of the run so
# far the share of its time that counts as overhead, and seconds of what happens
# once. NaN if not known.
PERFORMANCE_COLUMNS = (
    "step",
    "steps",
    "seconds",
    "samples",
    "step_time_median",
    "step_time_p95",
    "peak_memory",
    "output_bytes_saved",
    "overhead_share",
    "once_seconds",
)

_CHUNK_TAG = re.compile(r"(mixprec/\w+)/(\d{5,})")


def run_folder(number: int) -> str:
    """Returns the name of the folder of the `number`th run at a time."""
    return RUN_FOLDER if number == 1 else f"{RUN_FOLDER}_{number}"


def is_run_folder(name: str) -> bool:
    """Whether a folder of that name is one of a run."""
    return bool(_RUN_FOLDERS.fullmatch(name))


def scale_family(optimizer: str) -> str:
    """Returns the family of an optimizer's scale, `""` for an only one."""
    return f"{SCALE}_{optimizer}" if optimizer else SCALE


def curve_tag(tag: str, optimizer: str) -> str:
    """Returns the tag of an optimizer's curve, `""` for an only one."""
    return f"{tag}/{optimizer}" if optimizer else tag


def chunk_tag(family: str, index: int) -> str:
    """Returns the tag of chunk `index` of a family."""
    return f"{family}/{index:05d}"


def parse_chunk_tag(tag: str) -> tuple[str, int] | None:
    """Returns the family and index of a chunk tag, `None` for other tags."""
    found = _CHUNK_TAG.fullmatch(tag)
    return (found[1], int(found[2])) if found else None
