"""How commands are declared, and the options that they share."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_SHARED: dict[str, dict[str, Any]] = {
    "backend": {
        "choices": ["tensorflow", "jax", "torch"],
        "default": None,
        "help": "Keras' backend (default: the one that Keras is set to)",
    },
    "html": {
        "metavar": "FILE",
        "default": None,
        "help": "also write the page to this file",
    },
    "import": {
        "dest": "modules",
        "metavar": "MODULE",
        "action": "append",
        "default": [],
        "help": "a module that registers the model's own layers; repeatable",
    },
    "json": {"action": "store_true", "help": "print JSON"},
}


class Command(NamedTuple):
    """What a command is: `keras-mixprec NAME`.

    An option that is not given, and has no default, is not an attribute of what
    `run` is called with: `given` returns those that a function is to have.

    Attributes:
        run: Function of the arguments that returns the exit status.
        options: Dict of arguments and options to what
            `ArgumentParser.add_argument` takes, or to the help alone.
        shared: String. Names of shared options that the command has.
        help: String, a line of the list of commands.
        description: String, what its own help begins with.
        example: String. A call of it. Defaults to none.
        fails: String. When the exit status is 1. Defaults to never.
    """

    run: Callable
    options: Mapping[str, Any]
    shared: str
    help: str
    description: str
    example: str = ""
    fails: str = ""


def add_command(commands: Any, name: str, command: Command) -> None:
    """Adds a command to the parser's.

    Args:
        commands: What `ArgumentParser.add_subparsers` returned.
        name: String.
        command: The `Command`.
    """
    fails = f"1 = {command.fails}, " * bool(command.fails)
    parser = commands.add_parser(
        name,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        help=command.help,
        description=command.description,
        epilog=f"example:\n  {command.example}\n\n" * bool(command.example)
        + f"exit status: 0 = done, {fails}2 = usage error",
    )
    shared = {f"--{name}": _SHARED[name] for name in command.shared.split()}
    for flag, how in {**command.options, **shared}.items():
        how = {"help": how} if isinstance(how, str) else how
        is_switch = how.get("action") == "store_true"
        how = {"default": False, **how} if is_switch else how
        parser.add_argument(flag, **how)
    parser.set_defaults(run=command.run)


def given(arguments: argparse.Namespace, names: str) -> dict[str, Any]:
    """Returns the arguments that were given, by name.

    Args:
        arguments: What was parsed.
        names: String. Their names.
    """
    return {n: v for n, v in vars(arguments).items() if n in names.split()}


def integer(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """Returns what makes an integer of a text, within limits."""

    def integer(text):
        if not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(
                f"{text} is not in {low} ... {high}"
            )
        return int(text)

    return integer
