"""`ConversionReport`: what a conversion keeps, saves and costs."""

import dataclasses
from typing import Any

from keras_mixprec._html import HtmlReport
from keras_mixprec.inference import report_text
from keras_mixprec.inference.exports import kept_by_exports
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.reporting.text_formats import to_json


@dataclasses.dataclass(frozen=True, repr=False)
class ConversionReport(HtmlReport):
    """What `convert_for_inference` did, and how far the result is from float32.

    `str()` gives text of a screen, a notebook shows tables.

    Attributes:
        policy: String. `"float16"`, `"bfloat16"`, `"float32"` if nothing was
            converted, or `"plan"`.
        plan: The `PrecisionPlan` that the new model follows, with the reasons.
        layers: List of dicts, one for each layer: `path`, `class`, `policy`,
            `parameters` and `bytes` of its own weights, `largest`, the largest
            magnitude in its inputs and outputs in float32 on the calibration
            data, `headroom_bits`, by how many powers of two that could grow
            before it overflows the layer's compute dtype (the last two `None`
            where it has no floating-point numbers), `rescaled_bits`, the power
            of two by which its outputs are smaller than before, `clamped`,
            whether its outputs are clamped to the format's maximum, and
            `reason`.
        drift: List of dicts, one for each floating-point output: `output`,
            `relative`, the norm of the difference from float32 as a share of
            the output's norm, `largest` and `mean` of the absolute difference,
            `scale`, the largest magnitude in float32, `nonfinite`, how many
            numbers are infinite or NaN that are not in float32, and
            `top1_agreement`, the share of samples of which the same class is
            first, `None` where outputs do not look like scores of classes.
        tolerance: Float. The largest relative drift that was accepted.
        size: Dict, `before` and `after`: bytes of all weights.
        latency: Dict, `before` and `after`: seconds of a batch in float32 and
            converted, and `speedup`, their ratio: of pairs that ran one after
            the other the one with the median ratio; `pairs`, how many.
        metric: Dict, `name`, `before` in float32 and `after`; `None` without.
        notes: List of strings: what else a caller should know, such as what a
            `.keras` file cannot keep.

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
    metric: dict[str, Any] | None
    notes: list[str]

    @property
    def wide_layers(self) -> list[str]:
        """List of the paths of layers that compute in float32."""
        return [
            row["path"] for row in self.layers if row["policy"] == "float32"
        ]

    @property
    def exports(self) -> dict[str, str]:
        """Dict from the formats of `model.export` to what each one keeps."""
        return kept_by_exports(self.plan)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as a dict; the plan as one of path to policy."""
        fields = dataclasses.fields(self)
        content = {field.name: getattr(self, field.name) for field in fields}
        return content | {"plan": dict(self.plan), "exports": self.exports}

    def to_json(self) -> str:
        """Returns `to_dict()` as JSON, inf and NaN as strings."""
        return to_json(self.to_dict(), indent=1)

    def to_html(self) -> str:
        """Returns one page that needs neither a network nor a server."""
        return report_text.page(self)

    def __str__(self):
        return report_text.text(self)

    __repr__ = __str__

    def _repr_html_(self):
        return report_text.fragment(self)
