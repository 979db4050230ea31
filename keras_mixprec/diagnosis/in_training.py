"""Diagnoses a model in `fit`, including divergence and future overflows."""

import math

from keras.utils import unpack_x_y_sample_weight

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.advice import advice
from keras_mixprec.diagnosis.batch import (
    large_inputs,
    loss_in_float32,
    nonfinite_rows,
    of_tensors,
)
from keras_mixprec.diagnosis.causes import STEPS, Course, cause_of_divergence
from keras_mixprec.diagnosis.culprit import low_layers
from keras_mixprec.diagnosis.examination import (
    Examination,
    Finding,
    examine,
)
from keras_mixprec.diagnosis.verdict import Verdict
from keras_mixprec.numerics.rehearsal import rates_of, rehearse
from keras_mixprec.verdict_kinds import KINDS

# Kinds of faults that growing numbers may cause as training diverges.
_OF_SIZE = {
    "cast_overflow",
    "forward_overflow",
    "backward_overflow",
    "weight_overflow",
}


def examine_in_training(
    model,
    batch,
    step: int,
    schedule,
    first=None,
    raised: bool = False,
    states=None,
) -> Examination:
    """Diagnoses a model in `fit`.

    Args:
        model: The `keras.Model`.
        batch: As `train_step` takes it.
        step: Int.
        schedule: The model's `AuditSchedule`. This function records its
            findings there.
        first: The first batch of the `fit`, as `batch`. Defaults to `None`.
        raised: As for `examine`. Defaults to `False`.
        states: `KeptStates` of the model. Defaults to `None`, none.
    """
    parts = unpack_x_y_sample_weight(batch)
    found = examine(model, *parts, step=step, raised=raised, like=batch)
    schedule.found(found)
    first = None if first is batch else first
    kept = [*states.held] if states else []
    kinds = [finding.verdict.kind for finding in found.findings]
    if kinds == ["weights_lost"]:
        return _before_the_loss(model, batch, found, kept)
    verdict = _divergence(model, batch, found, first, step, schedule, kept)
    # Use the first batch, because the current one may be an outlier. An outlier
    # may make float32 diverge, while 16 bits would skip its step.
    usual = batch if first is None else first
    verdict = verdict or _diverges_next(model, usual, found, step)
    if verdict is None and states and not states.growth < thresholds.DIVERGED:
        exact = {"loss_in_float32": found.exact_loss}
        verdict = divergence_since(model, kept, step, **exact)
    if verdict:
        # If the code ignores the loss scale, the divergence is a symptom.
        causes = [
            finding
            for finding in found.findings
            if finding.verdict.kind == "loss_scale_ignored"
        ]
        if "cause" not in verdict.numbers:
            cause = cause_of_divergence(model, kept, batch)
            verdict = _diverged(step, verdict.numbers | cause)
        return Examination(causes or [Finding(verdict, [])])
    return _with_foreseen(model, found, step, schedule.forecast)


def _diverged(step, numbers):
    """Returns the verdict that training diverges."""
    kind = "divergence"
    text = advice(kind, **numbers)
    return Verdict(kind, step=step, numbers=numbers, advice=text)


def divergence_since(model, kept, step: int, **numbers) -> Verdict | None:
    """Returns the verdict that training from a kept state diverges.

    The repeated steps use the batches of the kept states, because the current
    batch may be an outlier.

    Args:
        model: A built `keras.Model`.
        kept: List of its `KeptState`s, the newest last.
        step: Int.
        **numbers: Further evidence.

    Returns:
        The `Verdict`, or `None` if the repeated steps do not fail.
    """
    cause = cause_of_divergence(model, kept)
    return _diverged(step, numbers | cause) if cause else None


def _before_the_loss(model, batch, found, kept):
    """Adds the reason for lost weights, if a kept state shows one."""
    (lost,) = found.findings
    if cause := cause_of_divergence(model, kept, batch):
        verdict = _diverged(lost.verdict.step, cause)
        return found._replace(findings=[Finding(verdict, []), lost])
    for own in reversed(kept):
        parts = unpack_x_y_sample_weight(own.batch)
        with own.state.in_place():
            before = examine(model, *parts, step=own.step, like=own.batch)
        # Name no layer to demote, because no dtype restores lost weights.
        causes = [
            Finding(f.verdict, [])
            for f in before.findings
            if KINDS[f.verdict.kind].level == "bad"
        ]
        if causes:
            return found._replace(findings=[*causes, lost])
    return found


