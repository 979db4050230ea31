"""Every number that is measured of a layer or a run: its unit and its texts.

The log, the report and the page read this one table. It imports nothing,
because a log can be read where Keras is not installed.
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
            each. Units of a run are also `"seconds"`, `"rate"` (per second)
            and `"bytes"`.
        group: String, the part of a layer that it is about, as the page names
            it.
        title: String. Its name on the page.
        explanation: String. One sentence, or empty if the title says it all.
    """

    name: str
    unit: str
    group: str
    title: str
    explanation: str

    @property
    def worst(self) -> str:
        """Which end is the worse, `"min"` or `"max"`."""
        return "min" if self.unit == "headroom" else "max"


# Name: group, and what is measured.
_PARTS = {
    "activation": ("Activations", "the layer's outputs"),
    "gradient": (
        "Gradients",
        "the gradients that flow back into the layer, loss scale included",
    ),
    "weight_gradient": (
        "Weight gradients",
        "the gradients of the layer's variables, with the loss scale divided "
        "out. Gradients that overflowed stay infinite. Ranges are measured "
        "with the loss scale after the step, which is lower after a skipped "
        "step",
    ),
    "weight": ("Weights", "the layer's variables"),
}

# Name: unit, title and explanation.
_QUANTITIES = {
    "headroom_bits": (
        "headroom",
        "headroom",
        "Powers of two up to the format's maximum from the largest number in",
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
        "Largest magnitude in the inputs of an attention layer's softmax.",
    ),
)

# The metrics of a diagnosis, in the order of the log's columns.
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

# The columns of each table in the log, and which end is the worse.
PROBED = {metric.name: metric.worst for metric in _PROBED}
AUDITED = {metric.name: metric.worst for metric in _AUDITED}

# The metrics of a run, in the order of the console, the report and the page.
# Name: unit, title and explanation.
_FIGURES = {
    "step_time": (
        "seconds",
        "step time, mean",
        "Mean time of the steps between two readings of the counters, with "
        "slow steps and waits for input. The median of these means.",
    ),
    "step_time_median": (
        "seconds",
        "half of the steps took at most",
        "Each step timed on its own, so a few slow steps do not raise it. "
        "Unknown where the host only enqueues steps.",
    ),
    "step_time_p95": ("seconds", "95% of the steps took at most", ""),
    "measured_steps": (
        "count",
        "steps measured",
        "Plain steps, which these figures are about. Compiling, measured and "
        "diagnosed steps, the step after each of them and the last step of an "
        "epoch are left out.",
    ),
    "samples_per_second": (
        "rate",
        "samples a second",
        "Samples in plain steps, of all workers together.",
    ),
    "peak_memory": (
        "bytes",
        "peak memory",
        "Most bytes in use on one device so far, as the backend counts them. "
        "Unknown if the process had used more before.",
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
        "Time of what happens once: the first and the last ranges, the first "
        "audits.",
    ),
}
PERFORMANCE = {
    name: Metric(name, unit, "Performance", title, explanation)
    for name, (unit, title, explanation) in _FIGURES.items()
}


def describe(name: str, worst: str) -> dict:
    """Returns what the page shows of a metric, also of an unknown one.

    Args:
        name: String.
        worst: String, as the log has it.

    Returns:
        Dict with `"name"`, `"kind"` (the unit), `"worst"`, `"group"`, `"title"`
        and `"explanation"`.
    """
    unknown = Metric(name, "share", "Other", name.replace("_", " "), "")
    known = dataclasses.asdict(METRICS.get(name, unknown))
    return {"name": name, "kind": known.pop("unit"), "worst": worst} | known
