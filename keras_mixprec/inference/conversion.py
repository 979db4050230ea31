"""One conversion: rebuilt, compared with float32, and reported."""

import logging
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import tree

from keras_mixprec._console import one_line
from keras_mixprec.backend import active
from keras_mixprec.devices.memory import bytes_of
from keras_mixprec.diagnosis.compare import largest, nonfinite
from keras_mixprec.diagnosis.weights import weight_overflows
from keras_mixprec.formats import get_format
from keras_mixprec.inference import wide_layers
from keras_mixprec.inference.assignment import Assignment, by_plan, by_rules
from keras_mixprec.inference.calibration import to_tensors
from keras_mixprec.inference.comparison import (
    drift,
    float_outputs,
    largest_activations,
    largest_drift,
    latency,
)
from keras_mixprec.inference.loading import loadable
from keras_mixprec.inference.rebuild import Rebuilder, with_float32_outputs
from keras_mixprec.inference.report import ConversionReport
from keras_mixprec.keras_internals import (
    calls_in,
    functional_of,
    own_non_trainable,
    own_trainable,
)
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.layer_hooks import in_float32, temporary_policies
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
    """A converted model, what it follows, and what it returns."""

    model: keras.Model
    assignment: Assignment
    notes: list[str]
    plan: PrecisionPlan
    entries: list[LayerEntry]
    outputs: list[list]


class Conversion:
    """Converts one model, in whatever dtypes it is asked for.

    Args:
        model: A built `keras.Model`, which is only read.
        batches: List of batches of inputs.
        tolerance: Float. How far off an output may be.
        keep_io: Boolean. Whether outputs are float32.
    """

    def __init__(
        self,
        model: keras.Model,
        batches: list[Any],
        tolerance: float,
        keep_io: bool,
    ):
        self._source = Rebuilder(model, batches[0])
        self._reference = self._source.reference
        self._entries = self._source.entries
        # The state of random numbers is no weight.
        self._bytes = bytes_of(model.weights)
        self._batches = batches
        self._tolerance = tolerance
        self._keep_io = keep_io
        self._exact = self._predicted_exactly()

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
        start = by_rules(self._reference, self._entries, dtype, rules)
        with temporary_policies(start.computing(self._entries)):
            culprits = weight_overflows(self._reference)
        built = self._built(self._with_wide(start, culprits))
        error = largest_drift(self._drift(built))
        _log.info("In %s outputs are off by %.2g", dtype, error)
        if error > self._tolerance:
            built = self._with_fewest_wide(built)
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
        assignment = by_plan(self._entries, self._source.origins, plan)
        return self._reported("plan", self._built(assignment))

    def _predicted_exactly(self):
        _log.info("Outputs in float32 of batches: %d", len(self._batches))
        try:
            exact = self._predicted(self._reference)
        except Exception as error:  # Of the user's code, of any kind.
            raise ValueError(
                "The model cannot be called on `calibration`. Does that fit "
                "its inputs, and do the functions of `Lambda` layers import "
                f"what they use? Received: {one_line(error, 400)}"
            ) from error
        if any(np.isnan(a).any() for batch in exact for a in batch):
            raise ValueError(
                "In float32 the outputs are not finite on `calibration`, so "
                "precision is not what is wrong."
            )
        return exact

    def _predicted(self, model):
        return [float_outputs(model.predict_on_batch(x)) for x in self._batches]

    def _built(self, assignment):
        """The model without 16 bits in what its code or XLA refuses there."""
        while True:
            try:
                return self._build(assignment)
            except active.replay().REFUSALS as error:
                with temporary_policies(assignment.computing(self._entries)):
                    raising = wide_layers.layers_that_raise(
                        self._reference, self._batches[0]
                    )
                if not raising:
                    raise ValueError(
                        f"The model {self._reference.name!r} cannot be called "
                        f"in 16 bits. Received: {one_line(error, 400)}"
                    ) from error
                assignment = self._with_wide(assignment, raising)

    def _build(self, assignment):
        model, assignment, notes = loadable(
            self._source, assignment, to_tensors(self._batches[0])
        )
        plan, entries = _plan_of(model, assignment), walk(model)
        if self._keep_io:
            model = with_float32_outputs(model)
        outputs = self._predicted(model)
        return _Built(model, assignment, notes, plan, entries, outputs)

    def _with_fewest_wide(self, built):
        """The model with the fewest layers more that need float32.

        As it was if all of it would have to be.
        """
        _log.info("Searching which layers need float32, in many runs")
        errors = [
            largest_drift(drift([], [exact], [low]))
            for exact, low in zip(self._exact, built.outputs, strict=True)
        ]
        worst = sorted(range(len(errors)), key=lambda n: -errors[n])
        off = [n for n in worst if errors[n] > self._tolerance]
        assignment = built.assignment
        with temporary_policies(assignment.computing(self._entries)):
            culprits, is_smallest = wide_layers.wide_layers(
                self._reference,
                [self._batches[n] for n in (off or worst)[:_MOST_BATCHES]],
                _MARGIN * self._tolerance,
            )
        assignment = self._with_wide(assignment, culprits)
        if not culprits or not assignment.dtypes():
            return built
        rebuilt = self._built(assignment)
        if is_smallest:
            return rebuilt
        note = (
            f"The search ended before each of {len(culprits)} layers in "
            "float32 was tried in 16 bits again: fewer may do."
        )
        return rebuilt._replace(notes=[*rebuilt.notes, note])

    def _with_wide(self, assignment, culprits):
        paths = {id(entry.layer): entry.path for entry in self._entries}
        for culprit in culprits:
            own = {paths.get(id(layer)) for layer in culprit.layers}
            own &= assignment.policies.keys()
            why = wide_layers.reason(culprit)
            assignment = assignment.replaced(own, "float32", why)
        return assignment

    def _reported(self, policy, built):
        found = self._drift(built)
        ranges = largest_activations(
            self._reference, self._entries, self._batches
        )
        if not largest_drift(found) <= self._tolerance:
            raise ValueError(
                self._refusal(policy, built, largest_drift(found), ranges)
            )
        model = built.model
        _log.info("Measuring latency")
        return model, ConversionReport(
            policy=policy,
            plan=built.plan,
            layers=[_row(e, built.plan, ranges) for e in built.entries],
            drift=found,
            tolerance=self._tolerance,
            size={"before": self._bytes, "after": bytes_of(model.weights)},
            latency=latency(self._reference, model, self._batches[0]),
            notes=built.notes,
        )

    def _drift(self, built):
        names = getattr(self._reference, "output_names", None) or []
        return drift(names, self._exact, built.outputs)

    def _refusal(self, policy, built, error, ranges):
        """What is off, by how much, and what helps."""
        x = self._batches[0]
        with temporary_policies(built.assignment.computing(self._entries)):
            path, own = wide_layers.least_exact(self._reference, x)
            worst = _overflowing_operation(self._reference, x)
        if path and not worst:
            off = f"it is off by {own:.2g} of its own outputs"
            off = off if math.isfinite(own) else "its outputs are not finite"
            reach = f"{ranges.get(path, 0.0):.3g} in float32"
            worst = f"The layer {path!r} is the worst: {off}, up to {reach}. "
        off = f"are off by {error:.3g} of their norm"
        off = off if math.isfinite(error) else "are not finite"
        advice = (
            "A plan can keep layers in float32."
            if policy == "plan"
            else "No smaller set of layers in float32 keeps it: allow more "
            "with `tolerance`, or take another format."
        )
        return (
            f"Converted to {policy} the outputs {off}, and "
            f"tolerance={self._tolerance:g} is allowed. {worst}{advice}"
        )


