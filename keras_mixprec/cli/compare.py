"""`keras-mixprec compare`: trains a model under several policies."""

import os
import sys
from typing import Any

from keras_mixprec.cli import files
from keras_mixprec.cli.options import Command, given

_PASSED = (
    "build data validation_data metric callbacks mode tolerance seeds steps "
    "blocks batch_size resume isolate policies"
)

_OPTIONS: dict[str, Any] = {
    "build": "module:name of a function that returns a compiled model",
    "data": "module:name of arrays, batches, or a function that returns them",
    "--policies POLICY": {
        "nargs": "+",
        "help": "policy names, such as float32+tf32, or files of plans; the "
        "first one is the reference (default: float32 mixed_bfloat16 "
        "mixed_float16)",
    },
    "--validation-data DATA": "module:name of data for the metric",
    "--metric": "a metric that evaluate() returns, or module:name of a "
    "function of the model (default: loss)",
    "--mode": {
        "choices": ["auto", "min", "max"],
        "help": "whether a lower (min) or a higher (max) metric is better; "
        "auto decides by the metric's name (default: auto)",
    },
    "--tolerance": {
        "type": float,
        "help": "how much worse the metric may be, as a share of the first "
        "policy's metric (default: 0.002)",
    },
    "--seeds": {"type": int, "help": "trainings per policy (default: 3)"},
    "--steps": {"type": int, "help": "steps per training (default: 100)"},
    "--blocks": {
        "type": int,
        "help": "number of blocks to time, which must divide --steps "
        "(default: 10)",
    },
    "--batch-size": {"type": int, "help": "samples per batch (default: 32)"},
    "--callbacks": "module:name of a function that returns a list of callbacks",
    "--resume FILE": "store finished trainings here, and continue from them",
    "--isolate": {
        "action": "store_true",
        "help": "train each policy in its own process, to measure memory on a "
        "CPU",
    },
}


def _run(arguments):
    # Like `python -m`, import modules from the current folder.
    sys.path.insert(0, os.getcwd())
    if arguments.html:
        files.check_writable(arguments.html)
    asked = given(arguments, _PASSED)
    if "policies" in asked:
        texts = asked["policies"]
        asked["policies"] = dict(map(_policy, texts))
        if len(asked["policies"]) < len(texts):
            raise ValueError(f"Name each policy once. Received: {texts}")
    # Import Keras late, because it chooses its backend on import.
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
    """Returns a policy's name, and the policy or plan with its settings."""
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
    "compare the speed, memory and accuracy of policies",
    "Trains a model under several policies in turns, on the same batches and "
    "from the same weights. Prints the step time, the memory and the metric of "
    "each policy.",
    "keras-mixprec compare digits:build digits:data --metric accuracy",
    "a policy failed, or is worse than the tolerance allows",
)
