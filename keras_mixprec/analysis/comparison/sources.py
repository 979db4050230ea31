"""Functions that a caller names or hands over, and the model one builds."""

import importlib
import pickle
import sys
from typing import Any

import keras

from keras_mixprec._console import one_line
from keras_mixprec.policies.apply import apply_policy
from keras_mixprec.policies.plan import PrecisionPlan


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


def check_function(name: str, value: Any, optional: bool = False) -> None:
    """Raises if a value is no function, nor where one is imported from.

    Args:
        name: String. The argument's name as the caller typed it.
        value: Object.
        optional: Boolean. Whether it may be `None`.
    """
    found = resolve(name, value)
    made = isinstance(found, keras.Model)  # Which is callable too.
    if (made or not callable(found)) and not (optional and value is None):
        raise TypeError(
            f"`{name}` must be a function without arguments, or 'module:name' "
            f"of one. Received: {name}={value!r} of type {type(value).__name__}"
        )


def build_model(build: Any, policy: str | PrecisionPlan) -> tuple:
    """Returns the compiled model that a function makes under a policy.

    The policy is Keras' global one meanwhile and afterwards. Where the function
    sets another one itself, and for a plan, it is applied to the model.

    Args:
        build: Function without arguments, or `"module:name"` of one.
        policy: String, or a `PrecisionPlan`.

    Returns:
        The model, and the global policy that `build` has left.

    Raises:
        TypeError: If it makes something else.
        ValueError: If the model is not compiled.
    """
    plan = policy if isinstance(policy, PrecisionPlan) else None
    name = plan.default if plan else policy
    keras.config.set_dtype_policy(name)
    model = resolve("build", build)()
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`build` must return a compiled `keras.Model`. "
            f"Received: {model!r} of type {type(model).__name__}"
        )
    if not model.compiled:
        raise ValueError(
            "`build` must return a compiled model: call `model.compile(...)` "
            f"in it. Received: model={model.name!r}"
        )
    left = keras.config.dtype_policy().name
    if plan or left != name:
        apply_policy(model, plan or name)
    return model, left


def check_sendable(name: str, value: Any, what: str) -> None:
    """Raises if a process of its own cannot be given a value.

    Args:
        name: String. The argument's name as the caller typed it.
        value: Object.
        what: String. What happens in that process, as a sentence begins.

    Raises:
        ValueError: If that is so. The message says what to do.
    """
    main = sys.modules.get("__main__")
    why = ""
    try:
        pickle.dumps(value)
    except Exception as error:
        why = one_line(error)
    interactive = not hasattr(main, "__file__")
    if interactive and getattr(value, "__module__", "") == "__main__":
        why = "it is defined in a notebook or an interactive session"
    if why:
        raise ValueError(
            f"{what} in a new process, which imports `{name}`: pass a function "
            "at the top of a module, or 'module:name'. "
            f"Received: {name}={value!r} ({why})"
        )
