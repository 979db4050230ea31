"""One conversion: rebuilt, compared with float32, and reported."""

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import tree

from keras_mixprec._console import one_line
from keras_mixprec.backend import active
from keras_mixprec.devices.memory import bytes_of
from keras_mixprec.formats import get_format
from keras_mixprec.inference.calibration import text_at_fault, to_tensors
from keras_mixprec.inference.drift import Drift
from keras_mixprec.inference.float32_outputs import with_float32_outputs
from keras_mixprec.inference.lambdas import lambda_at_fault
from keras_mixprec.inference.latency import latency
from keras_mixprec.inference.loading import loadable
from keras_mixprec.inference.refusal import ALL_WIDE, KEEP_WIDE, refusal
from keras_mixprec.inference.report import ConversionReport
from keras_mixprec.inference.runnable import compilable, runnable
from keras_mixprec.inference.storage import Assignment, by_plan, by_rules
from keras_mixprec.inference.variants import Variant, variants
from keras_mixprec.inference.wide_layers import smallest_wide_set
from keras_mixprec.keras_internals import own_non_trainable, own_trainable
from keras_mixprec.numerics.layer_hooks import temporary_policies
from keras_mixprec.policies.layers import LayerEntry, walk
from keras_mixprec.policies.names import policy_name
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.rules import PrecisionRule

# Of those whose outputs are off too far, how many decide which layers are wide:
# each costs as many runs as there are layers.
_MOST_BATCHES = 4

# Share of the tolerance that the search may use: it runs operation by
# operation, and what is compiled as a whole rounds elsewhere.
_MARGIN = 0.8

_log = logging.getLogger("keras_mixprec.inference")


class _Built(NamedTuple):
    """A converted model, what it follows, and how far off it is."""

    variant: Variant
    model: keras.Model
    assignment: Assignment
    notes: list[str]
    plan: PrecisionPlan
    entries: list[LayerEntry]
    drift: Drift

    @property
    def wide(self) -> list[str]:
        """The paths of the layers that compute in float32."""
        return [path for path, p in self.plan.items() if p == "float32"]


