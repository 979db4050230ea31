"""Where a policy is trained: in a thread of its own, or in a process."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from keras_mixprec._console import one_line
from keras_mixprec.analysis.comparison.arms import ArmRequest
from keras_mixprec.analysis.comparison.batches import Batches, read_batches
from keras_mixprec.analysis.comparison.sources import resolve
from keras_mixprec.analysis.comparison.training import Job, Settings, train
from keras_mixprec.analysis.comparison.turns import StoppedError, Turns
from keras_mixprec.analysis.isolated import EndedError, Isolated, Threaded

# Characters of an error, in a row of a table.
_LONGEST = 400

# A process needs seconds to end by itself; one that hangs is ended.
_SECONDS_TO_END = 30


class Worker:
    """The training of one arm with one seed, seen from the comparison.

    A thread has Keras' global policy, names and seeds for itself, so that it
    trains as a program would that does nothing else; only one trains at a
    time.

    Args:
        target: Function `(connection, *args)` to run.
        args: Tuple.
        isolate: Boolean. Whether in a process of its own.
    """

    def __init__(self, target: Callable, args: tuple, isolate: bool):
        backend = {"KERAS_BACKEND": keras.backend.backend()}
        self._training = (
            Isolated(target, args, **backend)
            if isolate
            else Threaded(target, args)
        )

    def turn(self, message: Any = "go") -> tuple[str, Any]:
        """Lets it train until its next message, which is returned.

        Returns:
            `("built", digest)`, `("weights", list)`, `("block", seconds)`,
            `("done", dict)` or `("failed", sentence)`.
        """
        try:
            return self._training.ask(message)
        except EndedError as error:
            return "failed", str(error)

    def stop(self):
        """Ends it, at the end of its turn."""
        self._training.send("stop")
        self._training.close(_SECONDS_TO_END)


def in_thread(
    connection: Any,
    arm: ArmRequest,
    seed: int,
    job: Job,
    data: tuple[Batches, Batches],
    distribution: Any,
) -> None:
    """Trains, as the target of a thread."""
    if distribution is not None:  # Keras keeps it for each thread.
        keras.distribution.set_distribution(distribution)
    _reporting(connection, arm, seed, job, lambda: data)


def in_process(
    connection: Any,
    arm: ArmRequest,
    seed: int,
    job: Job,
    sources: tuple,
    digest: str,
) -> None:
    """Trains, as the target of a new process, which reads the data itself.

    Args:
        connection: Its end of the connection.
        arm: The `ArmRequest`.
        seed: Int.
        job: The `Job`; its functions may be strings.
        sources: Arguments of `read_both`.
        digest: String, of the batches that it must read.
    """

    def read():
        data = read_both(*sources)
        if data[0].digest() != digest:
            raise ValueError(
                "`data` gives other batches in each process: fix its order, "
                "by a seed for what it shuffles"
            )
        return data

    _reporting(connection, arm, seed, job, read)


def read_both(
    data: Any, validation_data: Any, batch_size: int, steps: int
) -> tuple[Batches, Batches]:
    """Returns the batches to train on, and to evaluate.

    The latter are the former where there is no `validation_data`.
    """
    batches = read_batches("data", data, batch_size, steps)
    if validation_data is None:
        return batches, batches
    return batches, read_batches("validation_data", validation_data, batch_size)


def _reporting(connection, arm, seed, job, read):
    settings = Settings(arm.settings)
    turns = Turns(connection, settings.in_force)
    try:
        turns.await_first()
        found = train(arm, seed, _resolved(job), read(), turns, settings)
    except StoppedError:
        found = None
    except BaseException as error:
        found = one_line(error, _LONGEST)
    # Nobody may be there any more.
    with connection, contextlib.suppress(OSError):
        if found is not None:
            turns.end("failed" if isinstance(found, str) else "done", found)


def _resolved(job):
    return dataclasses.replace(
        job,
        build=resolve("build", job.build),
        metric=_metric(job.metric),
        callbacks=resolve("callbacks", job.callbacks),
    )


def _metric(metric):
    named = isinstance(metric, str) and ":" in metric
    return resolve("metric", metric) if named else metric
