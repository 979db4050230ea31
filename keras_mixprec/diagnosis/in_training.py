"""A diagnosis in `fit`: of divergence and foreseen overflows as well."""

from typing import NamedTuple

from keras.utils import unpack_x_y_sample_weight

from keras_mixprec.backend import active
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.advice import advice
from keras_mixprec.diagnosis.batch import build_for, packed, to_tensors
from keras_mixprec.diagnosis.compare import effective_update, largest
from keras_mixprec.diagnosis.culprit import low_layers
from keras_mixprec.diagnosis.examination import (
    Examination,
    Finding,
    examine,
)
from keras_mixprec.diagnosis.layer_search import Search
from keras_mixprec.diagnosis.verdict import Verdict
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.dry_step import exact_step


def examine_in_training(
    model, batch, step: int, schedule, raised: bool = False
) -> Examination:
    """Returns what is wrong with a model in `fit`.

    Args:
        model: The `keras.Model`.
        batch: As `train_step` takes it.
        step: Int.
        schedule: The model's `AuditSchedule`, updated with what was found.
        raised: As for `examine`. Defaults to `False`.
    """
    parts = unpack_x_y_sample_weight(batch)
    found = examine(model, *parts, step=step, raised=raised, like=batch)
    schedule.found(found)
    found = _unless_diverged(model, found, step, schedule)
    return _with_foreseen(model, found, step, schedule.forecast)


def suitable_scale_bits(model, batch) -> float:
    """Returns the power of two that suits a batch's gradients.

    At which those of most float16 layers survive, as they are in float32:
    after the adaptive loss scaling of Zhao et al., 2019 (arXiv 1910.12385).

    Args:
        model: A compiled `keras.Model`.
        batch: As `train_step` takes it.
    """
    data = to_tensors(unpack_x_y_sample_weight(batch), model)
    build_for(model, data)
    batch = packed(data, like=batch)
    with active.processes().single_process(model):
        search = Search(model, batch, exact_step(model, batch), compiled=False)
        return search.predict_scale_bits(effective_update(model))


def _unless_diverged(model, found, step, schedule):
    if found.exact_loss is None:
        return found
    now = Course.of(model, found.exact_loss)
    if schedule.start is None:
        schedule.start = now
    verdict = now.left(schedule.start, step)
    return Examination([Finding(verdict, [])]) if verdict else found


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


class Course(NamedTuple):
    """Where training is.

    Attributes:
        loss: Float. The loss in float32.
        weight: Float. The largest magnitude among the weights.
    """

    loss: float
    weight: float

    @classmethod
    def of(cls, model, loss: float) -> "Course":
        """Returns where a model is that has this loss."""
        weights = [to_array(v.value) for v in model.trainable_variables]
        return cls(loss, largest(weights))

    def left(self, start: "Course", step=None) -> Verdict | None:
        """Returns the verdict that training has diverged, `None` if not.

        Weights that have grown beyond measure overflow whatever there is, so
        that the layers seem to be at fault.

        Args:
            start: `Course` of the same model before.
            step: Int. For the verdict. Defaults to `None`.
        """
        numbers = {
            "loss_in_float32": self.loss,
            "loss_at_first": start.loss,
            "largest_weight": self.weight,
            "largest_weight_at_first": start.weight,
        }
        limit = thresholds.DIVERGED
        if (
            abs(self.loss) <= limit * abs(start.loss)
            or self.weight <= limit * start.weight
        ):
            return None
        kind = "divergence"
        return Verdict(kind, step=step, numbers=numbers, advice=advice(kind))
