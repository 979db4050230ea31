"""Finds what stops a run of a model that raises."""

from collections.abc import Callable
from typing import NamedTuple

import keras

from keras_mixprec.backend import active
from keras_mixprec.numerics.calls import CallRecorder, LayerCall
from keras_mixprec.policies.layers import walk_with_model


class Interrupted(NamedTuple):
    """A run that raises.

    Attributes:
        error: The exception.
        calls: List of `LayerCall`, those that returned before.
        open: List of `LayerCall`, those that did not, outermost first; empty
            if it raises outside of all layers.
    """

    error: Exception
    calls: list[LayerCall]
    open: list[LayerCall]

    def progress(self) -> tuple[int, int]:
        """How far it got, forward and backward."""
        return len(self.calls), sum(call.received for call in self.calls)


def interruption(model: keras.Model, run: Callable) -> Interrupted | None:
    """Returns what stops a run of a model, `None` if it does not raise.

    Args:
        model: The `keras.Model`.
        run: Function without arguments.
    """
    recorder = CallRecorder(walk_with_model(model))
    concrete = active.replay().is_concrete
    try:
        with recorder.recording():
            run()
    except active.replay().REFUSALS as error:
        recorder.put_values(
            {id(x): x if concrete(x) else None for x in recorder.tensors()}
        )
        return Interrupted(error, recorder.calls, recorder.interrupted)
    return None
