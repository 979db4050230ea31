"""`ConversionReport`: the gains and costs of a conversion."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from keras_mixprec import _html, formats
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.reporting.text_formats import to_json

# The maximum number of layers in the text report, which must fit a screen.
_SHOWN = 20

# The maximum number of layers that the text report names for each reason.
_NAMED = 4

_HEADS = ("layer", "policy", "weights", "largest", "headroom", "reason")


@dataclasses.dataclass(frozen=True, repr=False)
class ConversionReport(_html.HtmlReport):
    """The result of `convert_for_inference`, compared with float32.

    `str()` returns text that fits a screen, and a notebook shows tables.

    Attributes:
        policy: String. `"float16"`, `"bfloat16"` or `"plan"`.
        plan: The `PrecisionPlan` that the new model follows, with the reasons.
        layers: List of dicts, one for each layer, with `path`, `class`,
            `policy`, `reason`, and the `parameters` and `bytes` of its own
            weights. `largest` is the largest magnitude in its inputs and
            outputs in float32. `headroom_bits` is the number of powers of two
            left below overflow in its compute dtype. Both are `None` for layers
            without floating-point tensors.
        drift: List of dicts, one for each floating-point output. `output` is
            its name. `relative` is the norm of the difference from float32,
            divided by the norm in float32. `largest` and `mean` are those of
            the absolute difference. `scale` is the largest magnitude in
            float32. `nonfinite` counts numbers that are finite only in float32.
            `top1_agreement` is the share of samples with the same top class,
            `None` if outputs do not look like class scores.
        tolerance: Float. The largest relative drift that was accepted.
        size: Dict, `before` and `after`: bytes of all weights.
        latency: Dict, `before` and `after`: seconds of a batch in float32 and
            converted, and `speedup`, their ratio. Both models run in turns,
            `pairs` times. `before` and `speedup` are medians.
        notes: List of strings: further advice, such as dtypes that a `.keras`
            file loses.

    Example:
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64)])
    >>> small, report = convert_for_inference(
    ...     model, "float16", calibration=np.ones((8, 4)))
    >>> report.size
    {'before': 1280, 'after': 640}
    """

    policy: str
    plan: PrecisionPlan
    layers: list[dict[str, Any]]
    drift: list[dict[str, Any]]
    tolerance: float
    size: dict[str, int]
    latency: dict[str, Any]
    notes: list[str]

    @property
    def wide_layers(self) -> list[str]:
        """List of the paths of layers that compute in float32."""
        return [
            row["path"] for row in self.layers if row["policy"] == "float32"
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as a dict, and the plan as a dict of policies."""
        fields = dataclasses.fields(self)
        content = {field.name: getattr(self, field.name) for field in fields}
        return content | {"plan": dict(self.plan)}

    def to_json(self) -> str:
        """Returns `to_dict()` as JSON, with inf and NaN as strings."""
        return to_json(self.to_dict(), indent=1)

    def to_html(self) -> str:
        """Returns a page that needs neither a network nor a server."""
        return _html.page("Conversion for inference", self._repr_html_())

    def __str__(self):
        return _text(self)

    __repr__ = __str__

    def _repr_html_(self):
        said = (_html.element("li", line) for line in _sentences(self))
        rows = _html.table(_HEADS, map(_cells, self.layers))
        return _html.element("div", _html.element("ul", *said), rows)


def _text(report):
    rows = sorted(report.layers, key=_urgency)
    # Reasons may be long, so they come below the table.
    table = [_HEADS[:-1], *(_cells(row)[:-1] for row in rows[:_SHOWN])]
    lines = formats.text_table(table)
    if len(rows) > _SHOWN:
        lines.append(f"... and {len(rows) - _SHOWN} more")
    reasons = [formats.fill_screen(line) for line in _reasons(rows)]
    lines += ["", *reasons] if reasons else []
    said = map(formats.fill_screen, _sentences(report))
    return formats.printable("\n".join([*said, "", *lines]))


def _reasons(rows):
    """Yields each reason once, with its layers."""
    paths: dict[str, list[str]] = {}
    for row in rows:
        if row["reason"]:
            paths.setdefault(row["reason"], []).append(row["path"])
    for reason, found in paths.items():
        yield f"{formats.format_names(found, _NAMED)}: {reason}"


def _sentences(report) -> Iterator[str]:
    """Yields the gains and costs of the conversion."""
    wide = report.wide_layers
    kept = f"{len(wide)} of {formats.format_count(len(report.layers), 'layer')}"
    yield f"Converted to {report.policy}: {kept} compute in float32."
    yield _size(report.size)
    yield _latency(report.latency)
    yield from (_drift(row, report.tolerance) for row in report.drift)
    yield from report.notes


def _size(size):
    before, after = size["before"], size["after"]
    share = formats.format_share(after / before if before else 1.0)
    before, after = map(formats.format_bytes, (before, after))
    return f"Weights: {before} before, {after} now ({share})."


def _latency(latency):
    pairs = formats.format_count(latency["pairs"], "pair")
    before, after = (
        formats.format_digits(latency[key] * 1e3) for key in ("before", "after")
    )
    return (
        f"A batch takes {before} ms in float32 and {after} ms converted: "
        f"{latency['speedup']:.2f} times as fast (median of {pairs})."
    )


def _drift(row, tolerance):
    if row["nonfinite"]:
        numbers = formats.format_count(row["nonfinite"], "number")
        return f"Drift of {row['output']}: {numbers} became inf or NaN."
    scale, same = formats.format_digits(row["scale"]), row["top1_agreement"]
    line = (
        f"Drift of {row['output']}: {row['relative']:.2g} of float32's norm "
        f"(tolerance {tolerance:g}). The largest difference is "
        f"{row['largest']:.2g}, the mean {row['mean']:.2g}, for outputs up to "
        f"{scale}."
    )
    if same is None:
        return line
    return f"{line} Same top class: {formats.format_share(same)} of samples."


def _urgency(row):
    bits = row["headroom_bits"]
    return row["policy"] != "float32", math.inf if bits is None else bits


def _cells(row):
    largest, bits = row["largest"], row["headroom_bits"]
    return (
        row["path"],
        row["policy"],
        formats.format_bytes(row["bytes"]),
        "-" if largest is None else f"{largest:.3g}",
        "-" if bits is None else formats.format_bits(bits),
        row["reason"],
    )
