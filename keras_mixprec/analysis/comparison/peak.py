"""The peak memory of one policy's training, where that can be told apart."""

from typing import Any

import keras

from keras_mixprec.backend import active
from keras_mixprec.devices.memory import (
    memory_record,
    peak_bytes,
    reset_peak,
    slots_bytes,
    weights_bytes,
)

# Training alone in a process that others have trained in, and in one of its
# own; None of both where policies take turns.
ALONE, ISOLATED = "alone", "isolated"


def device_can_tell() -> bool:
    """Whether peaks of one training after the other can be measured here.

    By the backend's accounting of its device, which starts over for each.
    """
    return peak_bytes()[1] == "device" and reset_peak()


class Peak:
    """The peak of the training that begins now.

    Args:
        where: `ALONE`, `ISOLATED`, or `None` where policies take turns.
    """

    def __init__(self, where: str | None):
        self._where = where
        self._before = 0
        if where == ALONE and reset_peak():
            self._before = peak_bytes()[0] or 0

    def record(self, model: keras.Model, batch: tuple) -> Any:
        """Returns the `Memory` of the training that has ended.

        `None` if nothing tells it from that of others: where policies take
        turns only what the compiler says of a program does.

        Args:
            model: The `keras.Model` that was trained.
            batch: Tuple, of the batches that it was trained on.
        """
        if self._where is None:
            return _of_program(model, batch)
        found: Any = memory_record(model, batch)
        if found["peak_bytes"] is None:
            return None
        for name in ("peak_bytes", "activations_bytes"):
            if found[name] is not None:
                found[name] -= self._before
        return found


def _of_program(model, batch):
    peak = active.memory().program_bytes(model, batch)
    if peak is None:
        return None
    weights, slots = weights_bytes(model), slots_bytes(model)
    return {
        "peak_bytes": peak,
        "measured_by": "compiled_program",
        "weights_bytes": weights,
        "slots_bytes": slots,
        "activations_bytes": peak - weights - slots,
    }
