"""Rules about what a model is fed, and the one that runs it on a batch."""

import numpy as np

from keras_mixprec.analysis.lint.findings import Finding
from keras_mixprec.analysis.lint.rule import rule, to_float32
from keras_mixprec.diagnosis.batch import build_for, to_tensors
from keras_mixprec.diagnosis.examination import diagnose
from keras_mixprec.diagnosis.task import inputs_not_normalized, task_faults
from keras_mixprec.formats import get_format
from keras_mixprec.numerics.arrays import largest_magnitude
from keras_mixprec.policies.graph import fed_by_inputs
from keras_mixprec.policies.layers import MODEL_PATH
from keras_mixprec.verdict_kinds import KINDS

# These findings are about the data, the weights or an adapting loss scale.
_NOT_OF_ITS_PRECISION = {
    "bad_data",
    "divergence",
    "scale_collapsed",
    "scale_search",
    "weights_lost",
}

# Numbers of an input that are looked at.
_SAMPLED = 1 << 16

# Rounding that is more than this share of a standard deviation is a loss.
_LOST = 0.05


@rule("KMP101", "high")
def wrong_on_the_data(view):
    """On the samples given a step does something else than in float32.

    Why: A layer that is right on everyday numbers may overflow on yours. Only a
    step on samples shows it.
    Example: a sum of squares of pixels from 0 to 255 overflows float16.
    Fix: let the named layer compute in float32, or scale its input.
    """
    if view.x is None:
        return
    for verdict in diagnose(view.model, *view.batch()):
        if verdict.kind in _NOT_OF_ITS_PRECISION:
            continue
        if view.supposed and verdict.direction == "backward":
            continue  # The model would get loss scaling when it is compiled.
        kind = KINDS[verdict.kind]
        in_layer = verdict.layer not in (None, MODEL_PATH)
        by_scale = "advised_bits" in verdict.numbers
        demoted = in_layer and kind.repaired_by and not by_scale
        yield Finding(
            f"On the samples given: {verdict.finding}.",
            verdict.advice,
            verdict.layer,
            to_float32(verdict.layer, verdict.kind) if demoted else (),
            numbers={"kind": verdict.kind, **verdict.numbers},
            severity="medium" if kind.behind else "high",
        )


@rule("KMP104", "high")
def targets_beyond_format(view):
    """An output in float16 cannot reach targets above 65504.

    Why: The loss cannot fall where outputs end below the targets.
    Example: prices of 150000, and a last layer in float16.
    Fix: let the last layer compute in float32, or scale the targets.
    """
    known = [a for a in view.targets.values() if a.dtype.kind in "fiu"]
    largest = max(map(largest_magnitude, known), default=0.0)
    for entry in view.low:
        form = get_format(entry.layer.compute_dtype)
        if id(entry.layer) in view.output_layers and largest > form.maximum:
            yield Finding(
                f"Targets reach {largest:g}, and the model's output is in "
                f"{form.name}, which ends at {form.maximum:g}.",
                "Let this layer compute in float32, or bring the targets to "
                "scale.",
                entry.path,
                to_float32(entry.path, f"targets reach {largest:g}"),
                numbers={"largest_target": largest},
            )


@rule("KMP105", "high")
def rounded_inputs(view):
    """A cast to 16 bits rounds by more than what the numbers differ by.

    Why: Differences between samples are lost in the cast, before any layer.
    Example: timestamps near 1.7e9 are all equal in bfloat16.
    Fix: subtract the mean in float32, or before training.
    """
    dtype = _narrowest(view)
    for name, array in view.inputs.items() if dtype else ():
        if "float" not in str(array.dtype):
            continue
        flat = array.ravel(order="K")
        exact = flat[:: 1 + flat.size // _SAMPLED].astype("float64")
        with np.errstate(all="ignore"):
            off = exact.astype(dtype).astype("float64") - exact
        known = np.isfinite(off)
        if not known.any():
            continue
        error, spread = float(off[known].std()), float(exact[known].std())
        if error > _LOST * spread:
            yield Finding(
                f"{name} reaches {np.abs(exact[known]).max():,.6g} and varies "
                f"by {spread:.2g}; in {dtype} it is off by {error:.2g}.",
                "Take off the mean in float32 or before training.",
                numbers={"input": name, "rounding": error, "deviation": spread},
            )


def _narrowest(view):
    """The 16-bit dtype that inputs are cast to, float16 before bfloat16."""
    # A model without a graph gets the inputs itself.
    fed = fed_by_inputs(view.model) or {id(view.model)}
    dtypes = {
        entry.layer.compute_dtype
        for entry in view.low
        if id(entry.layer) in fed and entry.layer.autocast
    }
    return max(dtypes, default=None)


@rule("KMP106", "high")
def task_cannot_be_learned(view):
    """Outputs cannot reach the targets, or the loss takes something else.

    Why: No precision helps if the model cannot reach its targets.
    Example: a `relu` at the end, and negative targets.
    Fix: change the last activation, the loss or the targets.
    """
    if view.y is not None and getattr(view.model, "compiled", False):
        data = to_tensors((*view.batch(), None), view.model, as_in_fit=True)
        build_for(view.model, data)
        faults = task_faults(view.model, view.x, view.y)
        yield from map(_finding, faults)


@rule("KMP107", "low")
def inputs_not_to_scale(view):
    """Large inputs, or columns of unequal sizes, meet a kernel as they are.

    Why: Large inputs make large products and gradients, in 16 bits most of all.
    Example: one column from 0 to 1 beside one from 0 to 10000.
    Fix: add `keras.layers.Normalization`, or scale the data.
    """
    fault = view.x is not None and inputs_not_normalized(view.model, view.x)
    if fault:
        yield _finding(fault)


def _finding(fault):
    verdict = fault.verdict(0)
    clause = KINDS[fault.kind].clause.format(**fault.numbers)
    reason = f"{clause[:1].upper()}{clause[1:]}."
    return Finding(reason, verdict.advice, numbers=fault.numbers)
