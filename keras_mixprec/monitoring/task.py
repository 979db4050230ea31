"""A piece of work that runs between the steps of training."""

from collections.abc import Callable
from typing import NamedTuple


class Task(NamedTuple):
    """A piece of work that runs before some of the steps.

    Attributes:
        purpose: String, a verb and its object. If one task fails, all tasks
            with its purpose are left out from then on. Empty if an error has to
            end `fit`, because other workers wait for this one.
        run: Function without arguments.
        due: Function that returns the step from which on there is something to
            do: 0 for now, infinity for never.
        who: String. The callback that does it, if it is another one.
    """

    purpose: str
    run: Callable
    due: Callable
    who: str = ""
