"""`keras-mixprec serve`: the page of the tab, without TensorBoard."""

import os
import sys

from keras_mixprec.cli.options import Command, integer
from keras_mixprec.formats import printable

_OPTIONS = {
    "log_dir": "what the monitor was given, or a folder above",
    "--port": {
        "type": integer(0, 2**16 - 1),
        "default": 6007,
        "help": "where to listen, 0 for any port that is free (default: 6007)",
    },
}


def _run(arguments):
    from keras_mixprec.tensorboard_plugin.page_server import PageServer

    log_dir = arguments.log_dir
    if not os.path.isdir(log_dir):
        raise ValueError(f"There is no such folder. Received: {log_dir}")
    with PageServer(log_dir, arguments.port) as server:
        found = "" if server.endpoints.listed() else ", which has no run yet"
        shown = printable(f"{log_dir}{found}")
        print(f"{server.url} shows {shown}; Ctrl+C ends it")
        sys.stdout.flush()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


COMMAND = Command(
    _run,
    _OPTIONS,
    "",
    "show what a monitor logged in a browser, live",
    'Serves the page of TensorBoard\'s "Mixed Precision" tab '
    "for the runs in a folder, and what is added to them, until Ctrl+C. It "
    "serves this machine alone: from another one, call "
    "ssh -L 6007:127.0.0.1:6007 HOST.",
    "keras-mixprec serve logs",
)
