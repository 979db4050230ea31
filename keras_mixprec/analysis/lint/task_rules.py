"""Rules about what a model is to learn, whatever it computes in."""

from keras_mixprec.analysis.lint.findings import Finding
from keras_mixprec.analysis.lint.rule import rule
from keras_mixprec.diagnosis.batch import build_for, to_tensors
from keras_mixprec.diagnosis.task import inputs_not_normalized, task_faults
from keras_mixprec.verdict_kinds import KINDS


@rule("KMP106", "high")
def task_cannot_be_learned(view):
    """Outputs cannot reach the targets, or the loss takes something else."""
    if view.y is not None and getattr(view.model, "compiled", False):
        data = to_tensors((*view.batch(), None), view.model, as_in_fit=True)
        build_for(view.model, data)
        faults = task_faults(view.model, view.x, view.y)
        yield from map(_finding, faults)


@rule("KMP107", "low")
def inputs_not_to_scale(view):
    """Large inputs, or columns of unequal sizes, meet a kernel as they are."""
    fault = view.x is not None and inputs_not_normalized(view.model, view.x)
    if fault:
        yield _finding(fault)


def _finding(fault):
    verdict = fault.verdict(0)
    clause = KINDS[fault.kind].clause.format(**fault.numbers)
    reason = f"{clause[:1].upper()}{clause[1:]}."
    return Finding(reason, verdict.advice, numbers=fault.numbers)
