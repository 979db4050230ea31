"""A step on some samples in float32 and in 16 bits, which changes nothing."""

import contextlib
import math
from collections.abc import Iterator

import keras
import numpy as np
from keras import tree

from keras_mixprec.backend import active
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.batch import build_for, to_tensors
from keras_mixprec.diagnosis.culprit import Culprit, computes_low
from keras_mixprec.diagnosis.end_to_end import (
    LossCheck,
    loss_error,
    right_in_xla,
)
from keras_mixprec.diagnosis.forward import check_forward
from keras_mixprec.numerics.arrays import as_numpy, is_float, to_array
from keras_mixprec.numerics.calls import CallRecorder
from keras_mixprec.numerics.dry_step import DryStep, dry_step, exact_step
from keras_mixprec.numerics.layer_hooks import in_float32, with_sublayers
from keras_mixprec.numerics.random_numbers import same_draws
from keras_mixprec.policies.layers import has_own_step, walk_with_model

# A batch is run as it is: a `train_step` may need so many samples. Of more,
# the first ones are; for each input the one with the largest number follows.
_BATCH, _ROWS = 512, 32


class DryRun:
    """Runs a model on samples: its train step where that needs no more.

    That is where it is compiled, and there are targets or it has a `train_step`
    of its own. Its `call` otherwise. To be used within `steady(model)`.

    Args:
        model: A `keras.Model`, which is built if it is not.
        x: Arrays of samples, as `fit` takes them.
        y: Arrays of targets, or `None`.

    Attributes:
        called: List of the layers that `exact` has called, in order, without
            those that call others.
    """

    def __init__(self, model: keras.Model, x, y=None):
        self._model = model
        self.called: list = []
        rows = (*_some_rows(x, y), None)
        self._x, self._y, _ = to_tensors(rows, as_in_fit=True)
        self._trains = getattr(model, "compiled", False) and (
            y is not None or has_own_step(model)
        )
        # XLA is right where single operations are not.
        self._compiled = self._trains and bool(
            model.jit_compile and not model.run_eagerly
        )
        if self._trains:
            build_for(model, (self._x, self._y, None))
        elif not _is_built(model):
            model(self._x)

    def exact(self) -> DryStep:
        """Runs it with every layer in float32."""
        if self._trains:
            step = exact_step(self._model, self._batch)
        else:
            with in_float32(self._model):
                step = self._call()
        self.called = [c.layer for c in step.calls if not c.nested]
        return step

    def step(self) -> DryStep:
        """Runs it as it is."""
        if self._trains:
            return dry_step(self._model, self._batch, 1.0)
        return self._call()

    def culprits(self, step: DryStep, exact: DryStep) -> Iterator[Culprit]:
        """Yields the layers that return something else than in float32.

        Args:
            step: What `step` returned.
            exact: What `exact` returned.
        """
        known = {call.name: call for call in exact.calls}
        found = set()
        for call in step.calls:
            if not computes_low(call.layer) or call.path in found:
                continue
            masks_matter = not math.isfinite(step.loss)
            exact_call = known.get(call.name)
            _, culprit = check_forward(
                call, exact_call, self._compiled, masks_matter
            )
            if culprit is not None:
                found.add(call.path)
                yield culprit

    def loss_is_wrong(self, step: DryStep, exact: DryStep) -> bool:
        """Whether the loss is not float32's, however weights are rounded.

        Args:
            step: What `step` returned.
            exact: What `exact` returned.
        """
        if loss_error(step.loss, exact.loss) <= thresholds.LOSS_ERROR:
            return False
        if self._compiled and right_in_xla(self._model, self._batch):
            return False
        return LossCheck(
            self._model, lambda _: self.step().loss, lambda: self.exact().loss
        ).wrong([])

    @property
    def _batch(self):
        return keras.utils.pack_x_y_sample_weight(self._x, self._y)

    def _call(self):
        recorder = CallRecorder(walk_with_model(self._model))
        with (
            keras.StatelessScope(collect_losses=True) as scope,
            recorder.recording(),
        ):
            outputs = self._model(self._x, training=True)
        concrete = active.replay().is_concrete
        recorder.put_values(
            {id(t): t if concrete(t) else None for t in recorder.tensors()}
        )
        ends = [*tree.flatten(outputs), *scope.losses]
        finite = all(
            np.isfinite(to_array(x)).all() for x in ends if is_float(x)
        )
        return DryStep(0.0 if finite else math.inf, {}, recorder.calls, 1.0)


@contextlib.contextmanager
def steady(model: keras.Model):
    """Context in which all runs of a model draw the same random numbers."""
    with (
        active.processes().single_process(model),
        same_draws(),
        # Constants that overflow float16 are what is looked for.
        np.errstate(all="ignore"),
    ):
        yield


def _is_built(model):
    # `build(input_shape)` of a subclassed model builds no layer in it.
    return model.built and all(layer.built for layer in with_sublayers(model))


def _some_rows(x, y):
    """The first samples, and those with the largest numbers."""
    leaves = tree.flatten(x)
    if len(leaves[0]) <= _BATCH:
        return x, y
    rows = set(range(min(len(leaves[0]), _ROWS)))
    for array in map(as_numpy, leaves):
        if array.dtype.kind in "fiu":
            flat = array.reshape(len(array), -1)
            rows.add(int(np.argmax(flat.max(axis=1))))
            rows.add(int(np.argmin(flat.min(axis=1))))
    index = sorted(rows)
    return tree.map_structure(
        lambda leaf: leaf if leaf is None else as_numpy(leaf)[index], (x, y)
    )
