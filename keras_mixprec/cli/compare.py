"""`keras-mixprec compare`: the same training under several policies."""

import argparse
import importlib
import os
import sys
from typing import Any

from keras_mixprec.cli import files

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
  1  one is worse, or failed; of --check and --rerun: the verdicts are others
  2  the command was called in a wrong way
"""

_OUTPUTS = "html", "png", "sign_off", "logdir"

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
    "tokens_per_sample": {"type": int, "help": "for tokens per second"},
    "callbacks": {"help": "module:name of a function that returns a list"},
    "loss_scales": {
        "nargs": "+",
        "metavar": "SCALE",
        "help": "numbers and presets, for each float16 policy",
    },
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
    parser = commands.add_parser(
        "compare",
        help="train under several policies: speed, memory, accuracy",
        description="Trains a model under several policies in turns, on the "
        "same batches from the same weights. Prints the step time and memory "
        "of each, and whether its metric is within tolerance.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "build", nargs="?", help="function that returns a compiled model"
    )
    parser.add_argument(
        "data",
        nargs="?",
        help="arrays, batches, or a function that returns them",
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        metavar="POLICY",
        help="(default: float32 mixed_bfloat16 mixed_float16)",
    )
    for name, options in _PASSED.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, default=argparse.SUPPRESS, **options)
    parser.add_argument(
        "--isolate", action="store_true", help="a process for each policy"
    )
    _add_outputs(parser)
    parser.add_argument(
        "--backend",
        choices=["tensorflow", "jax", "torch"],
        default=argparse.SUPPRESS,
        help="Keras' backend (default: the one that Keras is set to)",
    )
    parser.set_defaults(run=_run)


def _add_outputs(parser):
    parser.add_argument("--json", action="store_true", help="print JSON")
    for flag, text in (
        ("--html", "also write the page to this file"),
        ("--png", "also write a picture to this file (needs matplotlib)"),
        ("--sign-off", "also write a record that a reviewer can check"),
    ):
        parser.add_argument(flag, metavar="FILE", help=text)
    parser.add_argument(
        "--logdir", help="also write a run per policy for TensorBoard"
    )
    parser.add_argument(
        "--check",
        metavar="FILE",
        help="compute the verdicts of a sign-off again; trains nothing",
    )
    parser.add_argument(
        "--rerun",
        metavar="FILE",
        help="run the comparison of a sign-off again, and compare the verdicts",
    )


def _run(arguments):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if "backend" in arguments:
        os.environ["KERAS_BACKEND"] = arguments.backend
    _check_alone(arguments)
    if arguments.check:
        return _check(arguments)
    # As for `python -m`, modules of the folder that it is called in.
    sys.path.insert(0, os.getcwd())
    _check_outputs(arguments)
    if arguments.rerun:
        return _rerun(arguments)
    result = _compare(_asked(arguments), arguments.json)
    _show(result, arguments)
    bad = {row["verdict"] for row in result.rows}
    return 1 if bad & {"failed", "worse"} else 0


def _check_alone(arguments):
    """Raises where a sign-off has to say what the command line says too."""
    signed = {"check": arguments.check, "rerun": arguments.rerun}
    flags = [f"--{name}" for name, given in signed.items() if given]
    if not flags:
        return
    plain = ["build", "data", "policies", "isolate"]
    if arguments.check:
        plain += ["rerun", "json", *_OUTPUTS]
    others = [name for name in plain if getattr(arguments, name)]
    others += [name for name in _PASSED if name in arguments]
    if others:
        raise ValueError(
            f"{flags[0]} takes what is compared from the file alone: leave "
            f"out {', '.join(name.replace('_', '-') for name in others)}"
        )


def _check_outputs(arguments):
    """Raises before training for what could not be written after it."""
    if arguments.png:
        importlib.import_module("matplotlib")
    for name in _OUTPUTS:
        if path := getattr(arguments, name):
            files.check_writable(path, is_folder=name == "logdir")


def _asked(arguments):
    """What `compare_precisions` is given."""
    if arguments.build is None or arguments.data is None:
        raise ValueError(
            "BUILD and DATA are needed, such as: "
            "keras-mixprec compare digits:build digits:data"
        )
    asked = {n: v for n, v in vars(arguments).items() if n in _PASSED}
    asked |= {
        "build": arguments.build,
        "data": arguments.data,
        "isolate": arguments.isolate,
    }
    if "loss_scales" in asked:
        asked["loss_scales"] = [_number(s) for s in asked["loss_scales"]]
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


def _number(text):
    try:
        return float(text)
    except ValueError:
        return text


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
    for path, save in (
        (arguments.html, result.save_html),
        (arguments.png, result.save_png),
        (arguments.sign_off, result.sign_off),
        (arguments.logdir, result.log_hparams),
    ):
        if path:
            save(path)
            if not arguments.json:
                print(f"Written: {path}")


def _check(arguments):
    from keras_mixprec.analysis.comparison import sign_off

    found = sign_off.problems(sign_off.read(arguments.check))
    return _say(found, "The verdicts follow from the measurements.")


def _rerun(arguments):
    from keras_mixprec.analysis.comparison import sign_off

    signed = sign_off.read(arguments.rerun)
    before = signed["record"]
    if "backend" not in arguments:
        # Keras chooses its backend when it is imported.
        os.environ["KERAS_BACKEND"] = before["backend"]
    result = _compare(sign_off.arguments(before), arguments.json)
    _show(result, arguments)
    for line in sign_off.circumstances(before, result.record):
        files.say(f"note: {line}")
    found = sign_off.changed_verdicts(signed["verdicts"], result.rows)
    if before["batches_digest"] != result.record["batches_digest"]:
        found.append("the batches are not those that were signed")
    return _say(found, "The verdicts are those that were signed.")


def _say(problems, fine):
    for problem in problems:
        files.say(f"keras-mixprec: {problem}")
    if not problems:
        print(fine)
    return 1 if problems else 0
