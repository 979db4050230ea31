"""The rule that runs the model on the samples given, in 16 and in 32 bits."""

import math

from keras_mixprec.analysis.lint.dry_run import DryRun, steady
from keras_mixprec.analysis.lint.findings import Finding
from keras_mixprec.analysis.lint.rule import rule, to_float32
from keras_mixprec.backend import active
from keras_mixprec.diagnosis.advice import advice
from keras_mixprec.diagnosis.culprit import computes_low
from keras_mixprec.diagnosis.end_to_end import is_finite
from keras_mixprec.policies.layers import MODEL_PATH


@rule("high")
def wrong_on_the_data(view):
    """On the samples given a layer returns something else than in float32."""
    if view.x is None or not any(computes_low(e.layer) for e in view.low):
        return
    with steady(view.model):
        run = DryRun(view.model, view.x, view.y)
        exact = run.exact()
        if not is_finite(exact):
            return  # Not of its precision.
        try:
            step = run.step()
        except active.replay().REFUSALS as error:
            yield _raises(error)
            return
        culprits = list(run.culprits(step, exact))
    yield from map(_wrong, culprits)
    if not culprits and not math.isfinite(step.loss):
        yield _wrong_loss(exact, step)


def _wrong(culprit):
    numbers = culprit.numbers
    known = culprit.path != MODEL_PATH
    return Finding(
        "high",
        culprit.path,
        f"{culprit.kind}: on the samples given its results are off by "
        f"{numbers['error']:.0%} of float32's, with inputs up to "
        f"{numbers['largest_input']:.3g}, outputs up to "
        f"{numbers['largest_output_in_float32']:.3g} and "
        f"{numbers['nonfinite_outputs']} that are not finite.",
        advice(culprit.kind, culprit.path),
        to_float32(culprit.path, culprit.kind) if known else (),
        numbers={"kind": culprit.kind, **numbers},
    )


def _wrong_loss(exact, step):
    return Finding(
        "high",
        None,
        f"On the samples given the loss is {step.loss} and {exact.loss:.4g} "
        "in float32, while every layer is right by itself.",
        "keras_mixprec.diagnose(model, x, y) searches for what makes it so.",
        numbers={"loss_in_float32": exact.loss},
    )


def _raises(error):
    line = str(error).strip().partition("\n")[0][:160]
    return Finding(
        "high",
        None,
        f"It runs in float32, and in 16 bits it raises: {line}",
        "Cast one of the operands to the other's dtype, or let the layers "
        "involved compute in float32: keras_mixprec.diagnose(model, x, y) "
        "names them.",
        numbers={"error": line},
    )
