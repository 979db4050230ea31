"""The rule that runs the model on the samples given, in 16 and in 32 bits."""

import math

from keras_mixprec.analysis.lint.dry_run import steady
from keras_mixprec.analysis.lint.findings import Finding
from keras_mixprec.analysis.lint.rule import rule, to_float32
from keras_mixprec.backend import active
from keras_mixprec.diagnosis.advice import advice
from keras_mixprec.diagnosis.culprit import computes_low
from keras_mixprec.diagnosis.end_to_end import is_finite
from keras_mixprec.diagnosis.step_errors import evidence
from keras_mixprec.policies.layers import MODEL_PATH


@rule("high")
def wrong_on_the_data(view):
    """On the samples given a layer returns something else than in float32."""
    if view.x is None:
        return
    with steady(view.model):
        run = view.dry_run
        # In any case: data that do not fit the model raise here.
        exact = run.exact()
        low = any(computes_low(entry.layer) for entry in view.low)
        if not low or not is_finite(exact):  # Not of its precision.
            return
        try:
            step = run.step()
        except active.replay().REFUSALS as error:
            yield _raises(error)
            return
        found = [_wrong(culprit) for culprit in run.culprits(step, exact)]
        if not found and run.loss_is_wrong(step, exact):
            found.append(_wrong_loss(exact, step))
    yield from found


def _wrong(culprit):
    numbers = culprit.numbers
    known = culprit.path != MODEL_PATH
    return Finding(
        "high",
        culprit.path,
        f"{culprit.kind}: on the samples given {_off(numbers)}; "
        f"{_range(numbers)}.",
        advice(culprit.kind, culprit.path),
        to_float32(culprit.path, culprit.kind) if known else (),
        numbers={"kind": culprit.kind, **numbers},
    )


def _range(numbers):
    if (smallest := numbers.get("smallest_inside_in_float32")) is not None:
        return f"in float32 its smallest number is {smallest:.3g}"
    return (
        f"its inputs reach {numbers['largest_input']:.3g}, its outputs in "
        f"float32 {numbers['largest_output_in_float32']:.3g}"
    )


def _off(numbers):
    if math.isfinite(numbers["error"]):
        return f"its results are off by {numbers['error']:.0%} of float32's"
    return f"{numbers['nonfinite_outputs']:,} of its results are not finite"


def _wrong_loss(exact, step):
    return Finding(
        "high",
        None,
        f"On the samples given the loss is {step.loss:.4g}, {exact.loss:.4g} "
        "in float32, while every layer is right by itself.",
        "keras_mixprec.diagnose(model, x, y) searches for what makes it so.",
        numbers={"loss_in_float32": exact.loss},
    )


def _raises(error):
    line = evidence(error)["error"]
    text = line.lower()
    return Finding(
        "high",
        None,
        f"It runs in float32, and in 16 bits it raises: {line}",
        next(advice for words, advice in _WAYS if any(w in text for w in words))
        + " keras_mixprec.diagnose(model, x, y) names them.",
        numbers={"error": line},
    )


# What backends say where a device has no such operation in 16 bits, and where
# operands are of unequal dtypes; the rest is of values, such as a loss that
# refuses NaN.
_LACKING = (
    "not implemented",
    "unimplemented",
    "unsupported",
    "not supported",
    "no registered",
    "could not find device",
)
_WAYS = (
    (
        _LACKING,
        "This device has no such operation in that dtype: train on one that "
        "has, under the other 16-bit policy, or let the layers involved "
        "compute in float32:",
    ),
    (
        ("dtype", "float", "half", "double"),
        "Cast one of the operands to the other's dtype, or let the layers "
        "involved compute in float32:",
    ),
    (
        ("",),
        "Values that are right in float32 are refused: let the layers that "
        "make them compute in float32:",
    ),
)
