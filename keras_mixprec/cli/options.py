"""Declares commands, and the options that several commands share."""

import argparse
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_SHARED: dict[str, dict[str, Any]] = {
    "backend": {
        "choices": ["tensorflow", "jax", "torch"],
        "default": None,
        "help": "Keras' backend (default: as set in Keras)",
    },
    "html FILE": {
        "default": None,
        "help": "also write an HTML page to this file",
    },
    "import MODULE": {
        "dest": "modules",
        "action": "append",
        "default": [],
        "help": "a module that registers custom layers; repeatable",
    },
    "json": {"action": "store_true", "help": "print JSON"},
}


class Command(NamedTuple):
    """A command: `keras-mixprec NAME`.

    The parsed arguments hold only options that the user gave or that have a
    default. `given` selects the ones that a function takes.

    Attributes:
        run: Function that takes the parsed arguments and returns the exit code.
        options: Dict from an argument, such as `"model"` or `"--data FILE"`, to
            the arguments of `ArgumentParser.add_argument`, or to a help text.
        shared: String. Names of the shared options that the command has.
        help: String, the command's line in the list of commands.
        description: String, the first paragraph of the command's own help.
        example: String, an example call. Defaults to none.
        fails: String, the condition for exit code 1. Defaults to none.
    """

    run: Callable
    options: Mapping[str, Any]
    shared: str
    help: str
    description: str
    example: str = ""
    fails: str = ""


def add_command(commands: Any, name: str, command: Command) -> None:
    """Adds a command to the parser.

    Args:
        commands: The result of `ArgumentParser.add_subparsers`.
        name: String.
        command: The `Command`.
    """
    fails = f"1 = {command.fails}, " * bool(command.fails)
    parser = commands.add_parser(
        name,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        help=command.help,
        description=textwrap.fill(command.description, 80),
        epilog=f"example:\n  {command.example}\n\n" * bool(command.example)
        + f"exit codes: 0 = done, {fails}2 = usage error",
    )
    asked = command.shared.split()
    shared = {
        f"--{n}": how for n, how in _SHARED.items() if n.split()[0] in asked
    }
    for flags, how in {**command.options, **shared}.items():
        how = {"help": how} if isinstance(how, str) else how
        is_switch = how.get("action") == "store_true"
        how = {"default": False, **how} if is_switch else how
        flag, _, metavar = flags.partition(" ")
        how = {"metavar": metavar, **how} if metavar else how
        parser.add_argument(flag, **how)
    parser.set_defaults(run=command.run)


def given(arguments: argparse.Namespace, names: str) -> dict[str, Any]:
    """Returns the arguments that are set and have one of the names.

    Args:
        arguments: The parsed arguments.
        names: String. The names, separated by spaces.
    """
    return {n: v for n, v in vars(arguments).items() if n in names.split()}
