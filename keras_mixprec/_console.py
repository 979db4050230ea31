"""Printing where Keras prints its own messages."""

import sys

import keras
from absl import logging


class _Line:
    """Where the cursor is: in the line of the progress bar of a `fit`?"""

    in_bar = False


def in_progress_bar(shown: bool) -> None:
    """Notes whether Keras' progress bar has begun a line, and not ended it.

    Args:
        shown: Boolean.
    """
    _Line.in_bar = shown


def print_message(message: str):
    """Prints a line as Keras does: on the console, or to absl's log.

    On a line of its own, also beside the progress bar of `fit`; to the log
    after `keras.config.disable_interactive_logging()`. Characters that the
    console's encoding lacks are left out.

    Args:
        message: String.
    """
    if not keras.config.is_interactive_logging_enabled():
        logging.info(message)
        return
    message = "\n" * _Line.in_bar + message
    _Line.in_bar = False
    try:
        print(message, flush=True)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding or "utf-8"
        known = message.encode(encoding, errors="ignore")
        print(known.decode(encoding), flush=True)
