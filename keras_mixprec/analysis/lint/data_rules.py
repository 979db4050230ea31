"""Rules about the data, and the rule that runs the model on a batch."""

from keras_mixprec.analysis.lint.findings import Finding, rule, to_float32
from keras_mixprec.diagnosis.batch import build_for, to_tensors
from keras_mixprec.diagnosis.examination import diagnose
from keras_mixprec.diagnosis.task import inputs_not_normalized, task_faults
from keras_mixprec.formats import get_format
from keras_mixprec.numerics.arrays import largest_magnitude
from keras_mixprec.policies.layers import MODEL_PATH
from keras_mixprec.verdict_kinds import KINDS

# Kinds of verdicts that KMP101 leaves out, because no change of dtypes repairs
# the data, the weights or a dynamic loss scale.
_NOT_OF_ITS_PRECISION = {
    "bad_data",
    "divergence",
    "scale_collapsed",
    "scale_search",
    "weights_lost",
}


@rule("KMP101", "high")
def wrong_on_the_data(view):
    """On your samples, a step in 16 bits differs from the step in float32.

    Why: A layer that works on everyday numbers may overflow on yours. Only a
    step on samples shows the overflow.
    Example: a sum of squares of pixels from 0 to 255 overflows float16.
    Fix: let the named layer compute in float32, or scale its input.
    """
    if view.x is None:
        return
    for verdict in diagnose(view.model, *view.batch()):
        if verdict.kind in _NOT_OF_ITS_PRECISION:
            continue
        # Compiling under the checked policy will add loss scaling, so faults in
        # the backward pass do not count.
        if view.supposed and verdict.direction == "backward":
            continue
        kind = KINDS[verdict.kind]
        in_layer = verdict.layer not in (None, MODEL_PATH)
        by_scale = "advised_bits" in verdict.numbers
        demoted = in_layer and kind.repaired_by and not by_scale
        yield Finding(
            f"On your samples: {verdict.finding}.",
            verdict.advice,
            verdict.layer,
            to_float32(verdict.layer, verdict.kind) if demoted else (),
            numbers={"kind": verdict.kind, **verdict.numbers},
            severity="medium" if kind.behind else "high",
        )


@rule("KMP104", "high")
def targets_beyond_format(view):
    """An output in float16 cannot reach targets above 65504.

    Why: The loss stays high if outputs cannot reach the targets.
    Example: prices of 150000, and a last layer in float16.
    Fix: let the last layer compute in float32, or scale the targets.
    """
    known = [a for a in view.targets.values() if a.dtype.kind in "fiu"]
    largest = max(map(largest_magnitude, known), default=0.0)
    for entry in view.low:
        form = get_format(entry.layer.compute_dtype)
        if id(entry.layer) in view.output_layers and largest > form.maximum:
            yield Finding(
                f"Targets reach {largest:g}. The model's output is in "
                f"{form.name}, whose largest number is {form.maximum:g}.",
                "Let this layer compute in float32, or scale the targets.",
                entry.path,
                to_float32(entry.path, f"targets reach {largest:g}"),
                numbers={"largest_target": largest},
            )


@rule("KMP106", "high")
def task_cannot_be_learned(view):
    """The last activation, the loss and the targets do not fit together.

    Why: The model cannot learn this task in any precision.
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
    """Inputs are large or differ in scale, and no layer normalizes them.

    Why: Large inputs make large products and gradients, which overflow first.
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
