"""`convert_for_inference`: a model in 16 bits, compared with float32."""

import logging
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec import keras_internals
from keras_mixprec._checks import check_choice, check_integer, check_number
from keras_mixprec._console import one_line
from keras_mixprec.backend import active
from keras_mixprec.devices.memory import bytes_of
from keras_mixprec.diagnosis.call_examination import examine_prediction
from keras_mixprec.diagnosis.cause import weight_overflows
from keras_mixprec.formats import SIXTEEN_BITS, format_count, get_format
from keras_mixprec.inference import comparison, rebuild, wide_layers
from keras_mixprec.inference.assignment import Assignment, by_plan, by_rules
from keras_mixprec.inference.comparison import drift, largest_drift, to_tensors
from keras_mixprec.inference.report import ConversionReport
from keras_mixprec.numerics.arrays import as_numpy
from keras_mixprec.numerics.evaluation import leaving_no_trace
from keras_mixprec.numerics.layer_hooks import temporary_policies
from keras_mixprec.policies.hardware import find_capabilities, formats
from keras_mixprec.policies.layers import LayerEntry, check_model, walk
from keras_mixprec.policies.names import policy_name
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.rules import PrecisionRule

# Names of weights that are the second factor of a LoRA update. They are zero
# until they are trained.
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
    """Returns a new model for inference in 16 bits, and a report.

    The new model stores its weights and computes in 16 bits, except for the
    layers that have to stay in float32. The report compares its outputs with
    float32's on the calibration data. The given model does not change.

    Args:
        model: A built `keras.Model`, compiled or not, that Keras can rebuild
            from its config.
        policy: `"float16"`, `"bfloat16"`, or `"auto"` for whichever of the two
            gives the smaller model. If both give the same size, `"auto"`
            prefers the format that the device does not emulate, then the one
            with less drift. Or a `PrecisionPlan` from `PrecisionTuner` or
            `minimize_float32`. Its float32 layers stay float32, and layers with
            mixed policies get 16-bit weights. Defaults to `"auto"`.
        calibration: Typical inputs, as `model.predict` takes them: an array, a
            list or dict of arrays, or an iterable of batches. All inputs are
            read. Include extreme samples.
        tolerance: Float. The largest accepted drift: the norm of the difference
            from float32, divided by the norm in float32. Defaults to `0.05`.
        rules: Iterable of `PrecisionRule` for layers that always stay in
            float32. Defaults to `DEFAULT_RULES` without the rule for outputs.
            Not allowed with a plan.
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
        "tolerance", tolerance, low=1e-12, why="0 would rule out 16 bits"
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
            "`model` must be built: call it on a batch first. "
            f"Received: model={model.name!r}"
        )


def _check_adapters(model):
    for entry in walk(model):
        layer = entry.layer
        if layer.quantization_mode is None:
            continue
        added = [v for v in layer.weights if _LORA_OUT.fullmatch(v.name)]
        if any(np.any(ops.convert_to_numpy(v)) for v in added):
            raise ValueError(
                f"The layer {entry.path!r} is quantized and has trained LoRA "
                "weights, which Keras rounds when it saves the model. Save and "
                "load the model, check it, and convert the loaded model. "
                f"Received: model={model.name!r}"
            )


def _check_policy(policy, rules):
    if not isinstance(policy, PrecisionPlan):
        check_choice("policy", policy, ("auto", *SIXTEEN_BITS))
    elif rules is not None:
        raise ValueError(
            f"A plan does not take `rules`. Received: rules={rules!r}"
        )


def _automatic(conversion, rules):
    """Converts to both formats, and returns the smaller model.

    With equal sizes, the device and then the drift decide. Measured speed does
    not count, because it varies from run to run.
    """
    found, refused = {}, []
    for dtype in SIXTEEN_BITS:
        try:
            found[dtype] = conversion.in_format(dtype, rules)
        except ValueError as error:
            refused.append(f"In {dtype}: {one_line(error, 400)}")
    if not found:
        raise ValueError(
            f"Neither 16-bit format keeps the tolerance. {' '.join(refused)}"
        )
    support = formats(find_capabilities())

    def rank(dtype):
        report = found[dtype][1]
        emulated = support[dtype].status == "emulated"
        return report.size["after"], emulated, largest_drift(report.drift)

    best, *others = sorted(found, key=rank)
    model, report = found[best]
    for _, other in map(found.get, others):
        speed, size = other.latency["speedup"], other.size["after"]
        report.notes.append(
            f"{other.policy} would be {speed:.2f} times as fast as float32 and "
            f"take {size:,} bytes, with drift {largest_drift(other.drift):.2g}."
        )
    report.notes.extend(refused)
    return model, report


def calibration_batches(x: Any, batch_size: int, model: keras.Model) -> list:
    """Returns a list of batches of inputs, as arrays.

    Args:
        x: As `model.predict` takes it. Targets in a dataset are ignored.
        batch_size: Int. Samples per batch of arrays.
        model: The `keras.Model`.

    Raises:
        ValueError: If Keras does not accept `x`, `x` has no sample, or the
            number of arrays differs from the number of inputs.
    """
    x = tree.map_structure(_text_as_tensor, x)
    adapter = keras_internals.get_data_adapter(x, batch_size=batch_size)
    batches = [
        tree.map_structure(as_numpy, keras.utils.unpack_x_y_sample_weight(b)[0])
        for b in adapter.get_numpy_iterator()
    ]
    if not batches:
        raise ValueError(
            "`calibration` must have at least one sample. "
            f"Received: calibration={str(x)[:80]}"
        )
    functional, count = (
        keras_internals.functional_of(model),
        len(tree.flatten(batches[0])),
    )
    expected = count if functional is None else len(functional.inputs)
    # Keras would silently ignore arrays beyond the number of inputs.
    if count != expected and isinstance(batches[0], list | tuple):
        raise ValueError(
            "`calibration` must have one array for each of the model's "
            f"{format_count(expected, 'input')}. "
            f"Received: {format_count(count, 'array')}"
        )
    return batches


def _text_as_tensor(leaf):
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "OUS":
        return leaf
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "Only TensorFlow calls models on text. Convert the part after "
            "`TextVectorization` or `StringLookup`, and calibrate it on their "
            f"output. Received: calibration={str(leaf)[:80]}"
        )
    return ops.convert_to_tensor(leaf)


# The maximum number of batches that the search for float32 layers uses. Each
# batch costs about one run per layer.
_MOST_BATCHES = 4

# The share of the tolerance that the search for float32 layers may use. The
# search runs the model operation by operation, but the compiled model rounds in
# different places.
_MARGIN = 0.8

_log = logging.getLogger("keras_mixprec.inference")


class _Built(NamedTuple):
    """A converted model, the policies of its layers, and its outputs."""

    model: keras.Model
    assignment: Assignment
    notes: list[str]
    plan: PrecisionPlan
    entries: list[LayerEntry]
    outputs: list[list]


class Conversion:
    """Converts one model to different dtypes.

    Args:
        model: A built `keras.Model`, which does not change.
        batches: List of batches of inputs.
        tolerance: Float. The largest drift that is accepted.
    """

    def __init__(
        self, model: keras.Model, batches: list[Any], tolerance: float
    ):
        self._source = rebuild.Rebuilder(model, batches[0])
        self._reference = self._source.reference
        self._entries = self._source.entries
        # `model.weights` leaves out the state of random numbers, which
        # `model.variables` includes.
        self._bytes = bytes_of(model.weights)
        self._batches = batches
        self._tolerance = tolerance
        self._exact = self._predicted_exactly()

    def in_format(
        self, dtype: str, rules: Iterable[PrecisionRule] | None
    ) -> tuple[keras.Model, ConversionReport]:
        """Converts the model to a format, with the fewest layers in float32.

        Args:
            dtype: String, `"float16"` or `"bfloat16"`.
            rules: As for `by_rules`.

        Raises:
            ValueError: If the drift is above the tolerance.
        """
        start = by_rules(self._reference, self._entries, dtype, rules)
        with temporary_policies(start.computing(self._entries)):
            culprits = weight_overflows(self._reference)
        built = self._built(self._with_wide(start, culprits))
        error = largest_drift(self._drift(built))
        _log.info("The drift in %s is %.2g", dtype, error)
        if error > self._tolerance:
            built = self._with_fewest_wide(built)
        return self._reported(dtype, built)

    def by_plan(
        self, plan: PrecisionPlan
    ) -> tuple[keras.Model, ConversionReport]:
        """Converts the model to the dtypes of a plan.

        Args:
            plan: A `PrecisionPlan` that fits the model.

        Raises:
            ValueError: If the drift is above the tolerance.
        """
        assignment = by_plan(self._entries, self._source.origins, plan)
        return self._reported("plan", self._built(assignment))

    def _predicted_exactly(self):
        _log.info("Computing float32 outputs; batches: %d", len(self._batches))
        try:
            exact = self._predicted(self._reference)
        except Exception as error:  # User code may raise anything.
            raise ValueError(
                "The model cannot be called on `calibration`. Check its shape, "
                "and import modules inside the functions of `Lambda` layers. "
                f"Received: {one_line(error, 400)}"
            ) from error
        if any(np.isnan(a).any() for batch in exact for a in batch):
            raise ValueError(
                "In float32 the outputs are NaN on `calibration`, so precision "
                "is not the cause. Received: NaN"
            )
        return exact

    def _predicted(self, model):
        predict = model.predict_on_batch
        return [comparison.float_outputs(predict(x)) for x in self._batches]

    def _built(self, assignment):
        """Builds the model, with float32 for layers that raise in 16 bits."""
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
        model, assignment, notes = rebuild.loadable(
            self._source, assignment, to_tensors(self._batches[0])
        )
        plan, entries = _plan_of(model, assignment), walk(model)
        model = rebuild.with_float32_outputs(model)
        outputs = self._predicted(model)
        return _Built(model, assignment, notes, plan, entries, outputs)

    def _with_fewest_wide(self, built):
        """Rebuilds the model with the fewest additional layers in float32.

        Returns `built` unchanged if no layer or every layer is found.
        """
        _log.info("Searching for layers that need float32, in many runs")
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
            f"The search ended early, so fewer than {len(culprits)} layers in "
            "float32 may be enough."
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
        ranges = comparison.largest_activations(
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
            latency=comparison.latency(
                self._reference, model, self._batches[0]
            ),
            notes=built.notes,
        )

    def _drift(self, built):
        names = getattr(self._reference, "output_names", None) or []
        return drift(names, self._exact, built.outputs)

    def _refusal(self, policy, built, error):
        with temporary_policies(built.assignment.computing(self._entries)):
            x = to_tensors(self._batches[0])
            found = examine_prediction(self._reference, x)
        worst = f"Found: {found[0].verdict.finding}. " if found else ""
        off = f"differ from float32 by {error:.3g} of the norm"
        off = off if math.isfinite(error) else "are not finite"
        advice = (
            "Keep more layers in float32."
            if policy == "plan"
            else "No set of layers in float32 helps. Raise `tolerance`, or "
            "choose another format."
        )
        return (
            f"After conversion to {policy} the outputs {off}. "
            f"{worst}{advice} Received: tolerance={self._tolerance:g}"
        )


def _row(entry, plan, ranges):
    layer, path = entry.layer, entry.path
    own = [
        *keras_internals.own_trainable(layer),
        *keras_internals.own_non_trainable(layer),
    ]
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
