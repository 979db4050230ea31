"""All metrics of layers and runs, with their units and descriptions.

The log, the report and the page share this table. This module does not import
Keras, so that logs can be read without Keras.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number that is measured for each layer by step, or for a run.

    Attributes:
        name: String.
        unit: String. `"headroom"` (powers of two up to the format's maximum),
            `"count"`, `"share"` (of elements), `"error"` (relative) or
            `"magnitude"` (of a number). The page has a color scale for each of
            these units. Metrics of a run may also have `"seconds"`, `"rate"`
            (per second) and `"bytes"`.
        group: String. The part of a layer, as the page names it.
        title: String. The name of the metric on the page.
        explanation: String. One sentence, or empty if the title is enough.
    """

    name: str
    unit: str
    group: str
    title: str
    explanation: str

    @property
    def worst(self) -> str:
        """`"min"` or `"max"`, whichever is worse."""
        return "min" if self.unit == "headroom" else "max"


# The parts of a layer, each with its group and a description of its tensors.
_PARTS = {
    "activation": ("Activations", "the layer's outputs"),
    "gradient": (
        "Gradients",
        "the gradients that flow back into the layer, loss scale included",
    ),
    "weight_gradient": (
        "Weight gradients",
        "the gradients of the layer's variables, divided by the loss scale. "
        "Gradients that overflowed stay infinite. Ranges are measured with the "
        "loss scale after the step, which is lower after a skipped step",
    ),
    "weight": ("Weights", "the layer's variables"),
}

# The quantities of each part, with unit, title and explanation.
_QUANTITIES = {
    "headroom_bits": (
        "headroom",
        "headroom",
        "Powers of two below the format's maximum, for the largest number in",
    ),
    "nonfinite": ("count", "inf and NaN", "Number of inf and NaN elements in"),
    "zero": ("share", "zeros", "Share of elements that are exactly 0 in"),
    "subnormal": ("share", "subnormal", "Share of subnormal elements in"),
    "below": ("share", "vanishing", "Share of elements that round to 0 in"),
}


def _of(part, quantity):
    group, place = _PARTS[part]
    unit, title, meaning = _QUANTITIES[quantity]
    title, text = f"{group}: {title}", f"{meaning} {place}."
    return Metric(f"{part}_{quantity}", unit, group, title, text)


# The metrics of range measurements, in the order of the columns in the log.
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
        "Largest magnitude in the inputs of an attention layer's softmax.",
    ),
)

# The metrics of a diagnosis, in the order of the columns in the log.
_AUDITED = tuple(
    Metric(
        f"{direction}_error_against_float32",
        "error",
        "Error against float32",
        f"{direction.capitalize()} error against float32",
        f"Relative difference of the {result} from the same layer in float32.",
    )
    for direction, result in (("forward", "output"), ("backward", "gradient"))
)

METRICS = {metric.name: metric for metric in (*_PROBED, *_AUDITED)}

# The columns of the tables in the log, each with `"min"` or `"max"`, whichever
# is worse.
PROBED = {metric.name: metric.worst for metric in _PROBED}
AUDITED = {metric.name: metric.worst for metric in _AUDITED}

# The metrics of a run with unit, title and explanation, in the order of the
# console, the report and the page.
_FIGURES = {
    "step_time": (
        "seconds",
        "step time, mean",
        "The mean step time between two readings of the counters includes slow "
        "steps and waits for input. This is the median of these means.",
    ),
    "step_time_median": (
        "seconds",
        "half of the steps took at most",
        "The median of steps timed one by one, so a few slow steps do not "
        "raise it. Unknown if the host only enqueues steps.",
    ),
    "step_time_p95": ("seconds", "95% of the steps took at most", ""),
    "measured_steps": (
        "count",
        "steps measured",
        "The number of plain steps, on which these figures are based. They "
        "exclude steps that compile, measure or diagnose, the step after each "
        "of these, and the last step of an epoch.",
    ),
    "samples_per_second": (
        "rate",
        "samples a second",
        "Samples per second in plain steps, for all workers together.",
    ),
    "peak_memory": (
        "bytes",
        "peak memory",
        "Most bytes in use on one device so far, as the backend counts them. "
        "Unknown if the process had used more before the run.",
    ),
    "output_bytes_saved": (
        "share",
        "memory saved in outputs, by dtype",
        "Computed, not measured: how much smaller the layers' outputs are than "
        "in float32.",
    ),
    "overhead_share": (
        "share",
        "monitor and tuner, share of the time",
        "Share of the training time in readings, ranges and diagnoses.",
    ),
    "once_seconds": (
        "seconds",
        "monitor and tuner, done once",
        "Time for tasks that run only once: the first and last ranges, and the "
        "first audits.",
    ),
}
PERFORMANCE = {
    name: Metric(name, unit, "Performance", title, explanation)
    for name, (unit, title, explanation) in _FIGURES.items()
}


def describe(name: str, worst: str) -> dict:
    """Returns the page's description of a metric, known or unknown.

    Args:
        name: String.
        worst: String, `"min"` or `"max"` from the log.

    Returns:
        Dict with `"name"`, `"kind"` (the unit), `"worst"`, `"group"`, `"title"`
        and `"explanation"`.
    """
    unknown = Metric(name, "share", "Other", name.replace("_", " "), "")
    known = dataclasses.asdict(METRICS.get(name, unknown))
    return {"name": name, "kind": known.pop("unit"), "worst": worst} | known