def _overflowing_operation(model, x):
    """On the first operation of a graph that overflows and is no layer."""
    functional = functional_of(model)
    if functional is None:
        return ""
    operations = [
        (operation, tensor)
        for operation in functional.operations
        for node in calls_in(functional, operation)
        for tensor in node.output_tensors
        if "float" in tensor.dtype and node.input_tensors
    ]
    graph = keras.Model(functional.input, [t for _, t in operations])
    low = graph(to_tensors(x), training=False)
    with in_float32(functional):
        exact = graph(to_tensors(x), training=False)
    arrays = (map(to_array, tree.flatten(found)) for found in (low, exact))
    for (operation, _), narrow, wide in zip(operations, *arrays, strict=True):
        if nonfinite([narrow]) > nonfinite([wide]):
            if isinstance(operation, keras.layers.Layer):
                return ""
            return (
                f"The operation {operation.name!r} of the graph, which is no "
                "layer, is the first to overflow: in float32 it reaches "
                f"{largest([wide]):.3g}. It computes in float32 behind a layer "
                "in float32, such as `keras.layers.Identity(dtype='float32')`. "
            )
    return ""


def _row(entry, plan, ranges):
    layer, path = entry.layer, entry.path
    own = [*own_trainable(layer), *own_non_trainable(layer)]
    return {
        "path": path,
        "class": type(layer).__name__,
        "policy": plan[path],
        "parameters": sum(math.prod(v.shape) for v in own),
        "bytes": bytes_of(own),
        "largest": ranges.get(path),
        "headroom_bits": _headroom(layer, ranges.get(path)),
        "reason": plan.reasons.get(path, ""),
    }


def _headroom(layer, largest):
    if not largest:
        return None
    if largest == math.inf:
        return -math.inf
    maximum = get_format(layer.compute_dtype).maximum
    return math.log2(maximum) - math.log2(largest)


def _plan_of(model, assignment):
    policies = {entry.path: policy_name(entry.layer) for entry in walk(model)}
    reasons = {
        path: why
        for path, why in assignment.reasons.items()
        if why and path in policies
    }
    return PrecisionPlan(policies, policy_name(model), reasons)
