"""Printing where Keras prints its own messages."""

import sys

import keras
from absl import logging


def print_message(message: str):
    """Prints a line as Keras does: on the console, or to absl's log.

    To the log after `keras.config.disable_interactive_logging()`. Characters
    that the console's encoding lacks are left out.

    Args:
        message: String.
    """
    if not keras.config.is_interactive_logging_enabled():
        logging.info(message)
        return
    try:
        print(message, flush=True)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding or "utf-8"
        known = message.encode(encoding, errors="ignore")
        print(known.decode(encoding), flush=True)
