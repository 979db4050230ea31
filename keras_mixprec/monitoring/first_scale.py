"""The loss scale that a run begins with, if it is to fit its gradients."""

import math

from keras_mixprec.backend.common import any_worker
from keras_mixprec.diagnosis.in_training import suitable_scale_bits


def arm_first_scale(session, reader) -> None:
    """Sets the loss scale to what the next batch's gradients need.

    Of several workers' batches, the one that needs the smallest.

    Args:
        session: `Session`, before its first step.
        reader: Of its counters, that of the optimizer.
    """
    model, step, examiner = session.model, session.step, session.examiner

    def predict(batch):
        bits = [math.inf]
        with examiner.errors_reported(step):
            if batch is not None:
                bits.append(suitable_scale_bits(model, batch))
        (lowest,) = any_worker(model, [-min(bits)])
        if math.isinf(lowest):
            return
        scale, rule = 2.0**-lowest, reader.optimizer.rule
        scale = max(scale, rule.min_scale or 0.0)
        scale = min(scale, rule.max_scale or scale)
        reader.set_scale(step, scale)
        session.log.event(step, {"kind": "first_scale", "scale": scale})

    examiner.on_next_batch(model, step, predict)
