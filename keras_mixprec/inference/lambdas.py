"""`Lambda` layers whose functions cannot be rebuilt from a config."""

import itertools
import re

import keras

from keras_mixprec.policies.layers import walk

_UNDEFINED = re.compile(r"name '(\w+)' is not defined")


def lambda_at_fault(model: keras.Model, error: Exception) -> str:
    """Returns a sentence on the `Lambda` that raised, empty if none did.

    Its config has the code of the function, and not the names of the module
    that the code uses.

    Args:
        model: The `keras.Model` that was rebuilt.
        error: What a call of the rebuilt one raised.
    """
    name = _undefined_name(error)
    if not name:
        return ""
    for entry in walk(model):
        code = getattr(_function_of(entry.layer), "__code__", None)
        if code is not None and name in _names_in(code):
            return (
                f"The function of the `Lambda` layer {entry.path!r} uses "
                f"{name!r} of its module, which no config has: import it "
                "inside the function, or write a layer with that code in its "
                "`call`."
            )
    return ""


def _undefined_name(error):
    """The name of the first `NameError` in a chain of exceptions."""
    cause: BaseException | None = error
    while cause is not None:
        found = _UNDEFINED.search(str(cause))
        if found is not None:
            return found[1]
        cause = cause.__cause__ or cause.__context__
    return ""


def _names_in(code):
    """Names of the module that code uses, also that of functions inside."""
    inside = (part for part in code.co_consts if hasattr(part, "co_names"))
    return {*code.co_names, *itertools.chain(*map(_names_in, inside))}


def _function_of(layer):
    is_lambda = isinstance(layer, keras.layers.Lambda)
    return layer.function if is_lambda else None
