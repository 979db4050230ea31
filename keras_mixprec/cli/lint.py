"""`keras-mixprec lint`: a saved model is checked before it trains."""

import argparse
import importlib
import os
import sys
import textwrap
import zipfile

# What `--fail-on` takes: the severities, and never to fail.
_FAIL_ON = ("high", "medium", "low", "never")

# Of a message. That on a file with a `Lambda` has 368.
_LETTERS = 400

_EXAMPLE = """\
example:
  keras-mixprec lint model.keras --policy mixed_float16 --data batch.npz

exit status: 0 if nothing as severe as --fail-on is found, 1 if something is,
2 of a wrong call, such as a file that is no model.
"""


def add_command(commands) -> None:
    """Adds the command to the parser's.

    Args:
        commands: What `ArgumentParser.add_subparsers` returned.
    """
    parser = commands.add_parser(
        "lint",
        help="check a saved model before it trains in 16 bits",
        description="Checks a model for what 16 bits will break in it, or "
        "not speed up: shapes, dtypes, constants, weights, optimizer, data.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a .keras file")
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="check it as it would be under this policy, such as mixed_float16",
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="an .npz file with the arrays x and y, or with each input by its "
        "name and y; or an .npy file with x",
    )
    parser.add_argument(
        "--fail-on",
        choices=_FAIL_ON,
        default="high",
        help="the lowest severity for exit status 1 (default: high)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="a module that registers the model's own layers; repeatable",
    )
    parser.add_argument(
        "--backend",
        choices=["tensorflow", "jax", "torch"],
        default=argparse.SUPPRESS,
        help="Keras' backend (default: the one that Keras is set to)",
    )
    parser.set_defaults(run=_run)


def _run(arguments):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if "backend" in arguments:
        os.environ["KERAS_BACKEND"] = arguments.backend
    # Keras chooses its backend when it is imported.
    from keras_mixprec.analysis.lint.lint import lint

    x, y = _data(arguments.data)
    model = _model(arguments.model, arguments.modules)
    try:
        found = lint(model, x, y, policy=arguments.policy)
    except (IndexError, KeyError, RuntimeError, TypeError) as error:
        if arguments.data is None:
            raise
        raise ValueError(
            f"the model cannot be called on {arguments.data}: "
            f"{_first_line(error)}"
        ) from error
    print(found.to_json() if arguments.json else found)
    fails = arguments.fail_on != "never" and found.at_least(arguments.fail_on)
    return 1 if fails else 0


def _model(path, modules):
    import keras

    # As for `python -m`, those of the folder that the command is called in.
    sys.path.insert(0, os.getcwd())
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ValueError(f"cannot import {name}: {error}") from error
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path}")
    if path.endswith(".keras") and not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is damaged, or no .keras file")
    try:
        return keras.saving.load_model(path)
    except Exception as error:  # Of many kinds, by what is wrong in the file.
        advice = "" if modules else _advice(str(error))
        raise ValueError(
            f"{path} cannot be loaded as a Keras model: "
            f"{_first_line(error)}{advice}"
        ) from error


def _advice(message):
    if "enable_unsafe_deserialization" in message:
        return (
            "; if you trust it, call it in a module of yours and give that "
            "with --import"
        )
    known = "class" not in message
    return "" if known else "; for layers of its own give --import"


def _data(path):
    """Returns `x` and `y` of a file, `None` for what it lacks."""
    import numpy as np

    if path is None:
        return None, None
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found, None
        arrays = dict(found)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"{path} cannot be read as an .npz or .npy file of plain arrays: "
            f"{_first_line(error)}"
        ) from error
    y = arrays.pop("y", None)
    if not arrays:
        raise ValueError(f"{path} has no array x. It has: y")
    return arrays.get("x", arrays), y


def _first_line(error):
    """The first line, cut between words: Keras may add a whole config."""
    line = str(error).strip().partition("\n")[0]
    return textwrap.shorten(line, _LETTERS, placeholder=" ...")
