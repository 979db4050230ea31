"""`keras-mixprec convert`: a saved model in 16 bits for inference."""

import argparse
import contextlib
import logging
import os
import sys

from keras_mixprec.cli import files, options
from keras_mixprec.formats import SIXTEEN_BITS

_EXAMPLE = """\
example:
  keras-mixprec convert model.keras --to float16 --calibration x.npz \\
    --out small.keras --html report.html

exit status: 0 = converted, 2 = usage error, such as a file that holds no
model, or a tolerance that cannot be kept.
"""


def add_command(commands) -> None:
    """Adds the command to the parser's.

    Args:
        commands: What `ArgumentParser.add_subparsers` returned.
    """
    parser = options.add_command(
        commands,
        "convert",
        _run,
        ("json", "html", "import", "backend"),
        help="convert a saved model to 16 bits for inference",
        description="Writes a model with weights of 16 bits, half the size, "
        "with outputs that were compared with float32's.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("model", help="a .keras file")
    parser.add_argument(
        "--to",
        required=True,
        metavar="FORMAT",
        help="float16, bfloat16, auto, or the file of a plan (.json)",
    )
    parser.add_argument(
        "--calibration",
        required=True,
        metavar="FILE",
        help="an .npz file with the array x, or with each input by its name; "
        "or an .npy file with x",
    )
    parser.add_argument(
        "--out", required=True, metavar="FILE", help="the .keras file to write"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=argparse.SUPPRESS,
        help="share of their norm that outputs may be off (default: 0.05)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=argparse.SUPPRESS,
        help="samples per batch (default: 32)",
    )


def _run(arguments):
    _check_format(arguments.to)
    _check_outputs(arguments)
    files.say("Loading Keras")
    # Keras chooses its backend when it is imported.
    from keras_mixprec.inference.convert import convert_for_inference

    policy = _policy(arguments.to)
    x, _ = files.data(arguments.calibration)
    files.say(f"Loading {arguments.model}")
    model = files.model(arguments.model, arguments.modules)
    files.say(f"Converting to {arguments.to}, and comparing with float32")
    names = "tolerance", "batch_size"
    given = {n: getattr(arguments, n) for n in names if n in arguments}
    with _progress():
        small, report = convert_for_inference(
            model, policy, calibration=x, **given
        )
    small.save(arguments.out)
    if arguments.html:
        report.save_html(arguments.html)
    print(report.to_json() if arguments.json else report)
    for path in filter(None, (arguments.out, arguments.html)):
        files.say(f"Written: {path}")
    return 0


@contextlib.contextmanager
def _progress():
    """Shows what the search of layers does, which may take minutes."""
    log = logging.getLogger("keras_mixprec.inference")
    handler = logging.StreamHandler(sys.stderr)
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


def _check_format(text):
    formats = ("auto", *SIXTEEN_BITS)
    if not text.endswith(".json"):
        if text not in formats:
            raise ValueError(
                f"--to must be one of {', '.join(formats)}, or the file of a "
                f"plan (.json), not {text!r}"
            )
    elif not os.path.isfile(text):
        raise ValueError(f"there is no file {text}")


def _check_outputs(arguments):
    if not arguments.out.endswith(".keras"):
        raise ValueError(f"--out must end in .keras, not {arguments.out!r}")
    for path in filter(None, (arguments.out, arguments.html)):
        files.check_writable(path)
    if os.path.realpath(arguments.out) == os.path.realpath(arguments.model):
        raise ValueError("--out must be another file than the model")
    names = "out", "model", "calibration", "to"
    taken = {os.path.realpath(getattr(arguments, name)) for name in names}
    if arguments.html and os.path.realpath(arguments.html) in taken:
        raise ValueError(
            "--html must be a file of its own, not one that is read or "
            f"written otherwise: {arguments.html!r}"
        )


def _policy(text):
    if not text.endswith(".json"):
        return text
    from keras_mixprec.policies.plan import PrecisionPlan

    return PrecisionPlan.load(text)
