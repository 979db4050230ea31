"""One conversion: rebuilt, compared with float32, and reported."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import tree

from keras_mixprec._console import one_line
from keras_mixprec.backend import active
from keras_mixprec.devices.memory import bytes_of, weights_bytes
from keras_mixprec.formats import get_format
from keras_mixprec.inference.activations import largest_activations
from keras_mixprec.inference.calibration import to_tensors
from keras_mixprec.inference.drift import Drift
from keras_mixprec.inference.float32_outputs import with_float32_outputs
from keras_mixprec.inference.latency import latency
from keras_mixprec.inference.least_exact import least_exact
from keras_mixprec.inference.loading import loadable
from keras_mixprec.inference.rebuild import Rebuilder
from keras_mixprec.inference.report import ConversionReport
from keras_mixprec.inference.runnable import compilable, runnable
from keras_mixprec.inference.storage import Assignment, by_plan, by_rules
from keras_mixprec.inference.wide_layers import smallest_wide_set
from keras_mixprec.keras_internals import own_non_trainable, own_trainable
from keras_mixprec.numerics.layer_hooks import temporary_policies
from keras_mixprec.policies.layers import walk
from keras_mixprec.policies.names import policy_name
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.rules import PrecisionRule

# Of those whose outputs are off too far, how many decide which layers are wide:
# each costs as many runs as there are layers.
_MOST_BATCHES = 4

# Share of the tolerance that the search may use: it runs operation by
# operation, and what is compiled as a whole rounds elsewhere.
_MARGIN = 0.8


class _Built(NamedTuple):
    """A converted model, what it follows, and how far off it is."""

    model: keras.Model
    assignment: Assignment
    notes: list[str]
    plan: PrecisionPlan
    layers: list[dict]
    drift: Drift


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
        entries: List of its `LayerEntry`s, itself the last.
    """

    def __init__(
        self,
        model: keras.Model,
        batches: list[Any],
        tolerance: float,
        keep_io: bool,
        metric: Callable[[keras.Model], float] | None,
    ):
        self._source = Rebuilder(model, batches[0])
        self.reference = self._source.reference
        self.entries = self._source.entries
        self._bytes = weights_bytes(model)
        self._batches = batches
        self._tolerance = tolerance
        self._keep_io = keep_io
        self._metric = metric
        self._exact = self._predicted_exactly()
        self._largest = largest_activations(
            self.reference, self.entries, batches
        )

    def _predicted_exactly(self):
        try:
            exact = [self.reference.predict_on_batch(x) for x in self._batches]
        except Exception as error:  # Of the user's code, of any kind.
            raise ValueError(
                "`calibration` does not fit the model, which cannot be called "
                f"on it. Received: {one_line(error, 400)}"
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
        assignment = by_rules(self.reference, self.entries, dtype, rules)
        built = self._built(assignment)
        if built.drift.relative > self._tolerance:
            repaired = self._built(self._with_fewest_wide(built))
            # With all in float32 it is, but that is no conversion.
            kept = repaired.drift.relative <= self._tolerance
            built = repaired if kept and repaired.assignment.dtypes() else built
        return self._reported(dtype, built)

    def by_plan(
        self, plan: PrecisionPlan
    ) -> tuple[keras.Model, ConversionReport]:
        """Returns the model in the dtypes of a plan.

        Args:
            plan: A `PrecisionPlan` that fits the model.

        Raises:
            ValueError: If the tolerance is not kept.
        """
        assignment = by_plan(self.entries, self._source.origins, plan)
        return self._reported("plan", self._built(assignment))

    def _built(self, assignment):
        x = to_tensors(self._batches[0])
        reference = (self.reference, self.entries)
        assignment = runnable(*reference, assignment, x)
        while True:
            model, assignment, notes = loadable(self._source, assignment, x)
            plan = _plan_of(model, assignment)
            layers = [self._row(entry, plan) for entry in walk(model)]
            if self._keep_io:
                model = with_float32_outputs(model)
            try:
                drift = self._drift(model, self._batches, self._exact)
                return _Built(model, assignment, notes, plan, layers, drift)
            except active.replay().REFUSALS as error:
                assignment = compilable(*reference, assignment, x, error)

    def _with_fewest_wide(self, built):
        """The assignment, with the fewest layers more that need float32."""
        off = [
            (x, exact)
            for x, exact in zip(self._batches, self._exact, strict=True)
            if self._drift(built.model, [x], [exact]).relative > self._tolerance
        ]
        assignment = built.assignment
        with temporary_policies(assignment.computing(self.entries)):
            found = smallest_wide_set(
                self.reference,
                [x for x, _ in off[:_MOST_BATCHES]],
                tolerance=_MARGIN * self._tolerance,
            )
        for path, verdict in found.verdicts.items():
            assignment = assignment.replaced(path, "float32", verdict.finding)
        return assignment

    def _reported(self, policy, built):
        if not built.drift.relative <= self._tolerance:
            raise ValueError(self._refusal(policy, built))
        model = built.model
        return model, ConversionReport(
            policy=policy,
            plan=built.plan,
            layers=built.layers,
            drift=built.drift.to_list(),
            tolerance=self._tolerance,
            size={"before": self._bytes, "after": weights_bytes(model)},
            latency=latency(self.reference, model, self._batches[0]),
            metric=self._measured(model),
            notes=built.notes,
        )

    def _drift(self, model, batches, outputs):
        found = Drift(getattr(self.reference, "output_names", None) or [])
        for x, exact in zip(batches, outputs, strict=True):
            found.add(exact, model.predict_on_batch(x))
        return found

    def _refusal(self, policy, built):
        drift, x = built.drift, to_tensors(self._batches[0])
        path, error = least_exact(
            self.reference, self.entries, built.assignment, x
        )
        worst = ""
        if path:
            off = (
                "its outputs are not finite"
                if error == math.inf
                else f"it is off by {error:.2g} of its own outputs"
            )
            largest = self._largest.get(path)
            reach = f", which reach {largest:.3g} in float32" if largest else ""
            worst = f" The layer {path!r} is the worst: {off}{reach}."
        far = (
            "are not finite"
            if drift.relative == math.inf
            else f"are off by {drift.relative:.3g} of their norm"
        )
        return (
            f"Converted to {policy} the outputs {far}, and "
            f"tolerance={self._tolerance:g} is allowed.{worst} A plan or a "
            "rule can keep layers in float32."
        )

    def _measured(self, model):
        if self._metric is None:
            return None
        return {
            "name": getattr(self._metric, "__name__", "metric"),
            "before": float(self._metric(self.reference)),
            "after": float(self._metric(model)),
        }

    def _row(self, entry, plan):
        layer, largest = entry.layer, self._largest.get(entry.path)
        own = [*own_trainable(layer), *own_non_trainable(layer)]
        return {
            "path": entry.path,
            "class": type(layer).__name__,
            "policy": plan[entry.path],
            "parameters": sum(math.prod(v.shape) for v in own),
            "bytes": bytes_of(own),
            "largest": largest,
            "headroom_bits": _headroom(layer, largest),
            "reason": plan.reasons.get(entry.path, ""),
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


def _plan_of(model, assignment):
    entries = walk(model)
    policies = {entry.path: policy_name(entry.layer) for entry in entries}
    reasons = {p: r for p, r in assignment.reasons.items() if p in policies}
    return PrecisionPlan(policies, policy_name(model), reasons)
