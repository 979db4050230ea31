"""`convert_for_inference`: a model in 16 bits, and how far off it is."""

import re
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_mixprec._checks import check_choice, check_integer, check_number
from keras_mixprec._console import one_line
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.inference.calibration import calibration_batches
from keras_mixprec.inference.comparison import largest_drift
from keras_mixprec.inference.conversion import Conversion
from keras_mixprec.inference.report import ConversionReport
from keras_mixprec.numerics.evaluation import leaving_no_trace
from keras_mixprec.policies.hardware import find_capabilities, formats
from keras_mixprec.policies.layers import check_model, walk
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
    keep_io: str | None = "float32",
    rules: Iterable[PrecisionRule] | None = None,
    batch_size: int = 32,
) -> tuple[keras.Model, ConversionReport]:
    """Returns a new model for inference in 16 bits, and what that changes.

    Its weights are stored in 16 bits, half the size, and its layers compute in
    them, but for the layers that have to stay in float32. The outputs are
    compared with float32's on the calibration data. The given model is only
    read.

    Args:
        model: A built `keras.Model` that its config rebuilds, compiled or not.
        policy: `"float16"` or `"bfloat16"`; `"auto"`, that of the two which
            leaves fewer bytes, or else the one that the device does not emulate
            and that is off less; or a `PrecisionPlan`,
            such as `PrecisionTuner` or `minimize_float32` found: what it has
            in float32 stays so, and its mixed policies become 16-bit weights.
            Defaults to `"auto"`.
        calibration: Inputs like those to come, as `model.predict` takes them:
            an array, a list or dict of arrays, or an iterable of batches, all
            of which are read. The more extreme they are, the better.
        tolerance: Float. How far an output may be from float32's: the norm of
            the difference as a share of the norm. Defaults to `0.05`.
        keep_io: `"float32"`, inputs and outputs are float32 as before, or
            `None`, outputs have the dtype of the layers that make them, as
            those of subclassed models have anyhow. Defaults to `"float32"`.
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
    check_choice("keep_io", keep_io, ("float32", None))
    batch_size = check_integer("batch_size", batch_size, low=1)
    batches = calibration_batches(calibration, batch_size, model)
    if isinstance(policy, PrecisionPlan):
        policy.validate(model)
    with leaving_no_trace(model), np.errstate(all="ignore"):
        conversion = Conversion(model, batches, tolerance, keep_io == "float32")
        if isinstance(policy, PrecisionPlan):
            return conversion.by_plan(policy)
        if policy == "auto":
            return _automatic(conversion, rules)
        return conversion.in_format(policy, rules)


def _check_model(model):
    check_model(model)
    if not model.built:
        raise ValueError(
            "`model` must be built, since it has no weights otherwise: call it "
            f"on a batch first. Received: model={model.name!r}"
        )


def _check_adapters(model):
    for entry in walk(model):
        layer = entry.layer
        if layer.quantization_mode is None:
            continue
        added = [v for v in layer.weights if _LORA_OUT.fullmatch(v.name)]
        if any(np.any(ops.convert_to_numpy(v)) for v in added):
            raise ValueError(
                f"The layer {entry.path!r} is quantized and has LoRA weights, "
                "which Keras adds to the others when it saves them, and rounds "
                f"those to {layer.quantization_mode} again. Save the model, "
                "check the one that is loaded from the file, and convert that. "
                f"Received: model={model.name!r}"
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
