"""The command line, `keras-mixprec`.

Each command has a file:

- `doctor.py`, `lint.py`, `compare.py`, `convert.py`, `report.py`, `serve.py`;
  `demo.py` runs the demo.
- `options.py`: declares commands, and the options that several commands share.
- `files.py`: reads models and arrays, and checks output files.
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

# Modules that users install themselves. If one of them is missing, the message
# says how to install it. Any other missing module is a bug.
_EXTRAS = ("jax", "matplotlib", "sklearn", "tensorflow", "torch")


def main(argv: list[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: List of strings. Defaults to the arguments of the process.

    Returns:
        Int. The exit code. 0: done. 1: the command found a serious problem.
        2: usage error, with a message on stderr. 130: interrupted.
    """
    arguments = _parser().parse_args(argv)
    # Set the backend first, because Keras chooses its backend on import.
    if backend := getattr(arguments, "backend", None):
        os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # The reader, such as `head`, closed the pipe.
        # Redirect stdout, because Python flushes it at exit, which would raise
        # the same error.
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
            message += ". Or choose a different --backend"
    except (OSError, TypeError, ValueError) as error:
        # The messages of argument checks contain "Received: ". Any other error
        # is a bug, so its traceback is shown.
        wrong_call = isinstance(error, OSError) or "Received: " in str(error)
        if arguments.traceback or not wrong_call:
            raise
        message = str(error)
    files.say(f"keras-mixprec: {message}")
    return 2


def _demo(arguments):
    # Import Keras late, because it chooses its backend on import.
    from keras_mixprec.cli.demo import run_demo, shortfall

    runs = run_demo(arguments.epochs, arguments.log_dir, arguments.open)
    if short := shortfall(runs):
        files.say(f"keras-mixprec: {short}.")
    return int(bool(short))


_DEMO = Command(
    _demo,
    {
        "--epochs": {"type": int, "default": 6, "help": "epochs (default: 6)"},
        "--log-dir": {"default": "logs", "help": "log folder (default: logs)"},
        "--open": {"action": "store_true", "help": "open the report"},
    },
    "backend",
    "show how a layer that overflows float16 is found and repaired",
    "Trains a small network on images of handwritten digits three times: in "
    "float32, in float16 with Keras alone, and in float16 with the monitor and "
    "the tuner. One of its layers overflows in float16.",
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
