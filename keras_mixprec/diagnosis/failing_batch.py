"""A batch that failed, with all that made it fail."""

import dataclasses
import json
import os

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec.backend.model_state import optimizers_of
from keras_mixprec.diagnosis.on_demand import diagnose
from keras_mixprec.diagnosis.verdict import Verdict
from keras_mixprec.numerics.calls import seed_states
from keras_mixprec.policies import PrecisionPlan
from keras_mixprec.policies.layers import check_model

_VERSION = 1


@dataclasses.dataclass(frozen=True, eq=False)
class FailingBatch:
    """What a skipped step computed with, to be replayed in any process.

    `MixPrecMonitor(keep_failing_batches=N).failing_batches` holds some.

    Attributes:
        step: Int. Number of the training batch.
        batch: Tuple `(x, y, sample_weight)` of arrays, or lists or dicts of
            arrays, or `None`.
        weights: List of arrays, as `model.get_weights()` returns them.
        seeds: List of arrays, the random state before the step.
        scales: Dict from the attribute name of each loss scale optimizer to
            the scale of the step.
        plan: Dict from the path of each layer to its policy.
    """

    step: int
    batch: tuple
    weights: list
    seeds: list
    scales: dict
    plan: dict

    @classmethod
    def of(cls, model, batch, step, seeds, scales) -> "FailingBatch":
        """Copies what a step that was just skipped computed with."""
        to_numpy = ops.convert_to_numpy
        parts = keras.utils.unpack_x_y_sample_weight(batch)
        return cls(
            step,
            tree.map_structure(
                lambda x: None if x is None else to_numpy(x), parts
            ),
            [_plain(to_numpy(v.value)) for v in model.weights],
            seeds,
            scales,
            dict(PrecisionPlan.from_model(model)),
        )

    def replay(self, model: keras.Model) -> list[Verdict]:
        """Diagnoses the batch in a model brought to the state of the step.

        Args:
            model: A compiled `keras.Model` built by the same code. Its
                weights, policies, random state and loss scale are changed.

        Returns:
            List of `Verdict`, as from `keras_mixprec.diagnose`.

        Raises:
            ValueError: If the weights do not fit.
        """
        check_model(model)
        shapes = [tuple(v.shape) for v in model.weights]
        expected = [w.shape for w in self.weights]
        if shapes != expected:
            raise ValueError(
                "`model` must be built, by the code that built the model of "
                f"this batch: its weights have the shapes {expected[:5]}... "
                f"Received: model with weights of shapes {shapes[:5]}..."
            )
        PrecisionPlan(self.plan).apply(model)
        for variable, value in zip(model.weights, self.weights, strict=True):
            variable.assign(value)
        for variable, value in zip(seed_states(model), self.seeds, strict=True):
            variable.assign(value)
        for name, optimizer in optimizers_of(model).items():
            if name in self.scales:
                if not optimizer.built:
                    optimizer.build(model.trainable_variables)
                optimizer.dynamic_scale.assign(self.scales[name])
        return diagnose(model, *self.batch, step=self.step)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the batch to a file that `load` reads, without pickles.

        Args:
            path: String or path-like, ending in `.npz`.
        """
        arrays = []
        about = {
            "version": _VERSION,
            "step": self.step,
            "batch": _flatten(self.batch, arrays),
            "weights": _flatten(self.weights, arrays),
            "seeds": _flatten(self.seeds, arrays),
            "scales": self.scales,
            "plan": self.plan,
        }
        named = {f"array_{i}": array for i, array in enumerate(arrays)}
        np.savez_compressed(path, about=json.dumps(about), **named)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "FailingBatch":
        """Reads what `save` wrote.

        Raises:
            ValueError: If the file is none of these.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                arrays = [file[f"array_{i}"] for i in range(len(file) - 1)]
            if about["version"] != _VERSION:
                raise KeyError(f"version {about['version']}")
        except (KeyError, ValueError) as error:
            raise ValueError(
                "`path` must be a file that `FailingBatch.save` wrote with "
                f"this version of keras_mixprec. Received: path={path!r} "
                f"({error})"
            ) from error
        return cls(
            about["step"],
            tuple(_unflatten(about["batch"], arrays)),
            _unflatten(about["weights"], arrays),
            _unflatten(about["seeds"], arrays),
            about["scales"],
            about["plan"],
        )


def _plain(array):
    # NumPy's files know no bfloat16.
    return array if array.dtype.kind != "V" else array.astype("float32")


def _flatten(structure, arrays):
    """Returns the structure for JSON, with numbers in place of arrays."""
    if structure is None:
        return None
    if isinstance(structure, dict):
        return {k: _flatten(v, arrays) for k, v in structure.items()}
    if isinstance(structure, list | tuple):
        return [_flatten(v, arrays) for v in structure]
    arrays.append(_plain(np.asarray(structure)))
    return len(arrays) - 1


def _unflatten(structure, arrays):
    if structure is None:
        return None
    if isinstance(structure, dict):
        return {k: _unflatten(v, arrays) for k, v in structure.items()}
    if isinstance(structure, list):
        return [_unflatten(v, arrays) for v in structure]
    return arrays[structure]
