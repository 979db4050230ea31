"""Prints messages as Keras does, and shortens texts for them."""

import re
import sys

import keras
from absl import logging

from keras_mixprec.formats import format_names, printable

# Terminal color codes, which the errors of TensorFlow and Keras contain.
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b.")


class _Line:
    """Holds whether the cursor is on the line of a progress bar."""

    in_bar = False


def in_progress_bar(shown: bool) -> None:
    """Records whether the cursor is on the line of Keras' progress bar.

    Args:
        shown: Boolean.
    """
    _Line.in_bar = shown


def print_message(message: str):
    """Prints a message as Keras does: on the console, or to absl's log.

    The message gets its own line, even while `fit` shows a progress bar. After
    `keras.config.disable_interactive_logging()` it goes to the log. The console
    leaves out characters that it cannot encode.

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
    """Returns the first paths of a list, and how many more there are.

    Args:
        paths: Iterable of strings.
        shown: Int. The number of paths to name. Defaults to `4`.
    """
    return format_names(map(repr, paths), shown)


def without_colours(text: str) -> str:
    """Returns a text without color codes.

    Args:
        text: String.
    """
    return _ANSI.sub("", text)


def one_line(reason: BaseException | str, longest: int = 200) -> str:
    """Returns a reason as one line without color codes, cut to a length.

    Args:
        reason: Exception or string.
        longest: Int. The maximum number of characters. Defaults to `200`.
    """
    text = " ".join(without_colours(str(reason)).split())
    if isinstance(reason, BaseException):
        text = f"{type(reason).__name__}: {text}".removesuffix(": ")
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
