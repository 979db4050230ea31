"""`keras-mixprec convert`: converts a saved model to 16 bits."""

import logging
import os
import sys
from typing import Any

from keras_mixprec.cli import files
from keras_mixprec.cli.options import Command, given
from keras_mixprec.formats import SIXTEEN_BITS

_OPTIONS: dict[str, Any] = {
    "model": "a .keras file",
    "--to FORMAT": {
        "required": True,
        "help": "float16, bfloat16, auto, or the file of a plan (.json)",
    },
    "--calibration FILE": {
        "required": True,
        "help": "an .npz file with the array x, or with each input by its "
        "name; or an .npy file with x",
    },
    "--out FILE": {"required": True, "help": "the .keras file to write"},
    "--tolerance": {
        "type": float,
        "help": "largest accepted error of an output, as a share of its norm "
        "(default: 0.05)",
    },
    "--batch-size": {"type": int, "help": "samples per batch (default: 32)"},
}


def _run(arguments):
    _check(arguments)
    files.say("Loading Keras")
    # Import Keras late, because it chooses its backend on import.
    from keras_mixprec.inference.convert import convert_for_inference
    from keras_mixprec.policies.plan import PrecisionPlan

    policy = arguments.to
    if policy.endswith(".json"):
        policy = PrecisionPlan.load(policy)
    x, _ = files.data(arguments.calibration)
    files.say(f"Loading {arguments.model}")
    model = files.model(arguments.model, arguments.modules)
    files.say(f"Converting to {arguments.to}, and comparing with float32")
    _show_progress()
    own = given(arguments, "tolerance batch_size")
    small, report = convert_for_inference(model, policy, calibration=x, **own)
    small.save(arguments.out)
    if arguments.html:
        report.save_html(arguments.html)
    print(report.to_json() if arguments.json else report)
    for path in filter(None, (arguments.out, arguments.html)):
        files.say(f"Written: {path}")
    return 0


def _show_progress():
    """Shows progress on stderr, because the search may take minutes."""
    log = logging.getLogger("keras_mixprec.inference")
    log.handlers = [logging.StreamHandler(sys.stderr)]
    log.setLevel(logging.INFO)
    log.propagate = False


def _check(arguments):
    """Raises if an argument is wrong, before any file is loaded."""
    formats, to = ("auto", *SIXTEEN_BITS), arguments.to
    if to not in formats and not to.endswith(".json"):
        raise ValueError(
            f"--to must be one of {', '.join(formats)}, or the file of a plan "
            f"(.json). Received: --to {to}"
        )
    if not arguments.out.endswith(".keras"):
        raise ValueError(
            f"--out must end in .keras. Received: --out {arguments.out}"
        )
    read = {arguments.model, arguments.calibration, to}
    read = set(map(os.path.realpath, read))
    for path in filter(None, (arguments.out, arguments.html)):
        files.check_writable(path)
        if os.path.realpath(path) in read:
            raise ValueError(
                "The output would replace an input. Write to another file. "
                f"Received: {path}"
            )


COMMAND = Command(
    _run,
    _OPTIONS,
    "json html import backend",
    "convert a saved model to 16 bits for inference",
    "Writes a model with 16-bit weights, which is half the size. Compares its "
    "outputs with the float32 model's on the calibration data.",
    "keras-mixprec convert model.keras --to float16 --calibration x.npz "
    "--out small.keras",
)
