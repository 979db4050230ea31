"""Every measured number of a layer, or a run: its unit, and worse end.

The one table that the log, the report and the page read. It imports nothing,
since those who read a log have no Keras.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number that is measured of each layer by step, or of a run.

    Attributes:
        name: String.
        unit: String. `"headroom"` (powers of two up to the format's maximum),
            `"count"`, `"share"` (of elements), `"error"` (relative) or
            `"magnitude"` (of a number). The page has a scale of colours for
            each. Units of a run are also `"seconds"`, `"rate"` (a second) and
            `"bytes"`.
        group: String, which part of a layer it is about, as the page names it.
        title: String. Its name on the page.
        explanation: String. One sentence.
        worst: String. `"min"` or `"max"`, whichever is the worse.
    """

    name: str
    unit: str
    group: str
    title: str
    explanation: str
    worst: str = "max"


# Name: group, and what it is.
_PARTS = {
    "activation": ("Activations", "what the layer puts out"),
    "gradient": (
        "Gradients",
        "what flows back into the layer, loss scale included",
    ),
    "weight_gradient": (
        "Weight gradients",
        "gradients of the layer's variables, with the loss scale divided out. "
        "Gradients that overflowed stay infinite. Ranges are measured with the "
        "scale after the step, which is lower than a skipped step's",
    ),
    "weight": ("Weights", "the layer's variables"),
}

# Name: unit, title, explanation and the worse end.
_QUANTITIES = {
    "headroom_bits": (
        "headroom",
        "headroom",
        "Powers of two between the largest magnitude and the format's maximum",
        "min",
    ),
    "nonfinite": (
        "count",
        "inf and NaN",
        "How many elements are infinite or not a number",
        "max",
    ),
    "zero": (
        "share",
        "zeros",
        "Share of elements that are exactly zero",
        "max",
    ),
    "subnormal": (
        "share",
        "subnormal",
        "Share of elements that already lose digits",
        "max",
    ),
    "below": (
        "share",
        "vanishing",
        "Share of elements too small for the format: they become 0",
        "max",
    ),
}


def _of(part, quantity):
    group, what = _PARTS[part]
    unit, title, meaning, worst = _QUANTITIES[quantity]
    return Metric(
        f"{part}_{quantity}",
        unit,
        group,
        f"{group}: {title}",
        f"{meaning}: {what}.",
        worst,
    )


# The metrics of a reading of ranges, in the order of the log's columns.
_PROBED = (
    *(
        _of(part, quantity)
        for part in ("activation", "gradient", "weight_gradient")
        for quantity in _QUANTITIES
    ),
    _of("weight", "headroom_bits"),
    Metric(
        "lost_updates",
        "share",
        "Weights",
        "Weights: lost updates",
        "Share of weights whose update is too small to change them.",
    ),
    Metric(
        "attention_logits_largest",
        "magnitude",
        "Attention",
        "Attention: largest logit",
        "Largest magnitude of what the softmax of an attention layer is given.",
    ),
)

_AGAINST_FLOAT32 = "Error against float32"

# The metrics of a diagnosis, in the order of the log's columns.
_AUDITED = (
    Metric(
        "forward_error_against_float32",
        "error",
        _AGAINST_FLOAT32,
        "Forward error against float32",
        "Relative difference of the output from the same layer in float32.",
    ),
    Metric(
        "backward_error_against_float32",
        "error",
        _AGAINST_FLOAT32,
        "Backward error against float32",
        "Relative difference of the gradient from the same layer in float32.",
    ),
)

METRICS = {metric.name: metric for metric in (*_PROBED, *_AUDITED)}

# The columns of each table in the log, and which end is the worse.
PROBED = {metric.name: metric.worst for metric in _PROBED}
AUDITED = {metric.name: metric.worst for metric in _AUDITED}


def _of_run(name, unit, title, explanation):
    return Metric(name, unit, "Performance", title, explanation)


# The metrics of a run, in the order of the console, the report and the page.
_PERFORMANCE = (
    _of_run(
        "step_time",
        "seconds",
        "step time, mean",
        "The mean of the steps between two readings of the counters, slow "
        "ones and waits for input included, and of these means the "
        "median.",
    ),
    _of_run(
        "step_time_median",
        "seconds",
        "half of the steps took at most",
        "Each step timed on its own, which a few slow ones do not raise as "
        "they do the step time; not known where the host only enqueues "
        "them.",
    ),
    _of_run(
        "step_time_p95",
        "seconds",
        "95% of the steps took at most",
        "Each step timed on its own; not known where the host only "
        "enqueues them.",
    ),
    _of_run(
        "measured_steps",
        "count",
        "steps measured",
        "Plain steps that these figures are of: left out are compiling, "
        "measured and diagnosed steps, the one behind each, and an epoch's "
        "last.",
    ),
    _of_run(
        "samples_per_second",
        "rate",
        "samples a second",
        "Samples that plain steps train on, of all workers together.",
    ),
    _of_run(
        "peak_memory",
        "bytes",
        "peak memory",
        "Most bytes in use on one device so far, as the backend accounts "
        "for them; not known if the process had used more before.",
    ),
    _of_run(
        "output_bytes_saved",
        "share",
        "memory saved in outputs, by dtype",
        "Computed, not measured: share of the bytes of layers' outputs "
        "that float32 would take beyond those of now.",
    ),
    _of_run(
        "overhead_share",
        "share",
        "monitor and tuner, share of the time",
        "Share of the training time in readings, ranges and diagnoses.",
    ),
    _of_run(
        "once_seconds",
        "seconds",
        "monitor and tuner, done once",
        "Seconds of what happens once: the first and the last ranges, the "
        "first audits.",
    ),
)
PERFORMANCE = {metric.name: metric for metric in _PERFORMANCE}


def describe(name: str, worst: str) -> dict:
    """Returns what the page shows of a metric, of an unknown one as well.

    Args:
        name: String.
        worst: String, as the log has it.

    Returns:
        Dict with `"name"`, `"kind"` (its unit), `"worst"`, `"group"`, `"title"`
        and `"explanation"`.
    """
    title = name.replace("_", " ")
    unknown = Metric(name, "share", "Other", title, "")
    metric = METRICS.get(name, unknown)
    return {
        "name": name,
        "kind": metric.unit,
        "worst": worst,
        "group": metric.group,
        "title": metric.title,
        "explanation": metric.explanation,
    }
