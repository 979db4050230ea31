"""`convert_for_inference`: a model in 16 bits, and how far off it is."""

import logging
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec._checks import check_choice, check_integer, check_number
from keras_mixprec._console import one_line
from keras_mixprec.backend import active
from keras_mixprec.devices.memory import bytes_of
from keras_mixprec.diagnosis.call_examination import examine_prediction
from keras_mixprec.diagnosis.cause import weight_overflows
from keras_mixprec.formats import SIXTEEN_BITS, format_count, get_format
from keras_mixprec.inference import wide_layers
from keras_mixprec.inference.assignment import Assignment, by_plan, by_rules
from keras_mixprec.inference.comparison import (
    drift,
    float_outputs,
    largest_activations,
    largest_drift,
    latency,
    to_tensors,
)
from keras_mixprec.inference.rebuild import (
    Rebuilder,
    loadable,
    with_float32_outputs,
)
from keras_mixprec.inference.report import ConversionReport
from keras_mixprec.keras_internals import (
    functional_of,
    get_data_adapter,
    own_non_trainable,
    own_trainable,
)
from keras_mixprec.numerics.arrays import as_numpy
from keras_mixprec.numerics.evaluation import leaving_no_trace
from keras_mixprec.numerics.layer_hooks import temporary_policies
from keras_mixprec.policies.hardware import find_capabilities, formats
from keras_mixprec.policies.layers import LayerEntry, check_model, walk
from keras_mixprec.policies.names import policy_name
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.rules import PrecisionRule

# The second factor of a product, zero until it is trained.
_LORA_OUT = re.compile(r"lora_\w+_b")


def convert_for_inference(
    model: keras.Model,
    policy: str | PrecisionPlan = "auto",
    *,
    calibration: Any,
    tolerance: float = 0.05,
    rules: Iterable[PrecisionRule] | None = None,
    batch_size: int = 32,
) -> tuple[keras.Model, ConversionReport]:
    """Returns a new model for inference in 16 bits, and what that changes.

    The new model stores its weights and computes in 16 bits, except for the
    layers that have to stay in float32. Its outputs are compared with float32's
    on the calibration data. The given model does not change.

    Args:
        model: A built `keras.Model` that its config rebuilds, compiled or not.
        policy: `"float16"` or `"bfloat16"`; `"auto"`, the format with fewer
            bytes. If they are equal, the one that the device does not emulate
            wins, then the one with less drift. Or a `PrecisionPlan` from
            `PrecisionTuner` or `minimize_float32`: its float32 layers stay so,
            and its mixed policies become 16-bit weights. Defaults to `"auto"`.
        calibration: Typical inputs, as `model.predict` takes them: an array, a
            list or dict of arrays, or an iterable of batches. All of it is
            read. Include extreme samples.
        tolerance: Float. How far an output may be from float32's: the norm of
            the difference as a share of the norm. Defaults to `0.05`.
        rules: Iterable of `PrecisionRule`: layers that stay wide in any case.
            Defaults to `DEFAULT_RULES` but for the outputs. Not allowed with a
            plan.
        batch_size: Int. Samples per batch of arrays. Defaults to `32`.

    Returns:
        Pair of the new model, not compiled, and a `ConversionReport`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a wrong value, the model cannot be
            rebuilt from its config, or the tolerance cannot be kept.

    Example:
    >>> model = keras.Sequential(
    ...     [keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])
    >>> small, report = convert_for_inference(
    ...     model, "float16", calibration=np.ones((8, 4)))
    >>> small.layers[0].dtype, report.wide_layers
    ('float16', [])
    >>> small.predict(np.ones((1, 4)), verbose=0).dtype
    dtype('float32')
    """
    _check_model(model)
    _check_adapters(model)
    _check_policy(policy, rules)
    tolerance = check_number(
        "tolerance", tolerance, low=1e-12, why="of 0, nothing has 16 bits"
    )
    batch_size = check_integer("batch_size", batch_size, low=1)
    batches = calibration_batches(calibration, batch_size, model)
    if isinstance(policy, PrecisionPlan):
        policy.validate(model)
    with leaving_no_trace(model), np.errstate(all="ignore"):
        conversion = Conversion(model, batches, tolerance)
        if isinstance(policy, PrecisionPlan):
            return conversion.by_plan(policy)
        if policy == "auto":
            return _automatic(conversion, rules)
        return conversion.in_format(policy, rules)


def _check_model(model):
    check_model(model)
    if not model.built:
        raise ValueError(
            "`model` must be built, so that it has weights: call it on a batch "
            f"first. Received: model={model.name!r}"
        )


def _check_adapters(model):
    for entry in walk(model):
        layer = entry.layer
        if layer.quantization_mode is None:
            continue
        added = [v for v in layer.weights if _LORA_OUT.fullmatch(v.name)]
        if any(np.any(ops.convert_to_numpy(v)) for v in added):
            raise ValueError(
                f"The layer {entry.path!r} is quantized and has LoRA weights. "
                "Keras adds them as it saves the layer, and rounds the sum to "
                f"{layer.quantization_mode}. Save the model, check the loaded "
                f"one, and convert that. Received: model={model.name!r}"
            )


