"""One conversion: rebuilt, compared with float32, and reported."""

import math
from collections.abc import Callable
from typing import Any

import keras

from keras_mixprec.devices.memory import bytes_of, weights_bytes
from keras_mixprec.formats import get_format
from keras_mixprec.inference.activations import largest_activations
from keras_mixprec.inference.drift import Drift
from keras_mixprec.inference.float32_outputs import with_float32_outputs
from keras_mixprec.inference.latency import latency
from keras_mixprec.inference.rebuild import Rebuilder
from keras_mixprec.inference.report import ConversionReport
from keras_mixprec.inference.storage import Assignment
from keras_mixprec.keras_internals import own_non_trainable, own_trainable
from keras_mixprec.policies.layers import walk
from keras_mixprec.policies.names import policy_name
from keras_mixprec.policies.plan import PrecisionPlan


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
        origins: Dict from their paths to the `LayerEntry`s of the model.
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
        self.origins = self._source.origins
        self._bytes = weights_bytes(model)
        self._batches = batches
        self._tolerance = tolerance
        self._keep_io = keep_io
        self._metric = metric
        self._exact = [self.reference.predict_on_batch(x) for x in batches]
        self._largest = largest_activations(
            self.reference, self.entries, batches
        )

    def convert(
        self, policy: str, assignment: Assignment
    ) -> tuple[keras.Model, ConversionReport]:
        """Returns the model in these dtypes, and the report.

        Args:
            policy: String, what the report calls it.
            assignment: `Assignment`.

        Raises:
            ValueError: If the tolerance is not kept.
        """
        model = self._source.build(assignment.policies)
        plan = _plan_of(model, assignment)
        layers = [self._row(entry, plan) for entry in walk(model)]
        if self._keep_io:
            model = with_float32_outputs(model)
        drift = self._drift(model)
        report = ConversionReport(
            policy=policy,
            plan=plan,
            layers=layers,
            drift=drift.to_list(),
            tolerance=self._tolerance,
            size={"before": self._bytes, "after": weights_bytes(model)},
            latency=latency(self.reference, model, self._batches[0]),
            metric=self._measured(model),
            notes=[],
        )
        return model, report

    def _drift(self, model):
        found = Drift(getattr(self.reference, "output_names", None) or [])
        for x, exact in zip(self._batches, self._exact, strict=True):
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
