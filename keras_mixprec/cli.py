"""The command line, `keras-mixprec`."""

import argparse
import os
import sys

from keras_mixprec._version import __version__

# Modules that a command needs beyond the core, and what to install for them.
_PACKAGES = {
    "jax": "jax",
    "sklearn": "scikit-learn",
    "tensorflow": "tensorflow",
    "torch": "torch",
}


def main(argv: list[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: List of strings. Defaults to the process' arguments.

    Returns:
        Int. The exit status: 0, or 1 with a message on stderr.
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except ModuleNotFoundError as error:
        module = str(error.name).partition(".")[0]
        if module not in _PACKAGES:
            raise
        message = (
            f"this needs the module {module!r}, which is not installed; "
            f"install it with: pip install {_PACKAGES[module]}"
        )
        if module != "sklearn":
            message += (
                "\nor choose a backend that you have, such as: "
                "keras-mixprec demo --backend jax"
            )
    except OSError as error:
        message = str(error)
    print(f"keras-mixprec: {message}", file=sys.stderr)
    return 1


def _demo(arguments):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if "backend" in arguments:
        os.environ["KERAS_BACKEND"] = arguments.backend
    # Keras chooses its backend when it is imported.
    from keras_mixprec.demo import run_demo

    run_demo(arguments.epochs, arguments.log_dir, arguments.seed)
    return 0


def _parser():
    parser = argparse.ArgumentParser(
        "keras-mixprec",
        description="Safe, visible and self-repairing 16-bit training for "
        "Keras 3.",
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {__version__}"
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="train on real images in float16 and in float32",
        description="Trains a small convolutional network on images of "
        "handwritten digits in mixed_float16, logs it, and compares it with a "
        "float32 run of the same seed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument(
        "--epochs", type=_integer(1), default=8, help="times over the images"
    )
    demo.add_argument("--log-dir", default="logs", help="where to log")
    demo.add_argument(
        "--seed", type=_integer(0), default=0, help="of both runs"
    )
    demo.add_argument(
        "--backend",
        choices=["tensorflow", "jax", "torch"],
        default=argparse.SUPPRESS,
        help="Keras' backend (default: the one that Keras is set to)",
    )
    demo.set_defaults(run=_demo)
    return parser


def _integer(low):
    def integer(text):
        number = int(text)
        if number < low:
            raise argparse.ArgumentTypeError(f"{number} is less than {low}")
        return number

    return integer