class Conversion:
    """Converts one model, in whatever dtypes it is asked for.

    Args:
        model: A built `keras.Model`, which is only read.
        batches: List of batches of inputs.
        tolerance: Float. How far off an output may be.
        keep_io: Boolean. Whether outputs are float32.
        metric: Function of a model that returns a number, or `None`.

    Attributes:
        reference: The model in float32.
    """

    def __init__(
        self,
        model: keras.Model,
        batches: list[Any],
        tolerance: float,
        keep_io: bool,
        metric: Callable[[keras.Model], float] | None,
    ):
        self._as_it_is = Variant(model, batches)
        self.reference = self._as_it_is.reference
        # The state of random numbers is no weight.
        self._bytes = bytes_of(model.weights)
        self._batches = batches
        self._tolerance = tolerance
        self._keep_io = keep_io
        self._metric = metric
        self._exact = self._predicted_exactly()

    def _predicted_exactly(self):
        _log.info("Outputs in float32 of batches: %d", len(self._batches))
        try:
            exact = [self.reference.predict_on_batch(x) for x in self._batches]
        except Exception as error:  # Of the user's code, of any kind.
            said = (
                lambda_at_fault(self.reference, error)
                or text_at_fault(self._batches[0])
                or "`calibration` does not fit the model, which cannot be "
                "called on it."
            )
            raise ValueError(
                f"{said} Received: {one_line(error, 400)}"
            ) from error
        if not all(not np.isnan(a).any() for a in _floats(exact)):
            raise ValueError(
                "In float32 the outputs are not finite on `calibration`, so "
                "precision is not what is wrong."
            )
        return exact

    def in_format(
        self, dtype: str, rules: Iterable[PrecisionRule] | None
    ) -> tuple[keras.Model, ConversionReport]:
        """Returns the model in a format, with the fewest layers wide.

        Args:
            dtype: String, `"float16"` or `"bfloat16"`.
            rules: As for `by_rules`.

        Raises:
            ValueError: If the tolerance is not kept.
        """
        first = self._by_rules(self._as_it_is, dtype, rules)
        _log.info("In %s outputs are off by %.2g", dtype, first.drift.relative)
        if first.drift.relative <= self._tolerance:
            return self._reported(dtype, first)
        return self._reported(dtype, *self._repaired(first, dtype, rules))

    def _by_rules(self, variant, dtype, rules):
        return self._built(
            variant,
            by_rules(variant.reference, variant.entries, dtype, rules),
        )

    def _repaired(self, first, dtype, rules):
        """With numbers that fit, or else with the fewest layers in float32.

        What it was given, if even that does not keep the tolerance; and what
        to advise then.
        """
        _log.info("Searching which layers need float32, in many runs")
        tried = [first]
        for variant in variants(self._as_it_is.source, self._batches, dtype):
            built = self._by_rules(variant, dtype, rules)
            if built.drift.relative <= self._tolerance:
                return built, ""
            tried.append(built)
        widened = [self._with_fewest_wide(one) for one in tried]
        # With all in float32 it is kept, but that is no conversion.
        kept = [x for x in widened if x.drift.relative <= self._tolerance]
        parts = [one for one in kept if one.assignment.dtypes()]
        built = min(parts, key=lambda one: len(one.wide), default=first)
        return built, ALL_WIDE if kept else KEEP_WIDE

    def by_plan(
        self, plan: PrecisionPlan
    ) -> tuple[keras.Model, ConversionReport]:
        """Returns the model in the dtypes of a plan.

        Args:
            plan: A `PrecisionPlan` that fits the model.

        Raises:
            ValueError: If the tolerance is not kept.
        """
        own = self._as_it_is
        assignment = by_plan(own.entries, own.source.origins, plan)
        return self._reported("plan", self._built(own, assignment))

    def _built(self, variant, assignment):
        x = to_tensors(self._batches[0])
        reference = (variant.reference, variant.entries)
        assignment = runnable(*reference, assignment, x)
        while True:
            model, assignment, notes = loadable(variant.source, assignment, x)
            plan = _plan_of(model, assignment, variant.reasons)
            entries = walk(model)
            if self._keep_io:
                model = with_float32_outputs(model)
            try:
                drift = self._drift(model, self._batches, self._exact)
                return _Built(
                    variant, model, assignment, notes, plan, entries, drift
                )
            except active.replay().REFUSALS as error:
                assignment = compilable(*reference, assignment, x, error)

    def _with_fewest_wide(self, built):
        """What is built with the fewest layers more that need float32."""
        off = [
            (x, exact)
            for x, exact in zip(self._batches, self._exact, strict=True)
            if self._drift(built.model, [x], [exact]).relative > self._tolerance
        ]
        variant, assignment = built.variant, built.assignment
        with temporary_policies(assignment.computing(variant.entries)):
            found = smallest_wide_set(
                variant.reference,
                [x for x, _ in off[:_MOST_BATCHES]],
                tolerance=_MARGIN * self._tolerance,
            )
        for path, verdict in found.verdicts.items():
            assignment = assignment.replaced(path, "float32", verdict.finding)
        rebuilt = self._built(variant, assignment)
        if found.is_smallest:
            return rebuilt
        return rebuilt._replace(notes=[*rebuilt.notes, _not_all_tried(found)])

    def _reported(self, policy, built, advice=KEEP_WIDE):
        if not built.drift.relative <= self._tolerance:
            own = built.variant, built.assignment, self._batches
            raise refusal(
                policy, built.drift.relative, self._tolerance, *own, advice
            )
        model = built.model
        _log.info("Measuring ranges and latency")
        largest = built.variant.largest(self._batches)
        return model, ConversionReport(
            policy=policy,
            plan=built.plan,
            layers=[_row(entry, built, largest) for entry in built.entries],
            drift=built.drift.to_list(),
            tolerance=self._tolerance,
            size={"before": self._bytes, "after": bytes_of(model.weights)},
            latency=latency(self.reference, model, self._batches[0]),
            metric=self._measured(model),
            notes=built.variant.notes + built.notes + _unconverted(built),
        )

    def _drift(self, model, batches, outputs):
        found = Drift(getattr(self.reference, "output_names", None) or [])
        for x, exact in zip(batches, outputs, strict=True):
            found.add(exact, model.predict_on_batch(x))
        return found

    def _measured(self, model):
        if self._metric is None:
            return None
        return {
            "name": getattr(self._metric, "__name__", "metric"),
            "before": float(self._metric(self.reference)),
            "after": float(self._metric(model)),
        }


def _unconverted(built):
    if built.assignment.dtypes():
        return []
    return [
        "No layer was converted: those that are quantized stay as they are, "
        "and so do those that only look words up."
    ]


def _not_all_tried(found):
    return (
        f"Not each of {len(found.layers)} layers in float32 was tried in 16 "
        "bits again, since that is a run of the model for each: fewer may do."
    )


def _row(entry, built, largest):
    layer, path = entry.layer, entry.path
    own = [*own_trainable(layer), *own_non_trainable(layer)]
    return {
        "path": path,
        "class": type(layer).__name__,
        "policy": built.plan[path],
        "parameters": sum(math.prod(v.shape) for v in own),
        "bytes": bytes_of(own),
        "largest": largest.get(path),
        "headroom_bits": _headroom(layer, largest.get(path)),
        "rescaled_bits": built.variant.rescaled.get(path, 0),
        "clamped": path in built.variant.clamped,
        "reason": built.plan.reasons.get(path, ""),
    }


def _floats(outputs):
    return [a for a in tree.flatten(outputs) if "float" in str(a.dtype)]


def _headroom(layer, largest):
    if not largest:
        return None
    if largest == math.inf:
        return -math.inf
    maximum = get_format(layer.compute_dtype).maximum
    return math.log2(maximum) - math.log2(largest)


def _plan_of(model, assignment, more):
    entries = walk(model)
    policies = {entry.path: policy_name(entry.layer) for entry in entries}
    reasons = more | assignment.reasons
    reasons = {p: r for p, r in reasons.items() if p in policies}
    return PrecisionPlan(policies, policy_name(model), reasons)
