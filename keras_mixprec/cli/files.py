"""Files that commands read, and that they are to write."""

import errno
import importlib
import os
import re
import sys
import textwrap
import traceback
import zipfile
from typing import Any

from keras_mixprec._files import check_regular
from keras_mixprec.formats import printable

# Characters of a message. A file with a `Lambda` gives 368.
_LETTERS = 400


def model(path: str, modules: list[str], compiled: bool = False) -> Any:
    """Returns the Keras model in a file.

    Args:
        path: String.
        modules: List of names, what to import before.
        compiled: Boolean. Compiles it as the file says if true. A model
            whose loss, optimizer or metrics cannot be loaded is returned
            uncompiled, with a message. Defaults to `False`.

    Raises:
        ValueError: If there is no such file, or no model in it.
    """
    import keras

    # `python -m` finds modules in the current folder, so this does too.
    sys.path.insert(0, os.getcwd())
    for name in modules:
        import_module(name)
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path}")
    if path.endswith(".keras") and not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is damaged, or no .keras file")
    # Keras then knows our optimizer and policies.
    importlib.import_module("keras_mixprec.loss_scaling.optimizer")
    importlib.import_module("keras_mixprec.policies.rescaled")
    refused: Exception | None = None
    if compiled:
        try:
            return keras.saving.load_model(path)
        except Exception as error:  # Of many kinds, by what is in the file.
            refused = error
    try:
        found = keras.saving.load_model(path, compile=False)
    except Exception as error:
        raise ValueError(
            f"{path} cannot be loaded as a Keras model{_why(error)}"
        ) from error
    if refused is not None:
        say(
            f"The optimizer, loss and metrics of {path} are not checked: they "
            f"cannot be loaded{_why(refused)}"
        )
    return found


def import_module(name: str) -> None:
    """Imports a module of the caller's.

    Args:
        name: String.

    Raises:
        ValueError: If the file cannot be loaded.
    """
    try:
        importlib.import_module(name)
    except Exception as error:
        why = f"{type(error).__name__}: {error}{_where(error)}"
        # It may also be a module that this one imports.
        missing = getattr(error, "name", None) or ""
        is_missing = isinstance(error, ModuleNotFoundError) and missing
        if is_missing and f"{name}.".startswith(f"{missing}."):
            why = (
                f"{os.getcwd()} has no module {missing!r}, and none is "
                "installed; run the command in the folder of the module"
            )
        raise ValueError(f"cannot import {name}: {why}") from error


def _where(error):
    """The line of the caller's that raised it, if Python's own did not."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    own = not os.path.exists(last.filename)  # importlib's are frozen.
    return "" if own else f" ({last.filename}, line {last.lineno})"


def say(message: str) -> None:
    """Prints on stderr, so that stdout has the result alone."""
    print(printable(message), file=sys.stderr, flush=True)


def _why(error):
    """Says why Keras cannot load a file, and what to do about it."""
    # Each object in the file adds a message of its own around the inner one.
    message = str(error).rpartition("Exception encountered: ")[2]
    if missing := re.search(r"ould not locate (\w+ '[^']+')", message):
        return (
            f" without the {missing[1]}: add --import MODULE, the module that "
            "registers it with @keras.saving.register_keras_serializable()"
        )
    advice = ""
    if "enable_unsafe_deserialization" in message:
        advice = (
            "; if you trust it, call it in a module of yours and give that "
            "with --import"
        )
    return f": {first_line(message.partition(' Full object')[0])}{advice}"


def data(path: str | None) -> tuple[Any, Any]:
    """Returns `x` and `y` of a file, `None` for what it lacks.

    Args:
        path: String, or `None` for no file.

    Raises:
        ValueError: If it holds no arrays.
    """
    import numpy as np

    if path is None:
        return None, None
    try:
        # Opened here: NumPy does not close what it cannot read.
        with open(path, "rb") as file:
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return found, None
            arrays = dict(found)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} cannot be read as an .npz or .npy file of plain arrays: "
            f"{first_line(error)}"
        ) from error
    y = arrays.pop("y", None)
    if not arrays:
        raise ValueError(f"{path} has no array x. It has: y")
    return arrays.get("x", arrays), y


def first_line(error: Exception | str) -> str:
    """The first line, cut between words: Keras may add a whole config."""
    line = str(error).strip().partition("\n")[0]
    return textwrap.shorten(line, _LETTERS, placeholder=" ...")


def check_writable(path: str, is_folder: bool = False) -> None:
    """Raises for what could not be written, before the work is done.

    Args:
        path: String. The file, or the folder, which is made if it is missing.
        is_folder: Boolean. Which of the two.

    Raises:
        OSError: If it cannot be written.
    """
    path = os.path.abspath(path)
    folder = path if is_folder else os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    if not is_folder:
        check_regular(path)
    there = path if os.path.exists(path) else folder
    if not os.access(there, os.W_OK):
        raise PermissionError(errno.EACCES, "It cannot be written", there)
