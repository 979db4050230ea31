"""Letting somebody see how far a diagnosis has come."""

import contextlib
import contextvars
from collections.abc import Callable

_LISTENER: contextvars.ContextVar[Callable[[], None] | None] = (
    contextvars.ContextVar("listener", default=None)
)


@contextlib.contextmanager
def counted_by(listener: Callable[[], None]):
    """Within the context `listener` is called whenever a layer is done with."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def tick():
    """One more layer is done with: recorded in a step, or judged."""
    listener = _LISTENER.get()
    if listener is not None:
        listener()
