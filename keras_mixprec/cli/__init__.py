"""The command line, `keras-mixprec`.

Files, one a command:

- `doctor.py`, `lint.py`, `compare.py`, `convert.py`, `report.py`, `serve.py`;
  `demo.py` runs the demo.
- `options.py`: the declaration of commands, and the options that they share.
- `files.py`: reads models and arrays, and checks files before they are written.
"""

import argparse
import os
import sys

from keras_mixprec._version import __version__
from keras_mixprec.cli import (
    compare,
    convert,
    doctor,
    files,
    lint,
    report,
    serve,
)
from keras_mixprec.cli.options import Command, add_command

# Modules that a command needs beyond the core.
_EXTRAS = ("jax", "matplotlib", "sklearn", "tensorflow", "torch")


def main(argv: list[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: List of strings. Defaults to the process' arguments.

    Returns:
        Int. The exit status. 0: done. 1: `doctor`, `lint`, `compare` or
        `report` found something as severe as asked for. 2: usage error, with a
        message on stderr. 130: interrupted.
    """
    arguments = _parser().parse_args(argv)
    # Keras chooses its backend when it is imported.
    if backend := getattr(arguments, "backend", None):
        os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # For example `keras-mixprec report logs | head`.
        # Python flushes once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        module = str(error.name).partition(".")[0]
        if module not in _EXTRAS:
            raise
        package = module.replace("sklearn", "scikit-learn")
        message = (
            f"the module {module!r} is not installed. "
            f"Install it with: pip install {package}"
        )
        if module in ("jax", "tensorflow", "torch"):
            message += ". Or choose another --backend"
    except (OSError, TypeError, ValueError) as error:
        # The messages of argument checks contain "Received: ". Any other error
        # is a defect, which shows its traceback.
        wrong_call = isinstance(error, OSError) or "Received: " in str(error)
        if arguments.traceback or not wrong_call:
            raise
        message = str(error)
    files.say(f"keras-mixprec: {message}")
    return 2


def _demo(arguments):
    # Keras chooses its backend when it is imported.
    from keras_mixprec.cli.demo import run_demo, shortfall

    runs = run_demo(arguments.epochs, arguments.log_dir, arguments.open)
    if short := shortfall(runs):
        files.say(f"keras-mixprec: {short}.")
    return int(bool(short))


_DEMO = Command(
    _demo,
    {
        "--epochs": {
            "type": int,
            "default": 6,
            "help": "passes over the images (default: 6)",
        },
        "--log-dir": {
            "default": "logs",
            "help": "folder of the log (default: logs)",
        },
        "--open": {"action": "store_true", "help": "open the page of the run"},
    },
    "backend",
    "watch how a layer that float16 breaks is found and repaired",
    "Trains a small network on images of handwritten digits. One of its layers "
    "overflows float16. It trains in float32, in float16 by Keras alone, and "
    "in float16 with the monitor and the tuner.",
)


def _parser():
    parser = argparse.ArgumentParser(
        "keras-mixprec",
        description="Safe, visible and self-repairing 16-bit training for "
        "Keras 3.",
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {__version__}"
    )
    parser.add_argument(
        "--traceback",
        action="store_true",
        help="show the Python traceback of a usage error: "
        "keras-mixprec --traceback lint ...",
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    add_command(commands, "demo", _DEMO)
    for module in (doctor, lint, compare, convert, report, serve):
        name = module.__name__.rpartition(".")[2]
        add_command(commands, name, module.COMMAND)
    return parser
