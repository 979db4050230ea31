"""Files that commands read and write."""

import errno
import importlib
import os
import re
import sys
import textwrap
import zipfile
from typing import Any

from keras_mixprec._files import check_regular
from keras_mixprec.formats import printable

# The maximum length of a message from Keras. The longest useful message, about
# a `Lambda` layer in a file, has 368 characters.
_LETTERS = 400


def model(path: str, modules: list[str], compiled: bool = False) -> Any:
    """Returns the Keras model in a file.

    Args:
        path: String.
        modules: List of strings, names of modules to import first.
        compiled: Boolean. If `True`, the model is compiled as the file says. If
            its loss, optimizer or metrics cannot be loaded, a message says so,
            and the model is not compiled. Defaults to `False`.

    Raises:
        ValueError: If there is no such file, or Keras cannot load it.
    """
    import keras

    from keras_mixprec.analysis.comparison.sources import import_from

    # Like `python -m`, import modules from the current folder.
    sys.path.insert(0, os.getcwd())
    for name in modules:
        import_from("--import", name)
    if not os.path.isfile(path):
        raise ValueError(f"There is no such file. Received: {path}")
    if path.endswith(".keras") and not zipfile.is_zipfile(path):
        raise ValueError(
            f"The file is damaged, or it is no .keras file. Received: {path}"
        )
    # Import the modules that register our optimizer and policies with Keras.
    importlib.import_module("keras_mixprec.loss_scaling.optimizer")
    importlib.import_module("keras_mixprec.policies.rescaled")
    refused: Exception | None = None
    if compiled:
        try:
            return keras.saving.load_model(path)
        except Exception as error:  # Loading may raise any error.
            refused = error
    try:
        found = keras.saving.load_model(path, compile=False)
    except Exception as error:
        raise ValueError(
            f"Keras cannot load the model{_why(error)}. Received: {path}"
        ) from error
    if refused is not None:
        say(
            f"Checking {path} without its optimizer, loss and metrics. They "
            f"cannot be loaded{_why(refused)}"
        )
    return found


def say(message: str) -> None:
    """Prints a message on stderr, so that stdout has only the result."""
    print(printable(message), file=sys.stderr, flush=True)


def _why(error):
    # Keras wraps the message once for each enclosing object. The innermost
    # message names the cause.
    message = str(error).rpartition("Exception encountered: ")[2]
    if missing := re.search(r"ould not locate (\w+ '[^']+')", message):
        return (
            f" without the {missing[1]}: add --import MODULE for the module "
            "with its @keras.saving.register_keras_serializable()"
        )
    return f": {first_line(message.partition(' Full object')[0])}"


def data(path: str | None) -> tuple[Any, Any]:
    """Returns `x` and `y` from a file, `None` for an array that is missing.

    Args:
        path: String, or `None` for no file.

    Raises:
        ValueError: If the file holds no arrays.
    """
    import numpy as np

    if path is None:
        return None, None
    try:
        # Open the file here, because NumPy does not close files that it cannot
        # read.
        with open(path, "rb") as file:
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return found, None
            arrays = dict(found)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            "Data must be an .npz or .npy file of plain arrays: "
            f"{first_line(error)}. Received: {path}"
        ) from error
    y = arrays.pop("y", None)
    if not arrays:
        raise ValueError(f"The file has no array x. Received: {path} with y")
    return arrays.get("x", arrays), y


def first_line(error: Exception | str) -> str:
    """Returns a message's first line, shortened, as Keras may add a config."""
    line = str(error).strip().partition("\n")[0]
    return textwrap.shorten(line.rstrip("."), _LETTERS, placeholder=" ...")


def check_writable(path: str) -> None:
    """Raises if a file cannot be written, before the command does its work.

    Args:
        path: String. Its folder is created if it is missing.

    Raises:
        OSError: If the file cannot be written.
    """
    path = os.path.abspath(path)
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    check_regular(path)
    there = path if os.path.exists(path) else folder
    if not os.access(there, os.W_OK):
        raise PermissionError(errno.EACCES, "No permission to write", there)
