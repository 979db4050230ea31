"""What a trial's process does: builds the model, and trains on a batch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_mixprec.analysis.comparison.batches import read_batches
from keras_mixprec.analysis.comparison.sources import build_model
from keras_mixprec.analysis.resume import fingerprint, surroundings
from keras_mixprec.backend import active
from keras_mixprec.devices.memory import (
    peak_bytes,
    reset_peak,
    status_of_process,
)
from keras_mixprec.formats import format_bytes
from keras_mixprec.loss_scaling.ensure import ensure_loss_scaling
from keras_mixprec.policies.plan import PrecisionPlan

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

# Rows that are repeated: what they hold matters to no memory.
_ROWS = 256


@dataclasses.dataclass(frozen=True)
class Job:
    """What every trial of a search does.

    Attributes:
        build: Function without arguments that returns a compiled model, or
            `"module:name"` of one.
        data: A batch, or a function or `"module:name"` to get one from.
        policy: String, the name of a policy, or a `PrecisionPlan`.
        steps: Int. Train steps of a trial.
        memory_limit: Int. Bytes that the process may allocate, or `None`.
        available: Int. Bytes that it may take on a CPU beside what it has when
            the backend is there, if nothing else limits it, or `None`.
    """

    build: Callable | str
    data: Any
    policy: str | PrecisionPlan
    steps: int
    memory_limit: int | None
    available: int | None


def first_batch(data: Any) -> tuple:
    """Returns the first rows of data, as `train_on_batch` takes them.

    Args:
        data: As `largest_batch` takes it.

    Raises:
        TypeError: If they are not arrays.
        ValueError: If there are none, or not as many in each array.
    """
    batch = next(iter(read_batches("data", data, _ROWS, most=1)))
    parts = keras.utils.unpack_x_y_sample_weight(batch)
    batch = keras.utils.pack_x_y_sample_weight(*parts)
    batch = batch if isinstance(batch, tuple) else (batch,)
    leaves = tree.flatten(batch)
    if not all(isinstance(leaf, np.ndarray) for leaf in leaves):
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        raise TypeError(
            "`data` must be arrays, whose rows can be repeated. "
            f"Received: data of {', '.join(kinds)}"
        )
    return tree.map_structure(lambda leaf: leaf[:_ROWS], batch)


class Trainer:
    """A model and a batch, which is repeated to the size of a trial.

    Args:
        job: The `Job`.
    """

    def __init__(self, job: Job):
        self._steps = job.steps
        self._limits = _limited(job)
        self._model = _build(job)
        self._batch = first_batch(job.data)

    def asked(self) -> dict[str, str]:
        """Returns what the answer depends on that this process knows."""
        return {**surroundings(), "data": fingerprint(self._batch)}

    def run(self, size: int) -> dict:
        """Trains on a batch of a size, and returns what the peak was.

        And whether the system limits the memory of this process.
        """
        batch = tree.map_structure(
            lambda leaf: leaf[np.arange(size) % len(leaf)], self._batch
        )
        reset_peak()
        for _ in range(self._steps):
            logs = self._model.train_on_batch(*batch)
            # JAX raises what has gone wrong where it is waited for.
            tree.map_structure(keras.ops.convert_to_numpy, logs)
        peak, measured_by = peak_bytes()
        return {
            "fits": True,
            "peak_bytes": peak,
            "measured_by": measured_by,
            "limited": bool(self._limits),
        }


def _limited(job):
    """Sets the limit, and returns those in force by what they count."""
    if active.query_devices()[0] != "cpu":
        if job.memory_limit is not None:
            raise ValueError(
                "`memory_limit` is of the process, and so of CPUs: on other "
                "devices leave it out. "
                f"Received: memory_limit={job.memory_limit}"
            )
        return {}
    used = status_of_process()
    if not used:
        if job.memory_limit is not None:
            raise ValueError(
                "`memory_limit` needs Linux. "
                f"Received: memory_limit={job.memory_limit}"
            )
        return {}
    limit = job.memory_limit
    if limit is not None and limit < used["VmData"]:
        # Linux takes nothing away from a process that has more, which would
        # train in what its libraries have freed.
        raise ValueError(
            "`memory_limit` is less than a process needs with its libraries, "
            f"before there is a model (about {format_bytes(used['VmData'])}). "
            f"Received: memory_limit={limit}"
        )
    if limit is None and job.available is not None and not _in_force():
        limit = used["VmData"] + job.available
    if limit is not None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return _in_force()


def _in_force():
    counted = {"VmData": resource.RLIMIT_DATA, "VmSize": resource.RLIMIT_AS}
    limits = {n: resource.getrlimit(kind)[0] for n, kind in counted.items()}
    return {n: v for n, v in limits.items() if v != resource.RLIM_INFINITY}


def _build(job):
    """The model, under its policy, with the loss scaling that it needs."""
    model, _ = build_model(job.build, job.policy)
    if model.optimizer is not None:
        ensure_loss_scaling(model)
    return model
