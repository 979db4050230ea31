"""`keras-mixprec serve`: shows the "Mixed Precision" tab in a browser."""

import os
import sys

from keras_mixprec._checks import check_integer
from keras_mixprec.cli.options import Command
from keras_mixprec.formats import printable

_OPTIONS = {
    "log_dir": "the folder given to MixPrecMonitor, or a folder above it",
    "--port": {
        "type": int,
        "default": 6007,
        "help": "the port to listen on; 0 = any free port (default: 6007)",
    },
}


def _run(arguments):
    from keras_mixprec.tensorboard_plugin.page_server import PageServer

    log_dir = arguments.log_dir
    if not os.path.isdir(log_dir):
        raise ValueError(f"There is no such folder. Received: {log_dir}")
    port = check_integer("--port", arguments.port, high=2**16 - 1)
    with PageServer(log_dir, port) as server:
        found = "" if server.endpoints.listed() else ", which has no run yet"
        shown = printable(f"{log_dir}{found}")
        print(f"{server.url} shows {shown}. Press Ctrl+C to stop.")
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
    "show a monitor's log in a browser, live",
    'Serves the page of TensorBoard\'s "Mixed Precision" tab for the runs in a '
    "folder, until Ctrl+C. Only this machine can open the page. To see it on "
    "another machine, run this command there: "
    "ssh -L 6007:127.0.0.1:6007 HOST",
    "keras-mixprec serve logs",
)
