"""`keras-mixprec compare`: the same training under several policies."""

import os
import sys
from typing import Any

from keras_mixprec.cli import files
from keras_mixprec.cli.options import Command, given

# Arguments that may name a module of the caller's.
_SOURCES = "build data validation_data metric callbacks"

_PASSED = f"{_SOURCES} mode tolerance seeds steps blocks batch_size resume"

_OPTIONS: dict[str, Any] = {
    "build": "module:name of a function that returns a compiled model",
    "data": "module:name of arrays, batches, or a function that returns them",
    "--policies": {
        "nargs": "+",
        "metavar": "POLICY",
        "help": "a name such as float32+tf32, or the file of a plan; all are "
        "compared with the first (default: float32 mixed_bfloat16 "
        "mixed_float16)",
    },
    "--validation-data": {"metavar": "DATA", "help": "data for the metric"},
    "--metric": "what evaluate() returns, or module:name of a function",
    "--mode": {
        "choices": ["auto", "min", "max"],
        "help": "which end of the metric is better (default: by its name)",
    },
    "--tolerance": {
        "type": float,
        "help": "share that the metric may be worse by (default: 0.002)",
    },
    "--seeds": {"type": int, "help": "trainings of each policy (default: 3)"},
    "--steps": {"type": int, "help": "of each training (default: 100)"},
    "--blocks": {"type": int, "help": "of steps, timed in turns (default: 10)"},
    "--batch-size": {"type": int, "help": "of arrays (default: 32)"},
    "--callbacks": "module:name of a function that returns a list",
    "--resume": {
        "metavar": "FILE",
        "help": "keep what is finished there, and continue from it",
    },
    "--isolate": {
        "action": "store_true",
        "help": "a process for each policy",
    },
}


def _run(arguments):
    # Like `python -m`, import modules from the current folder.
    sys.path.insert(0, os.getcwd())
    if arguments.html:
        files.check_writable(arguments.html)
    asked = given(arguments, f"{_PASSED} isolate policies")
    if "policies" in asked:
        texts = asked["policies"]
        asked["policies"] = dict(map(_policy, texts))
        if len(asked["policies"]) < len(texts):
            raise ValueError(f"Name each policy once. Received: {texts}")
    for source in given(arguments, _SOURCES).values():
        module, colon, _ = source.partition(":")
        if colon:
            files.import_module(module)
    # Keras chooses its backend when it is imported.
    from keras_mixprec.analysis.comparison.run import compare_precisions
    from keras_mixprec.reporting.text_formats import to_json

    result = compare_precisions(**asked, verbose=int(not arguments.json))
    print(to_json(result.to_dict()) if arguments.json else result)
    if arguments.html:
        result.save_html(arguments.html)
        files.say(f"Written: {arguments.html}")
    bad = {row["verdict"] for row in result.rows}
    return 1 if bad & {"failed", "worse"} else 0


def _policy(text):
    """Returns a name, and a policy or plan with its further settings."""
    policy, *settings = text.split("+")
    if not policy.endswith(".json"):
        return text, text
    from keras_mixprec.policies.plan import PrecisionPlan

    name = os.path.basename(policy).removesuffix(".json")
    return "+".join([name, *settings]), (PrecisionPlan.load(policy), *settings)


COMMAND = Command(
    _run,
    _OPTIONS,
    "json html backend",
    "train under several policies: speed, memory, accuracy",
    "Trains a model under several policies in turns, on the "
    "same batches from the same weights. Prints the step time and memory "
    "of each, and whether its metric is within tolerance.",
    "keras-mixprec compare digits:build digits:data --metric accuracy",
    "a policy is worse than tolerated, or failed",
)
