"""The command line, `keras-mixprec`.

Files, one a command that is more than a call:

- `demo.py`, `doctor.py`, `lint.py`, `compare.py`, `convert.py`, `serve.py`.
- `options.py`: the options that commands share.
- `files.py`: models, functions and arrays that a command is given.
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
    options,
    serve,
)
from keras_mixprec.formats import printable

# Modules that a command needs beyond the core, and what to install for them.
_PACKAGES = {
    "jax": "jax",
    "matplotlib": "matplotlib",
    "sklearn": "scikit-learn",
    "tensorflow": "tensorflow",
    "torch": "torch",
}


_BACKENDS = ("jax", "tensorflow", "torch")


def main(argv: list[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: List of strings. Defaults to the process' arguments.

    Returns:
        Int. The exit status: 0; 1 if `doctor`, `lint`, `compare` or `report`
        found something as severe as asked for; 2 of a wrong call, with a
        message on stderr; 130 if it was interrupted.
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
    except BrokenPipeError:  # As of `keras-mixprec report logs | head`.
        # Python flushes once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        module = str(error.name).partition(".")[0]
        if module not in _PACKAGES:
            raise
        message = (
            f"this needs the module {module!r}, which is not installed; "
            f"install it with: pip install {_PACKAGES[module]}"
        )
        if module in _BACKENDS:
            message += (
                "\nor choose a backend that you have, such as: "
                "keras-mixprec ... --backend jax"
            )
    except (OSError, ValueError) as error:
        if arguments.traceback:
            raise
        message = str(error)
    files.say(f"keras-mixprec: {message}")
    return 2


def _demo(arguments):
    # Keras chooses its backend when it is imported.
    from keras_mixprec.cli.demo import run_demo, shortfall

    runs = run_demo(
        arguments.epochs, arguments.log_dir, arguments.seed, arguments.open
    )
    if short := shortfall(runs):
        files.say(f"keras-mixprec: {short}.")
    return int(bool(short))


def _report(arguments):
    from keras_mixprec.reporting.report import load_report

    report = load_report(arguments.log_dir)
    print(report)
    for path, save in (
        (arguments.html, report.save_html),
        (arguments.png, report.save_png),
    ):
        if path:
            save(path)
            print(printable(f"\nWritten: {path}"))
    found = {run["headline"]["state"] for run in report.to_dict().values()}
    return 1 if found & {"failing", "severe"} else 0


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
        help="show where a command ended, before its name: "
        "keras-mixprec --traceback lint ...",
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = options.add_command(
        commands,
        "demo",
        _demo,
        ("backend",),
        help="see a layer that float16 breaks, named and repaired",
        description="Trains a small network on images of handwritten digits. "
        "One of its layers overflows float16. It trains in float32, in float16 "
        "by Keras alone, and in float16 with the monitor and the tuner.",
    )
    demo.add_argument(
        "--epochs",
        type=_integer(1),
        default=6,
        help="times over the images (default: 6)",
    )
    demo.add_argument(
        "--log-dir", default="logs", help="where to log (default: logs)"
    )
    demo.add_argument(
        "--seed", type=_integer(0), default=0, help="of all runs (default: 0)"
    )
    demo.add_argument(
        "--open", action="store_true", help="open the page of the run"
    )
    doctor.add_command(commands)
    report = options.add_command(
        commands,
        "report",
        _report,
        ("html",),
        help="print what a monitor logged",
        description="Prints what MixPrecMonitor logged: loss scale, skipped "
        "steps, dtypes, verdicts, and what the tuner changed.",
        epilog="exit status: 0 = no run is failing or severe, 1 = one is, "
        "2 = usage error",
    )
    report.add_argument(
        "log_dir", help="what the monitor was given, or a folder above"
    )
    report.add_argument(
        "--png", help="also write a picture to this file (needs matplotlib)"
    )
    serve.add_command(commands)
    lint.add_command(commands)
    compare.add_command(commands)
    convert.add_command(commands)
    return parser


def _integer(low):
    def integer(text):
        number = int(text)
        if number < low:
            raise argparse.ArgumentTypeError(f"{number} is less than {low}")
        return number

    return integer
