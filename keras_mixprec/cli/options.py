"""The options that commands share."""

import argparse
from collections.abc import Callable
from typing import Any

_SHARED: dict[str, dict[str, Any]] = {
    "backend": {
        "choices": ["tensorflow", "jax", "torch"],
        "help": "Keras' backend (default: the one that Keras is set to)",
    },
    "html": {"metavar": "FILE", "help": "also write the page to this file"},
    "import": {
        "dest": "modules",
        "metavar": "MODULE",
        "action": "append",
        "default": [],
        "help": "a module that registers the model's own layers; repeatable",
    },
    "json": {"action": "store_true", "help": "print JSON"},
}


def add_command(
    commands: Any,
    name: str,
    run: Callable,
    shared: tuple[str, ...] = (),
    **texts: str,
) -> argparse.ArgumentParser:
    """Returns the parser of a new command.

    Args:
        commands: What `ArgumentParser.add_subparsers` returned.
        name: String.
        run: Function of the arguments that returns the exit status.
        shared: Names of shared options that the command has.
        **texts: Its `help`, `description` and `epilog`.
    """
    parser = commands.add_parser(
        name, formatter_class=argparse.RawDescriptionHelpFormatter, **texts
    )
    for option in shared:
        parser.add_argument(f"--{option}", **_SHARED[option])
    parser.set_defaults(run=run)
    return parser
