"""The rule that runs the model on the samples given, in 16 and in 32 bits."""

from keras_mixprec.analysis.lint.findings import Finding
from keras_mixprec.analysis.lint.rule import rule, to_float32
from keras_mixprec.diagnosis.examination import diagnose
from keras_mixprec.policies.layers import MODEL_PATH
from keras_mixprec.verdict_kinds import KINDS

# Of the data, of the weights, or of a loss scale that adapts.
_NOT_OF_ITS_PRECISION = {
    "bad_data",
    "divergence",
    "scale_collapsed",
    "scale_search",
    "weights_lost",
}


@rule("KMP101", "high")
def wrong_on_the_data(view):
    """On the samples given a step does something else than in float32."""
    if view.x is None:
        return
    for verdict in diagnose(view.model, *view.batch()):
        if verdict.kind in _NOT_OF_ITS_PRECISION:
            continue
        if view.supposed and verdict.direction == "backward":
            continue  # It would be compiled with loss scaling.
        kind = KINDS[verdict.kind]
        in_layer = verdict.layer not in (None, MODEL_PATH)
        by_scale = "advised_bits" in verdict.numbers
        demoted = in_layer and kind.repaired_by and not by_scale
        yield Finding(
            "medium" if kind.behind else "high",
            verdict.layer,
            f"On the samples given: {verdict.finding}.",
            verdict.advice,
            to_float32(verdict.layer, verdict.kind) if demoted else (),
            numbers={"kind": verdict.kind, **verdict.numbers},
        )
