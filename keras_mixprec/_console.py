"""Prints messages where Keras prints its own, and shortens texts for them."""

import re
import sys

import keras
from absl import logging

from keras_mixprec.formats import format_names, printable

# Colour codes of terminals. TensorFlow and Keras put them into their errors.
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b.")


class _Line:
    """Whether the cursor is in the line of a progress bar."""

    in_bar = False


def in_progress_bar(shown: bool) -> None:
    """Sets whether the cursor is in the line of Keras' progress bar.

    Args:
        shown: Boolean.
    """
    _Line.in_bar = shown


def print_message(message: str):
    """Prints a line as Keras does: on the console, or to absl's log.

    The message gets a line of its own, even during the progress bar of `fit`.
    After `keras.config.disable_interactive_logging()` it goes to the log.
    Characters that the console's encoding lacks are left out.

    Args:
        message: String.
    """
    if not keras.config.is_interactive_logging_enabled():
        logging.info(message)
        return
    message = "\n" * _Line.in_bar + printable(message)
    _Line.in_bar = False
    try:
        print(message, flush=True)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding or "utf-8"
        known = message.encode(encoding, errors="ignore")
        print(known.decode(encoding), flush=True)


def listed(paths, shown: int = 4) -> str:
    """Returns the first of some paths, and the number of further ones.

    Args:
        paths: Iterable of strings.
        shown: Int. How many paths are named. Defaults to `4`.
    """
    return format_names(map(repr, paths), shown)


def without_colours(text: str) -> str:
    """Returns a text without colour codes.

    Args:
        text: String.
    """
    return _ANSI.sub("", text)


def one_line(reason: BaseException | str, longest: int = 200) -> str:
    """Returns a reason without line breaks and colours, cut to fit a line.

    Args:
        reason: Exception or string.
        longest: Int. The most characters of the result. Defaults to `200`.
    """
    text = " ".join(without_colours(str(reason)).split())
    if isinstance(reason, BaseException):
        text = f"{type(reason).__name__}: {text}".removesuffix(": ")
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
