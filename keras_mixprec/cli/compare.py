"""`keras-mixprec compare`: the same training under several policies."""

import argparse
import os
import sys
from typing import Any

from keras_mixprec.cli import files, options

_EXAMPLE = """\
example:
  keras-mixprec compare digits:build digits:data --metric accuracy \\
      --policies float32 mixed_bfloat16 tuned.json --html out.html

BUILD, DATA, CALLBACKS and a METRIC with a colon are module:name, of a module
that can be imported from the folder that the command is called in. A policy is
a name, such as float32+tf32, or the file of a plan. The first one is what the
others are compared with.

exit status:
  0  no policy is worse than tolerated
  1  one is worse, or failed
  2  the command was called in a wrong way
"""

# Options that are passed on as they are, when they are given.
_PASSED: dict[str, dict[str, Any]] = {
    "validation_data": {"metavar": "DATA", "help": "to take the metric on"},
    "metric": {"help": "what evaluate() returns, or module:name of a function"},
    "mode": {
        "choices": ["auto", "min", "max"],
        "help": "which end of the metric is better (default: by its name)",
    },
    "tolerance": {
        "type": float,
        "help": "share that the metric may be worse by (default: 0.002)",
    },
    "seeds": {"type": int, "help": "trainings of each policy (default: 3)"},
    "steps": {"type": int, "help": "of each training (default: 100)"},
    "blocks": {"type": int, "help": "of steps, timed in turns (default: 10)"},
    "batch_size": {"type": int, "help": "of arrays (default: 32)"},
    "callbacks": {"help": "module:name of a function that returns a list"},
    "resume": {
        "metavar": "FILE",
        "help": "keep what is finished there, and continue from it",
    },
}


def add_command(commands) -> None:
    """Adds the command to the parser's.

    Args:
        commands: What `ArgumentParser.add_subparsers` returned.
    """
    parser = options.add_command(
        commands,
        "compare",
        _run,
        ("json", "html", "backend"),
        help="train under several policies: speed, memory, accuracy",
        description="Trains a model under several policies in turns, on the "
        "same batches from the same weights. Prints the step time and memory "
        "of each, and whether its metric is within tolerance.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("build", help="function that returns a compiled model")
    parser.add_argument(
        "data", help="arrays, batches, or a function that returns them"
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        metavar="POLICY",
        help="(default: float32 mixed_bfloat16 mixed_float16)",
    )
    for name, given in _PASSED.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, default=argparse.SUPPRESS, **given)
    parser.add_argument(
        "--isolate", action="store_true", help="a process for each policy"
    )


def _run(arguments):
    # As for `python -m`, modules of the folder that it is called in.
    sys.path.insert(0, os.getcwd())
    if arguments.html:
        files.check_writable(arguments.html)
    result = _compare(_asked(arguments), arguments.json)
    _show(result, arguments)
    bad = {row["verdict"] for row in result.rows}
    return 1 if bad & {"failed", "worse"} else 0


def _asked(arguments):
    """What `compare_precisions` is given."""
    asked = {n: v for n, v in vars(arguments).items() if n in _PASSED}
    asked |= {
        "build": arguments.build,
        "data": arguments.data,
        "isolate": arguments.isolate,
    }
    if arguments.policies:
        asked["policies"] = _policies(arguments.policies)
    return asked


def _policies(texts):
    named = dict(map(_policy, texts))
    if len(named) < len(texts):
        raise ValueError(f"a policy is given twice: {' '.join(texts)}")
    return named


def _policy(text):
    """A name, and a policy or plan with what is set beside it."""
    policy, *settings = text.split("+")
    if not policy.endswith(".json"):
        return text, text
    from keras_mixprec.policies.plan import PrecisionPlan

    name = os.path.basename(policy).removesuffix(".json")
    return "+".join([name, *settings]), (PrecisionPlan.load(policy), *settings)


def _compare(asked, quiet):
    for name in "build", "data", "validation_data", "metric", "callbacks":
        module, colon, _ = str(asked.get(name)).partition(":")
        if colon:
            files.import_module(module)
    # Keras chooses its backend when it is imported.
    from keras_mixprec.analysis.comparison.run import compare_precisions

    try:
        return compare_precisions(**asked, verbose=0 if quiet else 1)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _show(result, arguments):
    from keras_mixprec.reporting.text_formats import to_json

    print(to_json(result.to_dict()) if arguments.json else result)
    if arguments.html:
        result.save_html(arguments.html)
        if not arguments.json:
            print(f"Written: {arguments.html}")
