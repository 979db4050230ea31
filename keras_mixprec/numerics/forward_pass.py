"""Runs a model forward, as `predict` does, and records the calls of layers."""

from typing import NamedTuple

import keras
import numpy as np
from keras import tree

from keras_mixprec.backend import active
from keras_mixprec.backend.common import naming_exhaustion
from keras_mixprec.numerics.arrays import is_float, to_array
from keras_mixprec.numerics.calls import CallRecorder, LayerCall, ending_pieces
from keras_mixprec.numerics.layer_hooks import in_float32
from keras_mixprec.numerics.random_numbers import Draws, exact_run
from keras_mixprec.policies.layers import walk_with_model


class ForwardPass(NamedTuple):
    """The outputs of a model, and the calls of its layers.

    Attributes:
        outputs: List of the float outputs as float32 arrays, flattened.
        calls: List of `LayerCall`, innermost first, in the order they ended.
        draws: List of `Draw`, the random numbers in the order drawn.
        histories: List of strings, for each output what integers went in
            before; empty where that is the same in each run.
    """

    outputs: list[np.ndarray]
    calls: list[LayerCall]
    draws: list = []
    histories: list = []


class Prediction:
    """Runs `predict` on one batch, again and again.

    The model does not change: writes of its layers are dropped.

    Args:
        model: A built `keras.Model`, compiled or not.
        x: One batch of inputs, as tensors.

    Attributes:
        model: As given.
    """

    def __init__(self, model: keras.Model, x):
        self.model = model
        self._batch = keras.utils.pack_x_y_sample_weight(x)

    def run(
        self, *, records: bool = True, drawing: Draws | None = None
    ) -> ForwardPass:
        """Runs the model's `predict_step`, as the layers compute now.

        Args:
            records: Boolean, whether to record the calls, which hold all
                activations. Defaults to `True`.
            drawing: `Draws`, which keeps a record of the random numbers.
                Defaults to `None`, a new one.
        """
        entries = walk_with_model(self.model)
        recorder = CallRecorder(entries if records else [])
        drawing = drawing or Draws()
        outputs: list = []
        tensors: list = []

        def run(batch):
            with recorder.recording() if records else ending_pieces(entries):
                outputs[:] = _predicted(self.model, batch, drawing)
            tensors[:] = [*outputs, *recorder.tensors()]
            return tensors

        with naming_exhaustion():
            found = active.replay().run_once(self.model, run, self._batch)
        recorder.put_values(dict(zip(map(id, tensors), found, strict=True)))
        arrays = [to_array(value) for value in found[: len(outputs)]]
        return ForwardPass(arrays, recorder.calls, drawing.made)

    def exact(self, *, records: bool = True) -> ForwardPass:
        """Runs it in float32 throughout, with the random numbers it draws.

        Args:
            records: As for `run`.
        """
        return exact_run(self.model, self.run, records=records)

    def outputs(self):
        """Returns the structure that `predict_step` returns, as tensors."""
        structure = None

        def run(batch):
            nonlocal structure
            with Draws().active(), keras.StatelessScope():
                structure = active.replay().predict_step(self.model, batch)
            return tree.flatten(structure)

        found = active.replay().run_once(self.model, run, self._batch)
        return tree.pack_sequence_as(structure, found)

    def tensors(self, _=None) -> list:
        """Returns the float outputs, computed operation by operation."""
        return _predicted(self.model, self._batch, Draws())

    def compiled(self) -> ForwardPass:
        """Runs it as XLA computes it as a whole, without a record of calls."""
        # A new function, because JAX reuses the trace of one that it knows,
        # even if the layers computed in other dtypes then.
        with naming_exhaustion():
            found = active.replay().compiled(lambda _: self.tensors())([])
        return ForwardPass([to_array(value) for value in found], [])

    def compiled_exact(self) -> ForwardPass:
        """The same in float32."""
        with in_float32(self.model):
            return self.compiled()


def _predicted(model, batch, drawing):
    """The float tensors that `predict_step` returns."""
    with naming_exhaustion(), drawing.active(), keras.StatelessScope():
        outputs = active.replay().predict_step(model, batch)
    return [x for x in tree.flatten(outputs) if is_float(x)]
