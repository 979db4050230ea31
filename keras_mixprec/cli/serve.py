"""`keras-mixprec serve`: the page of the tab, without TensorBoard."""

import argparse
import os
import sys

from keras_mixprec.cli import options
from keras_mixprec.formats import printable

_EPILOG = """\
example:
  keras-mixprec serve logs

It serves this machine alone. From another machine, call
  ssh -L 6007:127.0.0.1:6007 HOST
"""


def add_command(commands) -> None:
    """Adds the command to the parser's.

    Args:
        commands: What `ArgumentParser.add_subparsers` returned.
    """
    parser = options.add_command(
        commands,
        "serve",
        _run,
        help="show what a monitor logged in a browser, live",
        description='Serves the page of TensorBoard\'s "Mixed Precision" tab '
        "for the runs in a folder, and what is added to them, until Ctrl+C.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "log_dir", help="what the monitor was given, or a folder above"
    )
    parser.add_argument(
        "--port",
        type=port,
        default=6007,
        help="where to listen, 0 for any port that is free (default: 6007)",
    )


def port(text: str) -> int:
    """Returns the number of a port; 0 is any that is free."""
    number = int(text)
    if not 0 <= number < 1 << 16:
        raise argparse.ArgumentTypeError(f"{number} is not in 0 ... 65535")
    return number


def _run(arguments):
    from keras_mixprec.tensorboard_plugin.page_server import PageServer

    log_dir = arguments.log_dir
    if not os.path.isdir(log_dir):
        raise ValueError(f"there is no folder {log_dir}")
    with PageServer(log_dir, arguments.port) as server:
        found = "" if server.runs.listed() else ", which has no run yet"
        shown = printable(f"{log_dir}{found}")
        print(f"{server.url} shows {shown}; Ctrl+C ends it")
        sys.stdout.flush()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