def _check_policy(policy, rules):
    if not isinstance(policy, PrecisionPlan):
        check_choice("policy", policy, ("auto", *SIXTEEN_BITS))
    elif rules is not None:
        raise ValueError(
            "A plan is followed exactly as it is; leave out `rules`. "
            f"Received: rules={rules!r}"
        )


def _automatic(conversion, rules):
    """The format that leaves fewer bytes, or else the one of the device.

    It is the same one on each day: no speed is measured for it.
    """
    found, refused = {}, {}
    for dtype in SIXTEEN_BITS:
        try:
            found[dtype] = conversion.in_format(dtype, rules)
        except ValueError as error:
            refused[dtype] = f"In {dtype}: {one_line(error, 400)}"
    if not found:
        raise ValueError(
            "Neither format of 16 bits keeps the tolerance, so the model stays "
            f"in float32. {' '.join(refused.values())}"
        )
    support = formats(find_capabilities())

    def rank(dtype):
        report = found[dtype][1]
        emulated = support[dtype].status == "emulated"
        return report.size["after"], emulated, largest_drift(report.drift)

    best, *others = sorted(found, key=rank)
    model, report = found[best]
    report.notes.extend(_other(found[dtype][1]) for dtype in others)
    report.notes.extend(refused.values())
    return model, report


def _other(report):
    return (
        f"{report.policy} would be {report.latency['speedup']:.2f} times as "
        f"fast as float32, {report.size['after']:,} bytes, with a drift of "
        f"{largest_drift(report.drift):.2g}."
    )


def calibration_batches(x: Any, batch_size: int, model: keras.Model) -> list:
    """Returns a list of batches of inputs, as arrays.

    Args:
        x: As `model.predict` takes it. Targets in a dataset are dropped.
        batch_size: Int. Samples per batch of arrays.
        model: The `keras.Model`.

    Raises:
        ValueError: If Keras does not accept it, it has no sample, or the number
            of arrays differs from the number of inputs.
    """
    x = tree.map_structure(_text_as_tensor, x)
    adapter = get_data_adapter(x, batch_size=batch_size)
    batches = [
        tree.map_structure(as_numpy, keras.utils.unpack_x_y_sample_weight(b)[0])
        for b in adapter.get_numpy_iterator()
    ]
    if not batches:
        raise ValueError(
            "`calibration` must have at least one sample. "
            f"Received: calibration={str(x)[:80]}"
        )
    functional = functional_of(model)
    if functional is not None:
        _check_count(batches[0], len(functional.inputs))
    return batches


def _check_count(batch, expected):
    """Raises if there are too many arrays: Keras takes the first ones."""
    count = len(tree.flatten(batch))
    if isinstance(batch, list | tuple) and count != expected:
        raise ValueError(
            f"`calibration` must have {format_count(expected, 'array')}, "
            "one for each input of the model. "
            f"Received: a {type(batch).__name__} of "
            f"{format_count(count, 'array')}"
        )


def _text_as_tensor(leaf):
    """An array of strings as Keras takes it."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "OUS":
        return leaf
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "Keras calls models on text with TensorFlow alone. Convert the "
            "part behind `TextVectorization` or `StringLookup`, and calibrate "
            f"it on their output. Received: calibration={str(leaf)[:80]}"
        )
    return ops.convert_to_tensor(leaf)


# Batches that decide which layers are wide. Each of them costs as many runs as
# there are layers.
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
    """Converts one model to different dtypes.

    Args:
        model: A built `keras.Model`, which is only read.
        batches: List of batches of inputs.
        tolerance: Float. How far off an output may be.
    """

    def __init__(
        self, model: keras.Model, batches: list[Any], tolerance: float
    ):
        self._source = Rebuilder(model, batches[0])
        self._reference = self._source.reference
        self._entries = self._source.entries
        # The state of random numbers is not a weight.
        self._bytes = bytes_of(model.weights)
        self._batches = batches
        self._tolerance = tolerance
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
        except Exception as error:  # User code may raise anything.
            raise ValueError(
                "The model cannot be called on `calibration`. Check that the "
                "data fit its inputs, and that functions of `Lambda` layers "
                f"import what they use. Received: {one_line(error, 400)}"
            ) from error
        if any(np.isnan(a).any() for batch in exact for a in batch):
            raise ValueError(
                "In float32 the outputs are not finite on `calibration`, so "
                "precision is not what is wrong. Received: NaN"
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
        error = largest_drift(found)
        if not error <= self._tolerance:
            raise ValueError(self._refusal(policy, built, error))
        ranges = largest_activations(
            self._reference, self._entries, self._batches
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

    def _refusal(self, policy, built, error):
        """Says what is off, by how much, and what helps."""
        with temporary_policies(built.assignment.computing(self._entries)):
            x = to_tensors(self._batches[0])
            found = examine_prediction(self._reference, x)
        worst = f"Found: {found[0].verdict.finding}. " if found else ""
        off = f"are off by {error:.3g} of their norm"
        off = off if math.isfinite(error) else "are not finite"
        advice = (
            "A plan can keep layers in float32."
            if policy == "plan"
            else "No smaller set of layers in float32 meets it. Raise "
            "`tolerance`, or choose another format."
        )
        return (
            f"Converted to {policy} the outputs {off}. {worst}{advice} "
            f"Received: tolerance={self._tolerance:g}"
        )


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
