"""The process of a search: it trains until its memory runs out."""

import contextlib
import dataclasses
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_mixprec._console import one_line
from keras_mixprec.analysis.comparison.sources import build_model, read_batches
from keras_mixprec.analysis.resume import fingerprint, surroundings
from keras_mixprec.backend import active
from keras_mixprec.backend.common import is_out_of_memory
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
    """The job of every trial of a search.

    Attributes:
        build: Function without arguments that returns a compiled model, or
            `"module:name"` of one.
        data: A batch, or a function or `"module:name"` to get one from.
        policy: String, the name of a policy, or a `PrecisionPlan`.
        steps: Int. Train steps of a trial.
        memory_limit: Int. Bytes that the process may allocate, or `None`.
        available: Int. Bytes that it may take on a CPU after it has loaded the
            backend, without another limit, or `None`.
    """

    build: Callable | str
    data: Any
    policy: str | PrecisionPlan
    steps: int
    memory_limit: int | None
    available: int | None


def serve(connection: Any, job: Job) -> None:
    """Answers until the connection is closed.

    Args:
        connection: Connection of a pipe. It is sent `"run"` and a size, or
            `"asked"` alone, and answers with what that returns, or with a dict
            that has `"error"`.
        job: The `Job`.
    """
    trainer: Any = None
    with contextlib.suppress(EOFError):
        while True:
            what, *arguments = connection.recv()
            try:
                trainer = trainer or Trainer(job)
                answer = getattr(trainer, what)(*arguments)
            except Exception as error:
                traceback.print_exc()
                answer = _failed(error)
            connection.send(answer)


def _failed(error):
    if is_out_of_memory(error):
        return {"fits": False, "because": one_line(error)}
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(one_line(error))
    return {"error": error, "traceback": traceback.format_exc()}


def first_batch(data: Any) -> tuple:
    """Returns the first rows of data, as `train_on_batch` takes them.

    Args:
        data: As `largest_batch` takes it.

    Raises:
        TypeError: If they are not arrays.
        ValueError: If there are no rows, or arrays have different numbers of
            rows.
    """
    batch = read_batches("data", data, _ROWS, most=1).batches[0]
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
        self._limited = _limit_memory(job)
        self._model, _ = build_model(job.build, job.policy)
        if self._model.optimizer is not None:
            ensure_loss_scaling(self._model)
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
            "limited": self._limited,
        }


def _limit_memory(job):
    """Sets the limit, and returns whether there is one."""
    limit = job.memory_limit
    on_cpu = active.query_devices()[0] == "cpu"
    used = status_of_process().get("VmData") if on_cpu else None
    if used is None:
        if limit is not None:
            raise ValueError(
                "`memory_limit` is of the process, and needs Linux and a CPU: "
                f"leave it out. Received: memory_limit={limit}"
            )
        return False
    if limit is not None and limit < used:
        # Linux takes nothing away from a process that has more, which would
        # train in what its libraries have freed.
        raise ValueError(
            "`memory_limit` is less than a process needs with its libraries, "
            f"before there is a model (about {format_bytes(used)}). "
            f"Received: memory_limit={limit}"
        )
    kinds = resource.RLIMIT_DATA, resource.RLIMIT_AS
    before = [resource.getrlimit(kind)[0] for kind in kinds]
    limited = any(n != resource.RLIM_INFINITY for n in before)
    if limit is None and job.available is not None and not limited:
        limit = used + job.available
    if limit is not None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return limited or limit is not None
