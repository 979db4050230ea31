"""Files that commands read, and that they are to write."""

import argparse
import errno
import importlib
import os
import sys
import textwrap
import zipfile
from typing import Any

from keras_mixprec._files import check_regular

# Of a message. That on a file with a `Lambda` has 368.
_LETTERS = 400


def add_loading(parser: argparse.ArgumentParser) -> None:
    """Adds what loading a model takes: `--import` and `--backend`."""
    parser.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="a module that registers the model's own layers; repeatable",
    )
    parser.add_argument(
        "--backend",
        choices=["tensorflow", "jax", "torch"],
        default=argparse.SUPPRESS,
        help="Keras' backend (default: the one that Keras is set to)",
    )


def model(path: str, modules: list[str]) -> Any:
    """Returns the Keras model in a file.

    Args:
        path: String.
        modules: List of names, what to import before.

    Raises:
        ValueError: If there is no such file, or no model in it.
    """
    import keras

    # As for `python -m`, those of the folder that the command is called in.
    sys.path.insert(0, os.getcwd())
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ValueError(f"cannot import {name}: {error}") from error
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path}")
    if path.endswith(".keras") and not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is damaged, or no .keras file")
    try:
        return keras.saving.load_model(path)
    except Exception as error:  # Of many kinds, by what is wrong in the file.
        advice = "" if modules else _advice(str(error))
        raise ValueError(
            f"{path} cannot be loaded as a Keras model: "
            f"{first_line(error)}{advice}"
        ) from error


def _advice(message):
    if "enable_unsafe_deserialization" in message:
        return (
            "; if you trust it, call it in a module of yours and give that "
            "with --import"
        )
    known = "class" not in message
    return "" if known else "; for layers of its own give --import"


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


def first_line(error: Exception) -> str:
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
