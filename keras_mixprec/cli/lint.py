"""`keras-mixprec lint`: checks a saved model before training."""

import argparse

from keras_mixprec.cli import files
from keras_mixprec.cli.options import Command, given


class _Explain(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        from keras_mixprec.analysis.lint.lint import chosen

        try:
            rules = chosen([values])
        except ValueError as error:
            parser.error(str(error))
        print("\n\n".join(rule.page for rule in rules))
        parser.exit()


def _codes(what):
    return {
        "type": lambda text: text.split(","),
        "help": f"{what} rules with these codes or prefixes: KMP101,KMP4",
    }


_OPTIONS = {
    "model": "a .keras file",
    "--select CODES": _codes("run only"),
    "--ignore CODES": _codes("leave out"),
    "--explain CODE": {
        "action": _Explain,
        "help": "print what a rule looks for, and exit",
    },
    "--policy NAME": "check the model under this policy, such as mixed_float16 "
    "(default: the model's own policies)",
    "--data FILE": {
        "default": None,
        "help": "an .npz file with the arrays x and y, or with each input by "
        "its name and y; or an .npy file with x",
    },
    "--fail-on": {
        "choices": ("high", "medium", "low", "never"),
        "default": "high",
        "help": "the lowest severity for exit code 1 (default: high)",
    },
}


def _run(arguments):
    # Import Keras late, because it chooses its backend on import.
    from keras_mixprec.analysis.lint.lint import lint

    x, y = files.data(arguments.data)
    model = files.model(arguments.model, arguments.modules, compiled=True)
    if arguments.data is not None:
        _check_call(model, x, arguments.data)
    found = lint(model, x, y, **given(arguments, "policy select ignore"))
    print(found.to_json() if arguments.json else found)
    fails = arguments.fail_on != "never" and found.at_least(arguments.fail_on)
    return 1 if fails else 0


def _check_call(model, x, path):
    from keras import tree

    try:
        model(tree.map_structure(lambda array: array[:1], x), training=False)
    except Exception as error:  # User code may raise any error.
        raise ValueError(
            f"The model cannot be called on the data: "
            f"{files.first_line(error)}. Received: {path}"
        ) from error


COMMAND = Command(
    _run,
    _OPTIONS,
    "json import backend",
    "check a saved model before you train it in 16 bits",
    "Finds the parts of a model that fail or gain nothing in 16 bits. Pass "
    "--data, because most faults depend on the numbers that layers get.",
    "keras-mixprec lint model.keras --policy mixed_float16 --data batch.npz",
    "a finding is at least as severe as --fail-on",
)
