"""Which line of the user's own code has raised."""

import linecache
import os
import pathlib
import traceback

import keras

import keras_mixprec

# Where no line is the user's: Keras, the backends beside it, this package.
_OTHERS = (
    str(pathlib.Path(keras.__file__).parents[1]),
    str(pathlib.Path(keras_mixprec.__file__).parent),
    str(pathlib.Path(os.__file__).parent),
)


def user_line(error: Exception) -> dict:
    """Returns where an exception comes from.

    Args:
        error: The exception.

    Returns:
        `{"line": "model.py:31", "code": "return mean + noise"}` of the
        innermost line of the user's own, an empty dict if there is none.
    """
    for frame, number in reversed([*traceback.walk_tb(error.__traceback__)]):
        name = frame.f_code.co_filename
        code = linecache.getline(name, number).strip()
        if code and not name.startswith(_OTHERS):
            return {"line": f"{os.path.basename(name)}:{number}", "code": code}
    return {}
