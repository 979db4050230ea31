"""A failed batch, with the state of the model at its step."""

import dataclasses
import json
import math
import os

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec._files import check_regular
from keras_mixprec.backend.common import optimizers_of
from keras_mixprec.diagnosis.examination import diagnose
from keras_mixprec.diagnosis.verdict import Verdict
from keras_mixprec.numerics.calls import seed_states
from keras_mixprec.policies.layers import check_model
from keras_mixprec.policies.plan import PrecisionPlan

_VERSION = 1


@dataclasses.dataclass(frozen=True, eq=False)
class FailingBatch:
    """A batch whose step was skipped, with the model's state at that step.

    `MixPrecMonitor(keep_failing_batches=N).failing_batches` lists such batches.

    Attributes:
        step: Int. The number of the step, counted from 1, as in the log.
        batch: Tuple `(x, y, sample_weight)`. Each part is an array, a list or
            dict of arrays, or `None`.
        weights: List of arrays, as `model.get_weights()` returns them.
        seeds: List of arrays, the random state before the step.
        scales: Dict from the attribute name of each loss scale optimizer to
            the loss scale of the step.
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
        """Copies the inputs and the state of a step that was just skipped."""
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
        """Brings a model to the state of the step, and diagnoses the batch.

        Args:
            model: A compiled `keras.Model` built by the same code. `replay`
                changes its weights, policies, random state and loss scale.

        Returns:
            List of `Verdict`, as from `keras_mixprec.diagnose`.

        Raises:
            ValueError: If the weights or the random state do not fit.
        """
        check_model(model)
        shapes = [tuple(v.shape) for v in model.weights]
        expected = [w.shape for w in self.weights]
        if shapes != expected:
            raise ValueError(
                "`model` must be built by the code that built the model of "
                f"this batch, whose weights have the shapes {expected[:5]}... "
                f"Received: model with weights of shapes {shapes[:5]}..."
            )
        seeds = seed_states(model)
        if [tuple(v.shape) for v in seeds] != [s.shape for s in self.seeds]:
            raise ValueError(
                "`model` must have the same random seeds as the model of this "
                f"batch, which has {len(self.seeds)}. Received: model with "
                f"{len(seeds)}"
            )
        PrecisionPlan(self.plan).apply(model)
        for variable, value in zip(model.weights, self.weights, strict=True):
            variable.assign(value)
        for variable, value in zip(seeds, self.seeds, strict=True):
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
        """Reads a file that `save` wrote.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If `save` did not write the file, or it is damaged.
        """
        check_regular(path)
        with open(path, "rb") as file:
            try:
                return cls(**_read(file))
            # NumPy, zipfile and json raise many errors on a damaged file.
            except Exception as error:
                raise ValueError(
                    "`path` must be a file that `FailingBatch.save` wrote with "
                    f"this version of keras_mixprec. Received: path={path!r} "
                    f"({type(error).__name__}: {error})"
                ) from error


def _read(file):
    """Returns the attributes in a file, or raises any kind of error."""
    with np.load(file, allow_pickle=False) as content:
        about = json.loads(str(content["about"]))
        arrays = [content[f"array_{i}"] for i in range(len(content) - 1)]
    _require(about["version"] == _VERSION, f"version {about['version']}")
    found = {
        "step": about["step"],
        "batch": tuple(_unflatten(about["batch"], arrays)),
        "weights": _unflatten(about["weights"], arrays),
        "seeds": _unflatten(about["seeds"], arrays),
        "scales": about["scales"],
        "plan": dict(PrecisionPlan(about["plan"])),
    }
    for name, valid in _VALID.items():
        _require(valid(found[name]), f"{name}={found[name]!r:.80}")
    return found


def _require(condition, received):
    if not condition:
        raise ValueError(received)


def _are_numbers(arrays):
    return isinstance(arrays, list) and all(
        isinstance(array, np.ndarray) and array.dtype.kind in "biufc"
        for array in arrays
    )


def _are_scales(scales):
    return isinstance(scales, dict) and all(
        isinstance(scale, float) and 0 < scale < math.inf
        for scale in scales.values()
    )


_VALID = {
    "step": lambda step: type(step) is int and step >= 0,
    "weights": _are_numbers,
    "seeds": _are_numbers,
    "scales": _are_scales,
}


def _plain(array):
    # NumPy's files cannot store bfloat16, so store float32 instead.
    return array if array.dtype.kind != "V" else array.astype("float32")


def _flatten(structure, arrays):
    """Returns the structure for JSON, with an index in place of each array."""
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
    _require(type(structure) is int and structure >= 0, f"array {structure!r}")
    return arrays[structure]
