"""A task that runs between training steps."""

from collections.abc import Callable
from typing import NamedTuple


class Task(NamedTuple):
    """A task that runs before some of the training steps.

    Attributes:
        purpose: String, a verb and its object. If a task fails, all tasks with
            the same purpose are disabled. With an empty purpose, an error ends
            `fit`, because other workers would wait for this worker.
        run: Function without arguments.
        due: Function that returns the next step of the task: 0 for now,
            infinity for never.
        who: String. The callback to name if the task fails. Defaults to the
            watch's.
    """

    purpose: str
    run: Callable
    due: Callable
    who: str = ""