def _diverges_next(model, batch, found, step):
    """Returns the verdict that float32 diverges in the next steps, or `None`.

    Overflows in 16 bits are then symptoms of the divergence.
    """
    if not any(f.verdict.kind in _OF_SIZE for f in found.findings):
        return None
    if nonfinite_rows(batch=batch):
        return None
    data = of_tensors(batch, model)
    taken = rehearse(model, [data], STEPS, rates_of(model))
    start = Course.of(model, taken.first[0])
    now = start._replace(loss=taken.losses[-1])
    holds = taken.is_finite and not now.left(start)
    if holds or not math.isfinite(start.loss):
        return None
    return _grown(now, start, step, batch)


def _divergence(model, batch, found, first, step, schedule, kept):
    """Returns the verdict that training has diverged, or `None`.

    Layers that overflow are then symptoms of the divergence.
    """
    kinds = [finding.verdict.kind for finding in found.findings]
    loss = math.nan if kinds == ["divergence"] else found.exact_loss
    if loss is None:
        return None
    now = Course.of(model, loss)
    start = schedule.start or now
    if not math.isfinite(start.loss) and not now.left(start):
        start = start._replace(loss=loss)
    schedule.start = start
    if not now.left(start) or _is_outlier(model, now, start, first):
        return None
    if _have_data_changed(model, now, start, kept, batch):
        return None
    return _grown(now, start, step, batch)


def _have_data_changed(model, now, start, kept, batch):
    """Returns whether the loss grew because the data have changed.

    In this case no earlier good state has less than half the current loss on
    this batch.
    """
    if not now.loss > start.loss:
        return False
    losses = []
    for own in kept:
        with own.state.in_place():
            then = Course.of(model, loss_in_float32(model, own.batch))
            if not then.left(start):
                losses.append(loss_in_float32(model, batch))
    return bool(losses) and now.loss < thresholds.WORSE * min(losses)


def divergence_by_now(model, step: int, schedule, first=None) -> Verdict | None:
    """Returns the verdict that training has diverged, or `None`.

    The check compares the loss on the first batch of training, and the
    weights. If that batch is missing or not finite, only the weights count.

    Args:
        model: A built `keras.Model`.
        step: Int.
        schedule: The model's `AuditSchedule`.
        first: As for `examine_in_training`.
    """
    start, loss = schedule.start, math.nan
    if start is None:
        return None
    if first is None or nonfinite_rows(batch=first):
        start, first = start._replace(loss=loss), None
    else:
        loss = loss_in_float32(model, first)
    now = Course.of(model, loss)
    return _grown(now, start, step, first) if now.left(start) else None


def _is_outlier(model, now, start, first):
    """Returns whether the loss is large on this batch, but not on the first.

    The loss counts as large on the first batch if its growth there, in powers
    of two, is at least half of its growth on this batch.
    """
    if first is None:
        return math.isnan(now.loss)
    again = loss_in_float32(model, first)
    if math.isnan(now.loss):
        return not now._replace(loss=again).left(start)
    return abs(again) < math.sqrt(abs(now.loss * start.loss))


def _grown(now, start, step, batch):
    """Returns the verdict that the loss or the weights have grown too large."""
    numbers = {
        "loss_in_float32": now.loss,
        "largest_weight": now.weight,
        "largest_weight_at_first": start.weight,
    }
    if not math.isnan(start.loss):
        numbers["loss_at_first"] = start.loss
    if now.rate is not None:
        numbers["learning_rate"] = now.rate
        if start.rate not in (None, now.rate):
            numbers["learning_rate_at_first"] = start.rate
    if batch is not None:
        numbers |= large_inputs(unpack_x_y_sample_weight(batch)[0])
    return _diverged(step, numbers)


def _with_foreseen(model, found, step, forecast):
    """Adds the layers that are about to overflow."""
    forecast.add(step, found.headroom)
    known = {f.verdict.layer for f in found.findings if f.layers}
    layers = {e.path: e.layer for e in low_layers(model)}
    kind, direction = "forward_overflow", "forward"
    foreseen = []
    for path, (steps, bits) in forecast.about_to_overflow().items():
        numbers = {
            "headroom_bits": bits,
            "overflows_in_steps": round(steps),
        }
        verdict = Verdict(
            kind, path, direction, step, False, numbers, advice(kind, path)
        )
        if path in layers and path not in known:
            foreseen.append(Finding(verdict, [layers[path]]))
    return found._replace(findings=[*found.findings, *foreseen])
