"""What `trials.py` starts: a process that trains until its memory runs out."""

import contextlib
import pickle
import traceback
from typing import Any

# Of errors without a type of their own, and of what C++ prints before it ends
# the process; a thread needs memory for its stack.
SCARCE = (
    "cannot allocate memory",
    "can't allocate memory",
    "failed to allocate",
    "out of memory",
    "out_of_memory",
    "resource_exhausted",
    "oom when allocating",
    "bad_alloc",
    "pthread_create",
)
_OF_PYTHON = ("cannot allocate memory", "can't start new thread")

# Characters of a reason.
_LONGEST = 200


def serve(connection: Any, job: bytes) -> None:
    """Answers until nobody asks any more.

    Args:
        connection: Connection of a pipe. It is sent `"run"` and a size, or
            `"asked"` alone, and answers with what that returns, or with a dict
            that has `"error"`.
        job: Bytes, a pickled `Job`, which may import Keras.
    """
    trainer: Any = None
    with contextlib.suppress(EOFError):
        while True:
            what, *arguments = connection.recv()
            try:
                if trainer is None:
                    trainer = _trainer(job)
                answer = getattr(trainer, what)(*arguments)
            except Exception as error:
                traceback.print_exc()
                answer = _failed(error)
            connection.send(answer)


def _trainer(job):
    from keras_mixprec.analysis.largest_batch.training import Trainer

    return Trainer(pickle.loads(job))


def _failed(error):
    if _is_out_of_memory(error):
        return {"fits": False, "because": _reason(error)}
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return {"error": error, "traceback": traceback.format_exc()}


def _is_out_of_memory(error):
    # Of Python's own, which may be raised before there is a backend.
    if any(words in str(error).lower() for words in _OF_PYTHON):
        return True
    from keras_mixprec.backend.common import is_out_of_memory

    return is_out_of_memory(error)


def _reason(error):
    """The line that says so: Keras puts others before and behind it."""
    lines = str(error).strip().splitlines() or [""]
    said = [
        line for line in lines if any(words in line.lower() for words in SCARCE)
    ]
    return f"{type(error).__name__}: {[*said, *lines][0].strip()}"[:_LONGEST]
