"""Taking turns: training that pauses between blocks while others train."""

import hashlib
import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import keras
import numpy as np

from keras_mixprec import _clock
from keras_mixprec.backend import active
from keras_mixprec.callbacks.settings import CopiedCallback
from keras_mixprec.devices.energy import read_joules


class StoppedError(Exception):
    """The comparison has ended before this training did."""


class Turns:
    """One end of a connection to what says whose turn it is.

    What is set for the whole process, by `settings`, and the state of its
    random numbers are this training's while it is its turn, and what they were
    before while it is not.

    Args:
        connection: `multiprocessing.connection.Connection`.
        settings: Function that returns a context.
    """

    def __init__(
        self,
        connection: Any,
        settings: Callable[[], AbstractContextManager],
    ):
        self._connection = connection
        self._settings = settings
        self._inside = ExitStack()
        self._random: Any = None

    def await_first(self) -> Any:
        """Waits for the first turn, and returns what comes with it."""
        try:
            answer = self._connection.recv()
        except EOFError as error:  # Nobody is there any more.
            raise StoppedError from error
        if isinstance(answer, str) and answer == "stop":
            raise StoppedError
        self._inside.enter_context(self._settings())
        return answer

    def give_back(self, kind: str, content: Any = None) -> Any:
        """Ends this turn with a message and waits for the next one."""
        state = _random_state()
        self.end(kind, content)
        answer = self.await_first()
        _set_random_state(state)
        return answer

    def end(self, kind: str, content: Any = None) -> None:
        """Ends the last turn with a message."""
        self._inside.close()
        self._connection.send((kind, content))


def _random_state():
    return (
        random.getstate(),
        np.random.get_state(),
        active.runtime().random_state(),
    )


def _set_random_state(state):
    random.setstate(state[0])
    np.random.set_state(state[1])
    active.runtime().set_random_state(state[2])


def share_weights(model: keras.Model, turns: Turns) -> None:
    """Says what a model's initial weights are, and gives or takes them.

    Which differ if a policy's variables are of 16 bits: other numbers are
    drawn for these.

    Args:
        model: A `keras.Model`, not trained yet.
        turns: Its `Turns`.
    """
    answer = turns.give_back("built", _digest(model))
    if isinstance(answer, list):
        model.set_weights(answer)
    elif answer == "weights":
        turns.give_back("weights", model.get_weights())


def _digest(model):
    """What differs if any weight does."""
    found = hashlib.blake2b(digest_size=16)
    for weight in model.get_weights():
        found.update(f"{weight.dtype}{weight.shape}".encode())
        found.update(np.ascontiguousarray(weight).tobytes())
    return found.hexdigest()


class BlockTimer(keras.callbacks.Callback):
    """Times each epoch, a block of steps, and pauses before and behind it.

    The last of the callbacks: what the others do in a block is part of it.

    Args:
        turns: The `Turns`.
        callbacks: List of the other callbacks of the same `fit`.

    Attributes:
        seconds: List of floats, of the blocks so far.
        joules: List of floats, what the devices took meanwhile; empty where
            they do not count it.
    """

    def __init__(self, turns: Turns, callbacks: list):
        super().__init__()
        self._turns = turns
        # Ours share one session, and a budget that is a share of the time of
        # training.
        ours = [c for c in callbacks if isinstance(c, CopiedCallback)]
        self._monitors = ours[:1]
        self.seconds: list[float] = []
        self.joules: list[float] = []
        self._began = 0.0
        self._joules: float | None = None

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Pauses, since the model is built, until all others are."""
        share_weights(self.model, self._turns)
        self._begin()

    def _begin(self):
        self._joules = read_joules()
        self._began = _clock.now()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Ends a block; its logs were fetched, so its steps are done."""
        ended = _clock.now()
        self.seconds.append(ended - self._began)
        if self._joules is not None:
            joules = read_joules() or math.nan
            self.joules.append(joules - self._joules)
        if epoch + 1 < self.params["epochs"]:
            self._turns.give_back("block", self.seconds[-1])
            for monitor in self._monitors:
                monitor.leave_out(_clock.now() - ended)
            self._begin()
