"""What a caller names or hands over: functions, strings, and what they are."""

import importlib
import pickle
import sys
from typing import Any


def resolve(name: str, value: Any) -> Any:
    """Returns what `"module:name"` is, anything but a string as it is.

    Args:
        name: String. The argument's name as the caller typed it.
        value: String or object.

    Raises:
        ValueError: If there is no such module, or no such name in it.
    """
    if not isinstance(value, str):
        return value
    module, _, path = value.partition(":")
    if not module or not path:
        raise ValueError(
            f"`{name}` as a string must be 'module:name'. "
            f"Received: {name}={value!r}"
        )
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"`{name}` cannot be imported: {error}. Received: {name}={value!r}"
        ) from error
    return found


def describe(value: Any) -> str | None:
    """Returns what a reviewer is told of an argument.

    `"module:name"` of what can be imported, else its type.
    """
    if value is None or isinstance(value, str):
        return value
    name = getattr(value, "__qualname__", None)
    module = getattr(value, "__module__", None)
    if name and module:
        return f"{module}:{name}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def check_sendable(name: str, value: Any) -> None:
    """Raises if a process of its own cannot be given a value.

    Args:
        name: String. The argument's name as the caller typed it.
        value: Object.

    Raises:
        ValueError: If that is so. The message says what to do.
    """
    why = _from_nowhere(value)
    if why is None:
        try:
            pickle.dumps(value)
            return
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
    raise ValueError(
        f"With `isolate=True` each policy is trained in a new process, which "
        f"imports `{name}`: pass a function at the top of a module, or "
        f"'module:name'. Received: {name}={value!r} ({why})"
    )


def _from_nowhere(value):
    """Why a new process does not find what is defined interactively."""
    main = sys.modules.get("__main__")
    interactive = not hasattr(main, "__file__")
    if getattr(value, "__module__", "") == "__main__" and interactive:
        return "it is defined in a notebook or an interactive session"
    return None
